"""Slots with agents and workers played by hand: launching, spares, losses, and giving back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.control_endpoint import AgentPeer, WorkerPeer
from ckpt_runtime.jobmaster.gateway_values import NotFound, NotReady
from ckpt_runtime.jobmaster.slot_pool import MAX_FAILURES, SlotPool
from ckpt_runtime.jobmaster.slots import Slot, SlotEnded, SlotsUnavailableError, SlotTimes
from ckpt_runtime.network.agent_messages import (
    AdoptWorker,
    AgentCommand,
    AgentHeartbeat,
    KillWorker,
    Ping,
    ProcessIdentity,
    RegisterAgent,
    RegisterWorker,
    ShutdownAgent,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.connections import MalformedMessageError
from ckpt_runtime.network.control_messages import (
    DeploymentMessage,
    DumpThreads,
    EndOfDataReport,
    FollowAgent,
    Following,
    RecentLog,
    ThreadDump,
    WorkerCommand,
    WorkerHeartbeat,
)

LONG_AGO = -1e9
ENDED = EndOfDataReport(1, "v", 0)
M = TypeVar("M")
TIMEOUT_S = 60


class Notes:
    """Instead of a socket: notes what is sent."""

    sent: list[AgentCommand | WorkerCommand]

    def __init__(self, registration: RegisterAgent | RegisterWorker) -> None:
        super().__init__(None, registration)  # type: ignore[call-arg]
        self.sent = []

    def send(self, message: AgentCommand | WorkerCommand) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.closed = True

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.sent if isinstance(message, kind)]


class FakeAgent(Notes, AgentPeer):
    """A slot agent."""


class FakeWorker(Notes, WorkerPeer):
    """A worker."""


class Owner:
    """A job that notes what happens to its slots."""

    def __init__(self) -> None:
        self.events: list[tuple[str, str, object]] = []
        self.told = asyncio.Event()
        self.waits: list[str] = []

    def worker_message(self, slot: Slot, message: DeploymentMessage) -> None:
        self.events.append(("message", slot.slot_id, message))
        self.told.set()

    def worker_lost(self, slot: Slot, reason: str) -> None:
        self.events.append(("worker lost", slot.slot_id, reason))
        self.told.set()

    def slot_lost(self, slot: Slot, reason: str) -> None:
        self.events.append(("slot lost", slot.slot_id, reason))
        self.told.set()

    def slots_awaited(self, reason: str) -> None:
        self.waits.append(reason)


class World:
    """A pool and its provider. ``automatic`` answers launches and spawns at once."""

    def __init__(self, automatic: bool = True, machine: str = "", **settings: Any) -> None:
        self.automatic = automatic
        self.machine = machine
        self.cpus: tuple[int, ...] = (0, 1)
        self.launched: list[str] = []
        self.cancelled: list[str] = []
        self.ended: dict[str, SlotEnded] = {}
        self.agents: dict[str, FakeAgent] = {}
        self.workers: dict[str, FakeWorker] = {}
        self.launch_error: Exception | None = None
        times = {"heartbeat_interval_s": 60, "heartbeat_timeout_s": 5, "idle_timeout_s": 50, "request_timeout_s": 10}
        times |= {"spare_pause_s": 0, "loss_grace_s": 0}
        clock = settings.pop("clock", time.monotonic)
        self.pool = SlotPool(self, "secret", SlotTimes(**{**times, **settings}), clock)
        self.pool.start(1234)

    def requests_wait(self, timeout_s: float) -> None:
        """From now on: on a busy machine the requests before take longer than one that fails should."""
        self.pool._times = replace(self.pool._times, request_timeout_s=timeout_s)

    def watch_capacity(self, changed: Callable[[], None]) -> None:
        self.capacity_changed = changed

    def launch(self, slot_id: str, control_port: int, secret: str, ended: SlotEnded) -> None:
        assert (control_port, secret) == (1234, "secret")
        if self.launch_error is not None:
            raise self.launch_error
        self.launched.append(slot_id)
        self.ended[slot_id] = ended
        if self.automatic:
            self.agent(slot_id)

    capacity: int | None = None

    def cancel(self, slot_id: str) -> None:
        self.cancelled.append(slot_id)

    def agent(self, slot_id: str = "0") -> FakeAgent:
        process = ProcessIdentity(self.machine, 1 + len(self.agents), 1)
        peer = FakeAgent(RegisterAgent(slot_id, "h", self.cpus, process))
        self.agents[peer.slot] = peer
        if self.automatic:
            peer.send = lambda message: self.obey(peer, message)  # type: ignore[method-assign]
        self.pool.peer_registered(peer)
        return peer

    def obey(self, agent: FakeAgent, message: AgentCommand) -> None:
        agent.sent.append(message)
        loop = asyncio.get_running_loop()
        if isinstance(message, SpawnWorker):
            loop.call_soon(self.worker, agent.slot, message.worker)
        elif isinstance(message, ShutdownAgent):
            loop.call_soon(self.ended[agent.slot], agent.slot, None)

    def worker(self, slot: str, worker_id: str) -> FakeWorker:
        process = ProcessIdentity(self.machine, 1000 + len(self.workers), 2)
        peer = self.workers[worker_id] = FakeWorker(RegisterWorker(slot, worker_id, ("h", 9), process, "/w"))
        if self.automatic:
            peer.send = lambda message: self.work(peer, message)  # type: ignore[method-assign]
        self.pool.peer_registered(peer)
        return peer

    def work(self, worker: FakeWorker, message: WorkerCommand) -> None:
        worker.sent.append(message)
        if isinstance(message, FollowAgent):
            asyncio.get_running_loop().call_soon(self.pool.peer_message, worker, Following())

    def lose(self, peer: FakeAgent | FakeWorker, reason: str = "gone", *, explained: bool = False) -> None:
        """As the endpoint does: a peer that was closed on this side is not reported."""
        if not peer.closed:
            peer.closed = True
            self.pool.peer_lost(peer, reason, explained=explained)


async def settle() -> None:
    """Lets everything that is ready run."""
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[World]:
    world = World(**settings)
    yield world
    if world.pool._watch is not None:
        world.pool._watch.cancel()


@asynccontextmanager
async def holding(**times: Any) -> AsyncIterator[tuple[World, Owner, Slot]]:
    """A world in which an owner holds the only slot, whose worker and spare are ready."""
    async with opened(**times) as world:
        owner = Owner()
        (slot,) = await world.pool.acquire(owner, 1, [])
        await settle()
        yield world, owner, slot


class TestQuestions:
    async def test_the_active_worker_answers_and_an_answer_that_comes_too_late_is_dropped(self) -> None:
        async with opened() as world:
            (slot,) = await world.pool.acquire(Owner(), 1, [])
            assert slot.worker is not None
            peer = slot.worker.peer
            asked = asyncio.create_task(world.pool.ask("0", DumpThreads, ThreadDump))
            await settle()
            [question] = world.workers[slot.worker.worker_id].of(DumpThreads)
            answer = ThreadDump(question.question, ())
            world.pool.peer_message(peer, answer)
            assert await asked == answer
            world.pool.peer_message(peer, answer)

    async def test_an_answer_that_was_not_asked_for_is_malformed(self) -> None:
        async with opened() as world:
            first, second = await world.pool.acquire(Owner(), 2, [])
            assert first.worker is not None
            assert second.worker is not None
            asked = asyncio.create_task(world.pool.ask("0", DumpThreads, ThreadDump))
            await settle()
            [question] = world.workers[first.worker.worker_id].of(DumpThreads)
            with pytest.raises(MalformedMessageError, match="RecentLog does not answer a request"):
                world.pool.peer_message(first.worker.peer, RecentLog(question.question, ""))
            with pytest.raises(MalformedMessageError, match="ThreadDump does not answer a request"):
                world.pool.peer_message(second.worker.peer, ThreadDump(question.question, ()))
            asked.cancel()

    async def test_worker_that_does_not_answer_or_is_lost_or_unknown_is_named(self) -> None:
        async with opened() as world:
            (slot,) = await world.pool.acquire(Owner(), 1, [])
            assert slot.worker is not None
            name = slot.worker.worker_id
            with pytest.raises(NotReady, match=f"worker {name} has not answered within 0.01 s"):
                await world.pool.ask("0", DumpThreads, ThreadDump, 0.01)
            asked = asyncio.create_task(world.pool.ask("0", DumpThreads, ThreadDump))
            await settle()
            world.lose(world.workers[name])
            with pytest.raises(NotReady, match=f"worker {name} was lost"):
                await asked
            with pytest.raises(NotFound, match="Task manager 9-9 not found"):
                await world.pool.ask("9-9", DumpThreads, ThreadDump)


class TestAcquire:
    async def test_each_slot_is_launched_by_itself_and_all_come_at_once_when_their_workers_are_ready(self) -> None:
        async with opened() as world:
            owner = Owner()
            slots = await world.pool.acquire(owner, 3, [])
            assert [slot.slot_id for slot in slots] == ["0", "1", "2"]
            assert all(slot.worker is not None and slot.owner is owner for slot in slots)
            assert world.launched == ["0", "1", "2"]
            assert (world.pool.total, world.pool.available) == (3, 0)
            assert slots[0].worker is not None
            assert slots[0].worker.data_address == ("h", 9)
            assert (slots[0].host, slots[0].cpus) == ("h", (0, 1))

    async def test_a_slot_gets_one_worker_after_the_other_and_no_third(self) -> None:
        async with opened(automatic=False) as world:
            request = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            await settle()
            agent = world.agent()
            assert len(agent.of(SpawnWorker)) == 1
            world.worker("0", agent.of(SpawnWorker)[0].worker)
            await settle()
            (slot,) = await request
            assert len(agent.of(SpawnWorker)) == 2
            world.worker("0", agent.of(SpawnWorker)[1].worker)
            assert slot.spare is not None
            assert len(agent.of(SpawnWorker)) == 2

    async def test_held_slots_are_used_first_and_free_ones_next(self) -> None:
        async with opened() as world:
            first, second = Owner(), Owner()
            held = await world.pool.acquire(first, 1, [])
            others = await world.pool.acquire(second, 1, [])
            world.pool.release(others[0])
            slots = await world.pool.acquire(first, 2, held)
            assert slots == [held[0], others[0]]
            assert world.launched == ["0", "1"]

    async def test_a_held_slot_that_was_lost_is_replaced(self) -> None:
        async with opened() as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            world.lose(world.agents["0"])
            slots = await world.pool.acquire(owner, 1, held)
            assert [slot.slot_id for slot in slots] == ["1"]

    async def test_a_launch_that_fails_says_why_and_the_next_one_starts_afresh(self) -> None:
        async with opened(automatic=False) as world:
            request = asyncio.create_task(world.pool.acquire(Owner(), 2, []))
            await settle()
            world.ended["0"]("0", RuntimeError("no Python here"))
            await settle()
            assert not request.done(), "the other one may start"
            assert world.launched == ["0", "1"], "and shows whether there can be any"
            world.ended["1"]("1", RuntimeError("no Python there"))
            with pytest.raises(SlotsUnavailableError, match="could not be started: no Python there"):
                await request
            world.automatic = True
            assert len(await world.pool.acquire(Owner(), 2, [])) == 2

    async def test_a_provider_that_cannot_launch_is_asked_again_next_time(self) -> None:
        async with opened() as world:
            world.launch_error = OSError("no processes left")
            with pytest.raises(SlotsUnavailableError, match="could not be launched: no processes left"):
                await world.pool.acquire(Owner(), 1, [])
            world.launch_error = None
            assert len(await world.pool.acquire(Owner(), 1, [])) == 1

    async def test_a_failure_without_a_waiting_request_does_not_fail_the_next_request(self) -> None:
        async with opened(automatic=False) as world:
            request = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            await settle()
            request.cancel()
            await settle()
            world.ended["0"]("0", RuntimeError("late"))
            await settle()
            world.automatic = True
            assert len(await world.pool.acquire(Owner(), 1, [])) == 1

    async def test_end_of_a_slot_that_lost_its_agent_does_not_count_as_a_launch_failure(self) -> None:
        async with opened() as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            world.automatic = False
            world.lose(world.agents["0"])
            request = asyncio.create_task(world.pool.acquire(owner, 1, held))
            await settle()
            agent = world.agent("1")
            world.ended["0"]("0", RuntimeError("task 0 was lost"))
            await settle()
            assert not request.done()
            world.worker("1", agent.of(SpawnWorker)[0].worker)
            assert [slot.slot_id for slot in await request] == ["1"]

    async def test_too_few_slots_in_time_is_an_error_that_says_why(self) -> None:
        async with opened(automatic=False) as world:
            world.requests_wait(0.01)
            message = r"2 slots were not available within 0\.01 s: waits for 2 of 2 slots to start"
            with pytest.raises(SlotsUnavailableError, match=message):
                await world.pool.acquire(Owner(), 2, [])

    async def test_waiting_request_shows_the_reason_holds_no_slots_and_lets_smaller_ones_start(self) -> None:
        async with opened() as world:
            world.capacity = 8
            (free,) = await world.pool.acquire(Owner(), 1, [])
            world.pool.release(free)
            large, middle = Owner(), Owner()
            requests = [
                asyncio.create_task(world.pool.acquire(owner, n, [])) for owner, n in ((large, 20), (middle, 8))
            ]
            await settle()
            assert large.waits == ["needs 20 slots, the cluster has 8"]
            assert len(await requests[1]) == 8
            small = Owner()
            requests.append(asyncio.create_task(world.pool.acquire(small, 1, [])))
            await settle()
            assert small.waits == ["needs 1 slot, 0 of the cluster's 8 are free"]
            world.pool.release(free)
            assert await requests[2] == [free]
            assert small.waits[-1] == ""
            world.capacity = 28
            world.capacity_changed()
            assert len(await requests[0]) == 20
            assert large.waits[-1] == ""

    async def test_request_whose_turn_has_come_gets_free_slots_before_later_ones(self) -> None:
        clock = Clock()
        async with opened(clock=clock, reservation_interval_s=60, request_timeout_s=600) as world:
            world.capacity = 4
            running = [(await world.pool.acquire(Owner(), 1, []))[0] for _ in range(4)]
            large, small = Owner(), [Owner() for _ in range(3)]
            served = asyncio.create_task(world.pool.acquire(large, 2, []))
            passing = asyncio.create_task(world.pool.acquire(small[0], 1, []))
            await settle()
            world.pool.release(running[0])
            assert len(await passing) == 1, "the first turn is that of the others"
            clock.now += 60
            later = [asyncio.create_task(world.pool.acquire(owner, 1, [])) for owner in small[1:]]
            await settle()
            world.pool.release(running[1])
            await settle()
            busy = "1 of the cluster's 4 are free; free slots are reserved for"
            assert large.waits[-1] == f"needs 2 slots, {busy} it"
            assert [owner.waits[-1] for owner in small[1:]] == [f"needs 1 slot, {busy} a job that needs 2"] * 2
            world.pool.release(running[2])
            assert len(await served) == 2
            assert not any(request.done() for request in later)
            world.pool.release(running[3])
            assert len(await later[0]) == 1
            later[1].cancel()

    async def test_a_turn_begins_and_ends_without_another_event(self) -> None:
        async with opened(reservation_interval_s=0.2, request_timeout_s=600) as world:
            world.capacity = 2
            (first,) = await world.pool.acquire(Owner(), 1, [])
            large, small = Owner(), Owner()
            requests = [asyncio.create_task(world.pool.acquire(large, 2, []))]
            async with asyncio.timeout(TIMEOUT_S):
                while not large.waits[-1:] or not large.waits[-1].endswith("reserved for it"):
                    await asyncio.sleep(0.01)
            requests.append(asyncio.create_task(world.pool.acquire(small, 1, [])))
            async with asyncio.timeout(TIMEOUT_S):
                assert len(await requests[1]) == 1, "the turn has ended"
            assert not requests[0].done()
            requests[0].cancel()
            world.pool.release(first)

    async def test_a_request_that_timed_out_keeps_its_place_for_the_next_one(self) -> None:
        clock = Clock()
        async with opened(clock=clock, reservation_interval_s=60) as world:
            world.capacity = 2
            (first,) = await world.pool.acquire(Owner(), 1, [])
            large, small = Owner(), Owner()
            world.requests_wait(0.01)
            with pytest.raises(SlotsUnavailableError):
                await world.pool.acquire(large, 2, [])
            world.requests_wait(600)
            clock.now += 61
            again = asyncio.create_task(world.pool.acquire(large, 2, []))
            await settle()
            later = asyncio.create_task(world.pool.acquire(small, 1, []))
            await settle()
            world.pool.release(first)
            assert len(await again) == 2
            assert not later.done()
            later.cancel()

    async def test_a_job_that_is_larger_than_the_cluster_reserves_nothing(self) -> None:
        clock = Clock()
        async with opened(clock=clock, reservation_interval_s=60, request_timeout_s=600) as world:
            world.capacity = 2
            huge = Owner()
            request = asyncio.create_task(world.pool.acquire(huge, 3, []))
            await settle()
            clock.now += 61
            assert len(await world.pool.acquire(Owner(), 1, [])) == 1
            assert huge.waits == ["needs 3 slots, the cluster has 2"]
            request.cancel()

    async def test_slots_are_launched_when_the_cluster_has_got_room_for_them(self) -> None:
        async with opened() as world:
            world.capacity = 0
            owner = Owner()
            request = asyncio.create_task(world.pool.acquire(owner, 2, []))
            await settle()
            assert (owner.waits, world.launched, world.pool.total) == (["needs 2 slots, the cluster has 0"], [], 0)
            world.capacity = 2
            world.capacity_changed()
            assert len(await request) == 2
            assert world.pool.total == 2

    async def test_slots_that_start_are_kept_for_the_first_request_that_needs_them(self) -> None:
        async with opened(automatic=False) as world:
            world.capacity = 2
            first, second = (asyncio.create_task(world.pool.acquire(Owner(), count, [])) for count in (2, 1))
            await settle()
            for slot_id in world.launched:
                agent = world.agent(slot_id)
                assert [request.done() for request in (first, second)] == [False, False]
                world.worker(slot_id, agent.of(SpawnWorker)[0].worker)
                await settle()
            assert len(await first) == 2
            assert not second.done()
            second.cancel()

    async def test_slots_whose_agents_never_register_are_launched_again(self) -> None:
        clock = Clock()

        async with opened(automatic=False, clock=clock) as world:
            first = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            await settle()
            clock.now += 11
            world.pool.check()
            await settle()
            assert (world.launched, world.cancelled) == (["0", "1"], ["0"])
            late = world.agent("0")
            assert late.sent == [ShutdownAgent()]
            world.automatic = True
            world.agent("1")
            assert [slot.slot_id for slot in await first] == ["1"]

    async def test_request_with_a_minimum_gets_as_many_slots_as_the_session_can_have(self) -> None:
        async with opened() as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            await world.pool.acquire(Owner(), 1, [])
            world.capacity = 4
            with pytest.raises(SlotsUnavailableError, match="needs 5 slots, the cluster has 4"):
                await world.pool.acquire(owner, 8, held, least=5)
            wide = await world.pool.acquire(owner, 8, held, least=1)
            assert len(wide) == 3
            assert await world.pool.acquire(owner, 2, wide, least=1) == wide[:2]

    @pytest.mark.parametrize("ending", ["cancelled", "served"])
    async def test_held_slot_that_was_released_belongs_to_its_next_owner(self, ending: str) -> None:
        async with opened() as world:
            first, second = Owner(), Owner()
            held = await world.pool.acquire(first, 1, [])
            world.capacity = 1
            request = asyncio.create_task(world.pool.acquire(first, 2, held))
            await settle()
            world.pool.release(held[0])
            (slot,) = await world.pool.acquire(second, 1, [])
            assert slot is held[0]
            assert slot.worker is not None
            slot.worker.used = True
            if ending == "cancelled":
                request.cancel()
            else:
                world.capacity = 3
                world.capacity_changed()
                slots = await request
                assert slot not in slots
            await settle()
            assert slot.owner is second
            assert world.agents["0"].of(KillWorker) == []

    async def test_held_slots_stay_with_their_owner_when_a_request_fails(self) -> None:
        async with opened() as world:
            owner = Owner()
            held = await world.pool.acquire(owner, 1, [])
            world.automatic = False
            world.requests_wait(0.01)
            with pytest.raises(SlotsUnavailableError):
                await world.pool.acquire(owner, 2, held)
            assert held[0].owner is owner

    async def test_two_jobs_never_get_the_same_slot(self) -> None:
        async with opened() as world:
            taken = await asyncio.gather(*(world.pool.acquire(Owner(), 2, []) for _ in range(3)))
            ids = [slot.slot_id for slots in taken for slot in slots]
            assert len(set(ids)) == 6


class TestWorkers:
    async def test_the_spare_takes_over_and_another_is_started(self) -> None:
        async with holding() as (world, owner, slot):
            first, spare = slot.worker, slot.spare
            assert first is not None
            assert spare is not None
            world.lose(world.workers[first.worker_id], "connection reset")
            assert slot.worker is spare
            await asyncio.wait_for(owner.told.wait(), TIMEOUT_S)
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
            first, spare = slot.worker, slot.spare
            assert first is not None
            world.lose(world.workers[first.worker_id], "connection reset")
            assert (slot.worker, owner.events) == (spare, [])
            assert world.agents["0"].of(KillWorker) == [], "what is killed now cannot be told from what was killed"
            exited = WorkerExited(first.worker_id, -9)
            world.pool.peer_message(world.agents["0"], exited)
            ((kind, _, reason),) = owner.events
            assert kind == "worker lost"
            assert "exit code -9 (SIGKILL: killed by another process, most often by the kernel because memory" in reason

    async def test_log_of_a_worker_is_kept_if_its_end_was_not_ordered(self) -> None:
        async with holding() as (world, _, slot):
            ordered, unexpected = slot.worker, slot.spare
            assert ordered is not None
            assert unexpected is not None
            world.pool.replace_worker(slot)
            for worker in (ordered, unexpected):
                exited = WorkerExited(worker.worker_id, -9, "the last line")
                world.pool.peer_message(world.agents["0"], exited)
            (log,) = world.pool.ended_logs
            assert (log.worker_id, log.slot_id, log.text) == (unexpected.worker_id, "0", "the last line")
            assert "SIGKILL" in log.reason

    async def test_worker_that_dies_while_starting_is_started_again_after_a_pause(self) -> None:
        async with opened(automatic=False) as world:
            request = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            await settle()
            agent = world.agent()
            (spawn,) = agent.of(SpawnWorker)
            exited = WorkerExited(spawn.worker, 1)
            world.pool.peer_message(agent, exited)
            assert len(agent.of(SpawnWorker)) == 1
            async with asyncio.timeout(TIMEOUT_S):
                while len(agent.of(SpawnWorker)) < 2:
                    await asyncio.sleep(0.01)
            assert agent.of(SpawnWorker)[1].worker != spawn.worker
            world.worker("0", agent.of(SpawnWorker)[1].worker)
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
            request = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            await settle()
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
            told = f"worker {spawn.worker} is killed: it has not registered, and has made no progress for 31 s"
            assert warnings() == [told]
            clock.now += 29
            world.pool.check()
            assert len(agent.of(KillWorker)) == 1
            world.pool.peer_message(agent, WorkerExited(spawn.worker, -9))
            async with asyncio.timeout(TIMEOUT_S):
                while len(agent.of(SpawnWorker)) < 2:
                    await asyncio.sleep(0.001)
            world.worker("0", agent.of(SpawnWorker)[1].worker)
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
            told = ("worker lost", "0", f"worker {worker.worker_id} was lost: the message X is malformed")
            assert owner.events == ([told] if which == "active" else [])

    async def test_an_agent_that_breaks_the_protocol_is_the_reason_for_its_lost_slot(self) -> None:
        async with holding(loss_grace_s=60) as (world, owner, _):
            world.lose(world.agents["0"], "the message X is malformed", explained=True)
            reason = "slot 0 was lost: its slot agent was lost: the message X is malformed"
            assert owner.events == [("slot lost", "0", reason)]

    async def test_second_agent_of_a_slot_is_refused_and_the_first_keeps_the_slot(self) -> None:
        async with opened() as world:
            owner = Owner()
            (slot,) = await world.pool.acquire(owner, 1, [])
            first = world.agents["0"]
            second = world.agent()
            assert second.closed
            assert second.sent == [ShutdownAgent()]
            assert world.pool.all() == (slot,)
            assert slot.agent is first
            assert owner.events == []

    async def test_worker_of_an_unknown_slot_is_refused(self) -> None:
        async with opened() as world:
            assert world.worker("7-7", "w").closed


class TestRelease:
    async def test_a_worker_that_ran_a_job_is_replaced(self) -> None:
        async with holding() as (world, _, slot):
            used = slot.worker
            assert used is not None
            used.used = True
            world.pool.release(slot)
            assert slot.worker is not used
            assert world.workers[used.worker_id].closed
            assert world.pool.available == 1

    async def test_worker_that_does_not_end_after_its_last_writes_is_killed(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("ckpt_runtime.jobmaster.slot_pool._RELEASED_WORKER_S", 0.05)

        async with opened() as world:
            (slot,) = await world.pool.acquire(Owner(), 1, [])
            used = slot.worker
            assert used is not None
            used.used = True
            world.pool.release(slot)
            assert world.agents["0"].of(KillWorker) == []
            async with asyncio.timeout(30):
                while world.agents["0"].of(KillWorker) != [KillWorker(used.worker_id)]:
                    await asyncio.sleep(0.005)

    async def test_an_unused_worker_stays(self) -> None:
        async with opened() as world:
            (slot,) = await world.pool.acquire(Owner(), 1, [])
            worker = slot.worker
            world.pool.release(slot)
            assert slot.worker is worker

    async def test_released_slot_wakes_a_waiting_job(self) -> None:
        async with opened() as world:
            (slot,) = await world.pool.acquire(Owner(), 1, [])
            world.automatic = False
            request = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            await settle()
            world.pool.release(slot)
            assert await request == [slot]


class TestLosses:
    async def test_lost_agent_costs_only_its_own_slot(self) -> None:
        async with opened() as world:
            owner, other = Owner(), Owner()
            lost, kept = await world.pool.acquire(owner, 2, [])
            (elsewhere,) = await world.pool.acquire(other, 1, [])
            await settle()
            world.lose(world.agents["0"], "reset")
            await asyncio.wait_for(owner.told.wait(), TIMEOUT_S)
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
            await asyncio.wait_for(owner.told.wait(), TIMEOUT_S)
            assert [event[2] for event in owner.events] == [
                "slot 0 was lost: executor 1 was lost: Command exited with code 137"
            ]

    async def test_a_slot_whose_task_ends_with_an_error_is_lost(self) -> None:
        async with opened() as world:
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
            await asyncio.wait_for(owner.told.wait(), TIMEOUT_S)
            assert "no heartbeat for 5 s" in owner.events[0][2]
            assert world.cancelled == ["0"]

    async def test_a_silent_worker_is_killed_and_the_spare_takes_over(self) -> None:
        async with holding() as (world, owner, slot):
            silent, spare = slot.worker, slot.spare
            assert silent is not None
            world.workers[silent.worker_id].last_heard = LONG_AGO
            world.pool._check_heartbeats(slot, time.monotonic())
            assert slot.worker is spare
            assert KillWorker(silent.worker_id) in world.agents["0"].sent
            assert "no heartbeat" in owner.events[0][2]

    async def test_a_silent_spare_is_killed_quietly(self) -> None:
        async with holding() as (world, owner, slot):
            assert slot.spare is not None
            spare = slot.spare
            world.workers[spare.worker_id].last_heard = LONG_AGO
            world.pool._check_heartbeats(slot, time.monotonic())
            assert world.agents["0"].of(KillWorker) == [KillWorker(spare.worker_id)]
            assert owner.events == []

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
            request = asyncio.create_task(world.pool.acquire(owner, 2, held))
            await settle()
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
            owner.told.clear()
            world.lose(world.workers[slot.worker.worker_id])
            await asyncio.wait_for(owner.told.wait(), TIMEOUT_S)
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
            request = asyncio.create_task(world.pool.acquire(owner, 1, held))
            await settle()
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
            world.worker("1", agent.of(SpawnWorker)[0].worker)
            assert [slot.slot_id for slot in await request] == ["1"]

    async def test_worker_that_registers_after_the_loss_of_its_agent_is_adopted(self) -> None:
        async with opened(automatic=False, machine="m") as world:
            owner = Owner()
            request = asyncio.create_task(world.pool.acquire(owner, 1, []))
            await settle()
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
    async def test_spares_start_after_all_workers_of_their_host(self) -> None:
        async with opened(automatic=False) as world:
            request = asyncio.create_task(world.pool.acquire(Owner(), 2, []))
            await settle()
            first, second = world.agent("0"), world.agent("1")
            world.worker("0", first.of(SpawnWorker)[0].worker)
            assert len(first.of(SpawnWorker)) == 1
            world.worker("1", second.of(SpawnWorker)[0].worker)
            assert len(first.of(SpawnWorker)) == len(second.of(SpawnWorker)) == 2
            await request

    async def test_spares_start_after_the_job_has_deployed(self) -> None:
        async with holding(spare_pause_s=0.05) as (world, _, slot):
            assert len(world.agents["0"].of(SpawnWorker)) == 1
            async with asyncio.timeout(TIMEOUT_S):
                while slot.spare is None:
                    await asyncio.sleep(0.001)


class Clock:
    """Seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@asynccontextmanager
