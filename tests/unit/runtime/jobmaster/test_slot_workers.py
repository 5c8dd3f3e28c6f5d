"""The workers of slots: spares, losses, silence, and warm workers that another slot adopts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import pytest

from ckpt_runtime.jobmaster.slot_pool import MAX_FAILURES
from ckpt_runtime.network.agent_messages import (
    AdoptWorker,
    AgentHeartbeat,
    KillWorker,
    Ping,
    ShutdownAgent,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.connections import MalformedMessageError
from ckpt_runtime.network.control_messages import (
    FollowAgent,
    Following,
    WorkerHeartbeat,
)
from tests.unit.runtime.jobmaster.slot_world import (
    ENDED,
    LONG_AGO,
    TIMEOUT_S,
    Clock,
    Owner,
    World,
    holding,
    opened,
    opened_idle,
    settle,
)


class TestWorkers:
    async def test_the_spare_takes_over_and_another_is_started(self) -> None:
        async with holding() as (world, owner, slot):
            first, spare = world.held(slot)
            world.lose(world.workers[first.worker_id], "connection reset")
            assert slot.worker is spare
            await asyncio.wait_for(owner.changed.wait(), TIMEOUT_S)
            assert owner.events == [("worker lost", "0", f"worker {first.worker_id} was lost: connection reset")]
            assert world.agents["0"].of(KillWorker) == [KillWorker(first.worker_id)]
            await settle()
            assert slot.spare is not None

    async def test_an_exit_that_the_agent_reports_names_the_code_and_counts_once(self) -> None:
        async with holding() as (world, owner, slot):
            assert slot.worker is not None
            worker_id = slot.worker.worker_id
            exited = WorkerExited(worker_id, -9)
            world.pool.peer_message(world.agents["0"], exited)
            world.lose(world.workers[worker_id])
            world.pool.peer_message(world.agents["0"], exited)
            assert len(owner.events) == 1
            assert "exit code -9" in owner.events[0][2]

    async def test_a_lost_connection_waits_for_the_exit_code_that_the_agent_reports(self) -> None:
        async with holding(loss_grace_s=60) as (world, owner, slot):
            first, spare = world.held(slot)
            world.lose(world.workers[first.worker_id], "connection reset")
            assert (slot.worker, owner.events) == (spare, [])
            assert world.agents["0"].of(KillWorker) == [], "no worker has been killed so far"
            exited = WorkerExited(first.worker_id, -9)
            world.pool.peer_message(world.agents["0"], exited)
            ((kind, _, reason),) = owner.events
            assert kind == "worker lost"
            assert "exit code -9 (SIGKILL: killed by another process, most often by the kernel because memory" in reason

    async def test_log_of_a_worker_is_kept_if_its_end_was_not_ordered(self) -> None:
        async with holding() as (world, _, slot):
            ordered, unexpected = world.held(slot)
            world.pool.replace_worker(slot)
            for worker in (ordered, unexpected):
                exited = WorkerExited(worker.worker_id, -9, "the last line")
                world.pool.peer_message(world.agents["0"], exited)
            (log,) = world.pool.ended_logs
            assert (log.worker_id, log.slot_id, log.text) == (unexpected.worker_id, "0", "the last line")
            assert "SIGKILL" in log.reason

    async def test_worker_that_dies_while_starting_is_started_again_after_a_pause(self, world: World) -> None:
        world.automatic = False
        request = await world.requested(1)
        agent = world.agent()
        (spawn,) = agent.of(SpawnWorker)
        exited = WorkerExited(spawn.worker, 1)
        world.pool.peer_message(agent, exited)
        assert len(agent.of(SpawnWorker)) == 1
        await world.spawn_again()
        assert agent.of(SpawnWorker)[1].worker != spawn.worker
        world.spawned("0", 1)
        await request

    async def test_slowly_starting_worker_is_awaited_while_it_makes_progress(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        clock = Clock()

        def warnings() -> list[str]:
            return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]

        async with opened(
            automatic=False,
            clock=clock,
            heartbeat_timeout_s=1000000000.0,
            request_timeout_s=TIMEOUT_S,
            registration_timeout_s=30,
        ) as world:
            request = await world.requested(1)
            agent = world.agent()
            (spawn,) = agent.of(SpawnWorker)
            for figure in (3, 4, 90, 7, 7):  # its template's at first, then its own
                clock.now += 20
                world.pool.check()
                assert agent.of(Ping)[-1] == Ping((spawn.worker,))
                world.pool.peer_message(agent, AgentHeartbeat({spawn.worker: figure, "another": figure}))
            assert (agent.of(KillWorker), warnings()) == ([], [])
            clock.now += 10
            world.pool.check()
            assert agent.of(KillWorker) == []
            clock.now += 1
            world.pool.check()
            assert agent.of(KillWorker) == [KillWorker(spawn.worker)]
            reported = f"worker {spawn.worker} is killed: it has not registered, and has made no progress for 31 s"
            assert warnings() == [reported]
            clock.now += 29
            world.pool.check()
            assert len(agent.of(KillWorker)) == 1
            world.pool.peer_message(agent, WorkerExited(spawn.worker, -9))
            await world.spawn_again()
            world.spawned("0", 1)
            assert len(await request) == 1

    @pytest.mark.parametrize(("failures", "fresh"), [(MAX_FAILURES - 1, False), (MAX_FAILURES, True)])
    async def test_worker_in_which_a_job_keeps_failing_is_replaced_before_the_next_attempt(
        self, failures: int, fresh: bool
    ) -> None:
        async with opened() as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            await settle()
            first = held[0].worker
            assert first is not None
            first.failures = failures
            (slot,) = await world.pool.acquire(owner, 1, held)
            assert (slot.worker is not first) is fresh
            assert bool(world.agents["0"].of(KillWorker)) is fresh
            assert owner.events == []

    async def test_a_lost_spare_is_replaced_quietly(self) -> None:
        async with holding() as (world, owner, slot):
            active, spare = slot.worker, slot.spare
            assert spare is not None
            world.lose(world.workers[spare.worker_id])
            await settle()
            assert slot.worker is active
            assert slot.spare is not None
            assert slot.spare is not spare
            assert owner.events == []

    async def test_messages_of_the_active_worker_of_a_held_slot_are_the_only_ones_accepted(self) -> None:
        async with holding() as (world, owner, slot):
            assert slot.worker is not None
            assert slot.spare is not None
            pool, beat, peer = world.pool, WorkerHeartbeat(-1), slot.worker.peer
            pool.peer_message(slot.spare.peer, beat)
            pool.peer_message(peer, beat)
            pool.peer_message(slot.agent, AgentHeartbeat())
            assert owner.events == [("message", "0", beat)]
            pool.release(slot)
            pool.peer_message(peer, beat)
            assert len(owner.events) == 1

    async def test_a_worker_that_was_given_no_work_has_nothing_to_report(self) -> None:
        async with holding() as (world, _, slot):
            assert slot.worker is not None
            assert slot.spare is not None
            for worker in slot.workers:
                with pytest.raises(MalformedMessageError, match="EndOfDataReport came from a worker that has"):
                    world.pool.peer_message(worker.peer, ENDED)
                with pytest.raises(MalformedMessageError, match="without a request that it follows an agent"):
                    world.pool.peer_message(worker.peer, Following())
            slot.worker.used = True
            world.pool.peer_message(slot.worker.peer, ENDED)

    @pytest.mark.parametrize("which", ["active", "spare"])
    async def test_a_process_that_breaks_the_protocol_is_killed_and_reported_at_once(self, which: str) -> None:
        async with holding(loss_grace_s=60) as (world, owner, slot):
            worker = slot.worker if which == "active" else slot.spare
            assert worker is not None
            world.lose(world.workers[worker.worker_id], "the message X is malformed", explained=True)
            assert world.agents["0"].of(KillWorker) == [KillWorker(worker.worker_id)]
            await settle()
            assert worker not in slot.workers
            assert len(slot.workers) == 2
            reported = ("worker lost", "0", f"worker {worker.worker_id} was lost: the message X is malformed")
            assert owner.events == ([reported] if which == "active" else [])

    async def test_an_agent_that_breaks_the_protocol_is_the_reason_for_its_lost_slot(self) -> None:
        async with holding(loss_grace_s=60) as (world, owner, _):
            world.lose(world.agents["0"], "the message X is malformed", explained=True)
            reason = "slot 0 was lost: its slot agent was lost: the message X is malformed"
            assert owner.events == [("slot lost", "0", reason)]

    async def test_second_agent_of_a_slot_is_refused_and_the_first_keeps_the_slot(self, world: World) -> None:
        owner = Owner()
        (slot,) = await world.pool.acquire(owner, 1, [])
        first = world.agents["0"]
        second = world.agent()
        assert second.closed
        assert second.sent == [ShutdownAgent()]
        assert world.pool.all() == (slot,)
        assert slot.agent is first
        assert owner.events == []

    async def test_worker_of_an_unknown_slot_is_refused(self, world: World) -> None:
        assert world.worker("7-7", "w").closed


class TestLosses:
    async def test_lost_agent_costs_only_its_own_slot(self, world: World) -> None:
        owner, other = Owner(), Owner()
        lost, kept = await world.pool.acquire(owner, 2, [])
        (elsewhere,) = await world.pool.acquire(other, 1, [])
        await settle()
        world.lose(world.agents["0"], "reset")
        await asyncio.wait_for(owner.changed.wait(), TIMEOUT_S)
        assert owner.events == [("slot lost", "0", "slot 0 was lost: its slot agent was lost: reset")]
        assert other.events == []
        assert world.pool.all() == (kept, elsewhere)
        assert world.agents["1"].of(ShutdownAgent) == []
        assert all(peer.closed for worker, peer in world.workers.items() if worker.startswith("0-"))
        slots = await world.pool.acquire(owner, 2, [lost, kept])
        assert [slot.slot_id for slot in slots] == ["1", "3"]

    async def test_sparks_reason_for_the_end_of_a_slot_is_the_reason_for_its_loss(self) -> None:
        async with holding(loss_grace_s=60) as (world, owner, _):
            ended, world.ended["0"] = world.ended["0"], lambda slot_id, error: None
            world.lose(world.agents["0"], "reset")
            await settle()
            assert owner.events == []
            ended("0", RuntimeError("executor 1 was lost: Command exited with code 137"))
            await asyncio.wait_for(owner.changed.wait(), TIMEOUT_S)
            assert [event[2] for event in owner.events] == [
                "slot 0 was lost: executor 1 was lost: Command exited with code 137"
            ]

    async def test_a_slot_whose_task_ends_with_an_error_is_lost(self, world: World) -> None:
        owner = Owner()
        await world.pool.acquire(owner, 1, [])
        world.ended["0"]("0", RuntimeError("executor lost\nwith a long trace"))
        await settle()
        assert owner.events == [("slot lost", "0", "slot 0 was lost: executor lost")]

    async def test_a_silent_agent_is_given_up_and_its_task_cancelled(self) -> None:
        async with opened(heartbeat_interval_s=0.001) as world:
            owner = Owner()
            await world.pool.acquire(owner, 1, [])
            world.agents["0"].last_heard = LONG_AGO
            await asyncio.wait_for(owner.changed.wait(), TIMEOUT_S)
            assert "no heartbeat for 5 s" in owner.events[0][2]
            assert world.cancelled == ["0"]

    @pytest.mark.parametrize("is_spare", [False, True])
    async def test_a_silent_worker_is_killed_and_its_owner_is_notified_unless_it_was_a_spare(
        self, is_spare: bool
    ) -> None:
        async with holding() as (world, owner, slot):
            active, spare = world.held(slot)
            silent = spare if is_spare else active
            world.workers[silent.worker_id].last_heard = LONG_AGO
            world.pool._check_heartbeats(slot, time.monotonic())
            assert slot.worker is (active if is_spare else spare)
            assert KillWorker(silent.worker_id) in world.agents["0"].of(KillWorker)
            assert ["no heartbeat" in str(reason) for _, _, reason in owner.events] == ([] if is_spare else [True])

    async def test_agents_are_asked_for_a_sign_of_life(self) -> None:
        async with opened(heartbeat_interval_s=0.001) as world:
            await world.pool.acquire(Owner(), 1, [])
            agent, pinged = world.agents["0"], asyncio.Event()
            agent.send = lambda message: pinged.set() if isinstance(message, Ping) else None  # type: ignore[method-assign]
            await asyncio.wait_for(pinged.wait(), TIMEOUT_S)

    async def test_a_driver_that_stood_still_reads_what_its_peers_have_sent_before_it_judges_them(self) -> None:
        class Freezes(Clock):
            wakes: Callable[[], None] | None = None

            def __call__(self) -> float:
                if self.wakes is not None:
                    self.now += 100
                    asyncio.get_running_loop().call_soon(self.wakes)
                    self.wakes = None
                return super().__call__()

        clock = Freezes()

        async with opened(heartbeat_interval_s=0.001, clock=clock) as world:
            owner, judged = Owner(), asyncio.Event()
            (slot,) = await world.pool.acquire(owner, 1, [])
            await settle()

            def heard() -> None:
                for peer in (*world.agents.values(), *world.workers.values()):
                    peer.last_heard = clock.now

            def wakes() -> None:
                heard()
                world.agents["0"].send = lambda _: judged.set()  # type: ignore[method-assign]

            heard()
            clock.wakes = wakes
            await asyncio.wait_for(judged.wait(), TIMEOUT_S)
            assert owner.events == []
            assert not slot.lost


class TestAdoption:
    """What becomes of the warm workers of slots whose agents are gone."""

    async def test_the_slot_that_replaces_one_adopts_its_workers_that_never_worked(self) -> None:
        async with opened(machine="m") as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 2, [])
            await settle()
            lost = held[0]
            assert lost.worker is not None
            assert lost.spare is not None
            used, spare = lost.worker.worker_id, lost.spare.worker_id
            lost.worker.used = True
            world.lose(world.agents["0"])
            slots = await world.pool.acquire(owner, 2, held)
            assert [slot.slot_id for slot in slots] == ["1", "2"]
            assert slots[1].worker is not None
            assert slots[1].worker.worker_id == spare
            assert world.workers[used].closed
            agent, worker = world.agents["2"], world.workers[spare]
            assert agent.of(AdoptWorker) == [AdoptWorker(spare, worker.registration.process, "/w")]
            assert worker.of(FollowAgent) == [FollowAgent(agent.registration.process)]

    async def test_a_slot_that_is_on_its_way_adopts_before_another_one_gets_a_spare(self) -> None:
        async with opened(machine="m") as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 2, [])
            await settle()
            spares = {slot.spare.worker_id for slot in held if slot.spare is not None}
            for slot in held:
                assert slot.worker is not None
                slot.worker.used = True
            world.automatic = False
            for slot_id in ("0", "1"):
                world.lose(world.agents[slot_id])
            request = await world.requested(2, owner, held)
            world.automatic = True
            for slot_id in ("2", "3"):
                world.agent(slot_id)
                await settle()
            assert {slot.worker.worker_id for slot in await request if slot.worker is not None} == spares

    async def test_messages_of_an_adopted_worker_reach_the_owner(self) -> None:
        async with opened(machine="m") as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            world.lose(world.agents["0"])
            (slot,) = await world.pool.acquire(owner, 1, held)
            assert slot.worker is not None
            slot.worker.used = True
            world.pool.peer_message(slot.worker.peer, ENDED)
            assert owner.events[-1] == ("message", "1", ENDED)
            owner.changed.clear()
            world.lose(world.workers[slot.worker.worker_id])
            await asyncio.wait_for(owner.changed.wait(), TIMEOUT_S)
            assert owner.events[-1][:2] == ("worker lost", "1")

    async def test_agents_on_other_hosts_start_their_own_workers(self) -> None:
        async with opened(machine="m") as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            await settle()
            old: list[Any] = list(world.workers.values())
            world.lose(world.agents["0"])
            world.machine = "another"
            (slot,) = await world.pool.acquire(owner, 1, held)
            assert slot.worker is not None
            assert slot.worker.peer not in old
            assert world.agents["1"].of(AdoptWorker) == []
            assert not any(peer.closed for peer in old)

    @pytest.mark.parametrize("failure", ["agent cannot", "worker is lost", "worker is silent"])
    async def test_an_adoption_that_fails_gives_way_to_a_cold_start(self, failure: str) -> None:
        async with opened(machine="m") as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            await settle()
            world.automatic = False
            first = world.agents["0"]
            first.send = first.sent.append  # type: ignore[method-assign, assignment]
            worker, spare = world.workers.values()
            world.lose(spare)
            worker.send = worker.sent.append  # type: ignore[method-assign, assignment]
            world.lose(first)
            request = await world.requested(1, owner, held)
            agent = world.agent("1")
            assert len(agent.of(AdoptWorker)) == 1
            if failure == "agent cannot":
                exited = WorkerExited(worker.registration.worker, None)
                world.pool.peer_message(agent, exited)
            elif failure == "worker is lost":
                world.lose(worker)
            else:
                worker.last_heard = LONG_AGO
                world.pool._check_heartbeats(world.pool.all()[0], time.monotonic())
                assert len(agent.of(KillWorker)) == 1
            async with asyncio.timeout(TIMEOUT_S):
                while not agent.of(SpawnWorker):
                    await asyncio.sleep(0.001)
            assert worker.closed
            world.spawned("1")
            assert [slot.slot_id for slot in await request] == ["1"]

    async def test_worker_that_registers_after_the_loss_of_its_agent_is_adopted(self) -> None:
        async with opened(automatic=False, machine="m") as world:
            owner = Owner()
            request = await world.requested(1, owner)
            first = world.agent()
            world.lose(first)
            worker_id = first.of(SpawnWorker)[0].worker
            assert first.of(ShutdownAgent) == [ShutdownAgent((worker_id,))]
            worker = world.worker("0", worker_id)
            worker.send = lambda message: world.work(worker, message)  # type: ignore[method-assign]
            world.automatic = True
            (slot,) = await request
            assert slot.worker is not None
            assert slot.worker.worker_id == worker_id

    async def test_an_orphan_that_ended_is_forgotten(self) -> None:
        async with opened(machine="m") as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            await settle()
            world.lose(world.agents["0"])
            for worker in list(world.workers.values()):
                world.lose(worker)
            await world.pool.acquire(owner, 1, held)
            assert world.agents["1"].of(AdoptWorker) == []

    async def test_an_unused_slot_keeps_no_workers(self) -> None:
        async with opened_idle(machine="m") as (world, clock):
            (slot,) = await world.pool.acquire(Owner(), 1, [])
            await settle()
            world.pool.release(slot)
            clock.now += 100
            world.pool.check()
            assert world.agents["0"].of(ShutdownAgent) == [ShutdownAgent()]
            assert all(worker.closed for worker in world.workers.values())

    async def test_stopping_pool_releases_its_orphans(self) -> None:
        async with opened(machine="m") as world:
            await world.pool.acquire(Owner(), 1, [])
            await settle()
            world.lose(world.agents["0"])
            world.ended["0"]("0", RuntimeError("lost"))
            await settle()
            await world.pool.stop()
            assert all(worker.closed for worker in world.workers.values())


class TestSpares:
    async def test_spares_start_after_all_workers_of_their_host(self, world: World) -> None:
        world.automatic = False
        request = await world.requested(2)
        first, second = world.agent("0"), world.agent("1")
        world.spawned()
        assert len(first.of(SpawnWorker)) == 1
        world.spawned("1")
        assert len(first.of(SpawnWorker)) == len(second.of(SpawnWorker)) == 2
        await request

    async def test_spares_start_after_the_job_has_deployed(self) -> None:
        async with holding(spare_pause_s=0.05) as (world, _, slot):
            assert len(world.agents["0"].of(SpawnWorker)) == 1
            async with asyncio.timeout(TIMEOUT_S):
                while slot.spare is None:
                    await asyncio.sleep(0.001)
