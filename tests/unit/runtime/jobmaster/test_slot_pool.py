"""Who gets which slots: launching, waiting, giving back, idle slots, questions to their workers."""

from __future__ import annotations

import asyncio

import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster.gateway_values import NotFound, NotReady
from ckpt_runtime.jobmaster.slots import SlotsUnavailableError, SlotTimes
from ckpt_runtime.network.agent_messages import (
    KillWorker,
    ShutdownAgent,
    SpawnWorker,
)
from ckpt_runtime.network.connections import MalformedMessageError
from ckpt_runtime.network.control_messages import (
    DumpThreads,
    RecentLog,
    ThreadDump,
)
from tests.unit.runtime.jobmaster.slot_world import (
    TIMEOUT_S,
    Clock,
    Owner,
    World,
    holding,
    opened,
    opened_idle,
    settle,
)


class TestQuestions:
    async def test_the_active_worker_answers_and_an_answer_that_comes_too_late_is_dropped(self, world: World) -> None:
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

    async def test_an_answer_that_was_not_asked_for_is_malformed(self, world: World) -> None:
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

    async def test_worker_that_does_not_answer_or_is_lost_or_unknown_is_named(self, world: World) -> None:
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
    async def test_each_slot_is_launched_by_itself_and_all_come_at_once_when_their_workers_are_ready(
        self, world: World
    ) -> None:
        owner = Owner()
        slots = await world.pool.acquire(owner, 3, [])
        assert [slot.slot_id for slot in slots] == ["0", "1", "2"]
        assert all(slot.worker is not None and slot.owner is owner for slot in slots)
        assert world.launched == ["0", "1", "2"]
        assert (world.pool.total, world.pool.available) == (3, 0)
        assert slots[0].worker is not None
        assert slots[0].worker.data_address == ("h", 9)
        assert (slots[0].host, slots[0].cpus) == ("h", (0, 1))

    async def test_a_slot_gets_one_worker_after_the_other_and_no_third(self, world: World) -> None:
        world.automatic = False
        request = await world.requested(1)
        agent = world.agent()
        assert len(agent.of(SpawnWorker)) == 1
        world.spawned()
        await settle()
        (slot,) = await request
        assert len(agent.of(SpawnWorker)) == 2
        world.spawned("0", 1)
        assert slot.spare is not None
        assert len(agent.of(SpawnWorker)) == 2

    async def test_held_slots_are_used_first_and_free_ones_next(self, world: World) -> None:
        first, second = Owner(), Owner()
        held = await world.pool.acquire(first, 1, [])
        others = await world.pool.acquire(second, 1, [])
        world.pool.release(others[0])
        slots = await world.pool.acquire(first, 2, held)
        assert slots == [held[0], others[0]]
        assert world.launched == ["0", "1"]

    async def test_a_held_slot_that_was_lost_is_replaced(self, world: World) -> None:
        owner = Owner()
        held = await world.pool.acquire(owner, 1, [])
        world.lose(world.agents["0"])
        slots = await world.pool.acquire(owner, 1, held)
        assert [slot.slot_id for slot in slots] == ["1"]

    async def test_a_launch_that_fails_says_why_and_the_next_one_starts_afresh(self, world: World) -> None:
        world.automatic = False
        request = await world.requested(2)
        world.ended["0"]("0", RuntimeError("no Python here"))
        await settle()
        assert not request.done(), "the other one may start"
        assert world.launched == ["0", "1"], "and shows whether there can be any"
        world.ended["1"]("1", RuntimeError("no Python there"))
        with pytest.raises(SlotsUnavailableError, match="could not be started: no Python there"):
            await request
        world.automatic = True
        assert len(await world.pool.acquire(Owner(), 2, [])) == 2

    async def test_a_provider_that_cannot_launch_is_asked_again_next_time(self, world: World) -> None:
        world.launch_error = OSError("no processes left")
        with pytest.raises(SlotsUnavailableError, match="could not be launched: no processes left"):
            await world.pool.acquire(Owner(), 1, [])
        world.launch_error = None
        assert len(await world.pool.acquire(Owner(), 1, [])) == 1

    async def test_a_failure_without_a_waiting_request_does_not_fail_the_next_request(self, world: World) -> None:
        world.automatic = False
        request = await world.requested(1)
        request.cancel()
        await settle()
        world.ended["0"]("0", RuntimeError("late"))
        await settle()
        world.automatic = True
        assert len(await world.pool.acquire(Owner(), 1, [])) == 1

    async def test_end_of_a_slot_that_lost_its_agent_does_not_count_as_a_launch_failure(self, world: World) -> None:
        owner = Owner()
        held = await world.pool.acquire(owner, 1, [])
        world.automatic = False
        world.lose(world.agents["0"])
        request = await world.requested(1, owner, held)
        world.agent("1")
        world.ended["0"]("0", RuntimeError("task 0 was lost"))
        await settle()
        assert not request.done()
        world.spawned("1")
        assert [slot.slot_id for slot in await request] == ["1"]

    async def test_too_few_slots_in_time_is_an_error_that_says_why(self, world: World) -> None:
        world.automatic = False
        world.requests_wait(0.01)
        message = r"2 slots were not available within 0\.01 s: waits for 2 of 2 slots to start"
        with pytest.raises(SlotsUnavailableError, match=message):
            await world.pool.acquire(Owner(), 2, [])

    async def test_waiting_request_shows_the_reason_holds_no_slots_and_lets_smaller_ones_start(
        self, world: World
    ) -> None:
        world.capacity = 8
        (free,) = await world.pool.acquire(Owner(), 1, [])
        world.pool.release(free)
        large, middle = Owner(), Owner()
        requests = [world.request(n, owner) for owner, n in ((large, 20), (middle, 8))]
        await settle()
        assert large.waits == ["needs 20 slots, the cluster has 8"]
        assert len(await requests[1]) == 8
        small = Owner()
        requests.append(world.request(1, small))
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
            served = world.request(2, large)
            passing = world.request(1, small[0])
            await settle()
            world.pool.release(running[0])
            assert len(await passing) == 1, "the first turn is that of the others"
            clock.now += 60
            later = [world.request(1, owner) for owner in small[1:]]
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
            requests = [world.request(2, large)]
            async with asyncio.timeout(TIMEOUT_S):
                while not large.waits[-1:] or not large.waits[-1].endswith("reserved for it"):
                    await asyncio.sleep(0.01)
            requests.append(world.request(1, small))
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
            again = await world.requested(2, large)
            later = await world.requested(1, small)
            world.pool.release(first)
            assert len(await again) == 2
            assert not later.done()
            later.cancel()

    async def test_a_job_that_is_larger_than_the_cluster_reserves_nothing(self) -> None:
        clock = Clock()
        async with opened(clock=clock, reservation_interval_s=60, request_timeout_s=600) as world:
            world.capacity = 2
            huge = Owner()
            request = await world.requested(3, huge)
            clock.now += 61
            assert len(await world.pool.acquire(Owner(), 1, [])) == 1
            assert huge.waits == ["needs 3 slots, the cluster has 2"]
            request.cancel()

    async def test_slots_are_launched_when_the_cluster_has_got_room_for_them(self, world: World) -> None:
        world.capacity = 0
        owner = Owner()
        request = await world.requested(2, owner)
        assert (owner.waits, world.launched, world.pool.total) == (["needs 2 slots, the cluster has 0"], [], 0)
        world.capacity = 2
        world.capacity_changed()
        assert len(await request) == 2
        assert world.pool.total == 2

    async def test_slots_whose_agents_never_register_are_launched_again(self) -> None:
        clock = Clock()

        async with opened(automatic=False, clock=clock) as world:
            first = await world.requested(1)
            clock.now += 11
            world.pool.check()
            await settle()
            assert (world.launched, world.cancelled) == (["0", "1"], ["0"])
            late = world.agent("0")
            assert late.sent == [ShutdownAgent()]
            world.automatic = True
            world.agent("1")
            assert [slot.slot_id for slot in await first] == ["1"]

    async def test_request_with_a_minimum_gets_as_many_slots_as_the_session_can_have(self, world: World) -> None:
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
    async def test_held_slot_that_was_released_belongs_to_its_next_owner(self, ending: str, world: World) -> None:
        first, second = Owner(), Owner()
        held = await world.pool.acquire(first, 1, [])
        world.capacity = 1
        request = await world.requested(2, first, held)
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

    async def test_held_slots_stay_with_their_owner_when_a_request_fails(self, world: World) -> None:
        owner = Owner()
        held = await world.pool.acquire(owner, 1, [])
        world.automatic = False
        world.requests_wait(0.01)
        with pytest.raises(SlotsUnavailableError):
            await world.pool.acquire(owner, 2, held)
        assert held[0].owner is owner

    async def test_two_jobs_never_get_the_same_slot(self, world: World) -> None:
        taken = await asyncio.gather(*(world.pool.acquire(Owner(), 2, []) for _ in range(3)))
        ids = [slot.slot_id for slots in taken for slot in slots]
        assert len(set(ids)) == 6