async def opened_idle(**settings: Any) -> AsyncIterator[tuple[World, Clock]]:
    """Stages may be idle for 50 s; heartbeats do not matter."""
    clock = Clock()
    async with opened(heartbeat_timeout_s=1e9, clock=clock, **settings) as world:
        yield world, clock


class TestIdle:
    async def test_a_slot_ends_when_it_was_idle_long_enough(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO")

        async with opened_idle() as (world, clock):
            slots = await world.pool.acquire(Owner(), 2, [])
            world.pool.release(slots[0])
            clock.now += 10
            world.pool.release(slots[1])
            clock.now += 41
            world.pool.check()
            assert world.pool.all() == (slots[1],)
            clock.now += 10
            world.pool.check()
            assert world.pool.total == 0
            assert all(world.agents[slot_id].of(ShutdownAgent) for slot_id in ("0", "1"))
        assert "ending slot 0: no job has used it for 50 s" in caplog.text

    async def test_slots_that_a_job_waits_for_are_not_idle_however_long_their_workers_take(self) -> None:
        async with opened_idle(automatic=False) as (world, clock):
            request = asyncio.create_task(world.pool.acquire(Owner(), 2, []))
            await settle()
            agents = [world.agent("0"), world.agent("1")]
            clock.now += 100
            world.pool.check()
            for index, agent in enumerate(agents):
                world.worker(str(index), agent.of(SpawnWorker)[0].worker)
                clock.now += 100
                world.pool.check()
                await settle()
            assert len(await request) == 2
            assert world.launched == ["0", "1"]

    async def test_slots_that_a_request_did_not_wait_for_are_kept_for_the_next_attempt(self) -> None:
        async with opened_idle(automatic=False) as (world, clock):
            request = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            await settle()
            agent = world.agent("0")
            clock.now += 100
            world.pool.check()
            request.cancel()
            await settle()
            clock.now += 49
            world.pool.check()
            again = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            world.worker("0", agent.of(SpawnWorker)[0].worker)
            await settle()
            assert [slot.slot_id for slot in await again] == ["0"]

    async def test_idle_slots_end_when_no_request_waits(self) -> None:
        async with opened_idle(automatic=False) as (world, clock):
            request = asyncio.create_task(world.pool.acquire(Owner(), 2, []))
            await settle()
            agent = world.agent("0")
            request.cancel()
            await settle()
            clock.now += 100
            world.pool.check()
            assert world.pool.total == 0
            assert agent.of(ShutdownAgent)

    async def test_starting_slot_does_not_end_as_idle(self) -> None:
        async with opened_idle(automatic=False) as (world, clock):
            request = asyncio.create_task(world.pool.acquire(Owner(), 1, []))
            await settle()
            clock.now += 100
            world.pool.check()
            world.automatic = True
            world.agent()
            assert len(await request) == 1


async def test_stop_notifies_the_agents_and_waits_for_their_ends() -> None:
    async with opened() as world:
        await world.pool.acquire(Owner(), 2, [])
        await world.pool.stop()
        assert all(agent.of(ShutdownAgent) for agent in world.agents.values())
        assert world.cancelled == []


async def test_workers_of_two_jobs_are_bound_to_different_cores() -> None:
    async with opened() as world:
        one, other = Owner(), Owner()
        first = await world.pool.acquire(one, 1, [])
        assert world.pool.bind(first) == [0]
        second = await world.pool.acquire(other, 1, [])
        assert world.pool.bind(second) == [1]
        assert world.pool.bind(first) == [0]
        world.pool.release(first[0])
        third = await world.pool.acquire(one, 2, [])
        assert world.pool.bind(third) == [None, None], "three workers on two cores"
        assert world.pool.bind(second) == [None]


async def test_slots_count_before_there_are_any() -> None:
    async with opened() as world:
        world.capacity = 3
        assert (world.pool.total, world.pool.available) == (3, 3)
        slots = await world.pool.acquire(Owner(), 1, [])
        assert (world.pool.total, world.pool.available) == (3, 2)
        slots = await world.pool.acquire(slots[0].owner, 3, slots)
        assert (world.pool.total, world.pool.available) == (3, 0)
        world.pool.release(slots[0])
        assert (world.pool.total, world.pool.available) == (3, 1)


def test_the_times_of_a_session_are_its_options() -> None:
    given = {"heartbeat.interval": "2 s", "heartbeat.timeout": "30 s", "slot.idle.timeout": "1 min"}
    given["taskmanager.registration.timeout"] = "3 min"
    times = SlotTimes.of(Configuration(given))
    assert (times.heartbeat_interval_s, times.heartbeat_timeout_s, times.idle_timeout_s) == (2.0, 30.0, 60.0)
    assert times.registration_timeout_s == 180.0
    assert times.request_timeout_s == SlotTimes().request_timeout_s