class TestRelease:
    @pytest.mark.parametrize("used", [False, True])
    async def test_a_worker_is_replaced_if_it_ran_a_job(self, used: bool) -> None:
        async with holding() as (world, _, slot):
            worker, _ = world.held(slot)
            worker.used = used
            world.pool.release(slot)
            assert (slot.worker is worker) is not used
            assert world.workers[worker.worker_id].closed is used
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

    async def test_released_slot_wakes_a_waiting_job(self, world: World) -> None:
        (slot,) = await world.pool.acquire(Owner(), 1, [])
        world.automatic = False
        request = await world.requested(1)
        world.pool.release(slot)
        assert await request == [slot]


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
            request = await world.requested(2)
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
            request = await world.requested(1)
            world.agent("0")
            clock.now += 100
            world.pool.check()
            request.cancel()
            await settle()
            clock.now += 49
            world.pool.check()
            again = world.request(1)
            world.spawned()
            await settle()
            assert [slot.slot_id for slot in await again] == ["0"]

    async def test_idle_slots_end_when_no_request_waits(self) -> None:
        async with opened_idle(automatic=False) as (world, clock):
            request = await world.requested(2)
            agent = world.agent("0")
            request.cancel()
            await settle()
            clock.now += 100
            world.pool.check()
            assert world.pool.total == 0
            assert agent.of(ShutdownAgent)


async def test_stop_notifies_the_agents_and_waits_for_their_ends(world: World) -> None:
    await world.pool.acquire(Owner(), 2, [])
    await world.pool.stop()
    assert all(agent.of(ShutdownAgent) for agent in world.agents.values())
    assert world.cancelled == []


async def test_workers_of_two_jobs_are_bound_to_different_cores(world: World) -> None:
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


async def test_slots_count_before_there_are_any(world: World) -> None:
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
