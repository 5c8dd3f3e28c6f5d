"""Many waits at one job manager: one stream or one poll wakes them, and what they ask is asked once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from airflow_provider_ckpt import event_hub as hub
from airflow_provider_ckpt.conditions import base as progress
from airflow_provider_ckpt.conditions.base import POLL, Condition
from airflow_provider_ckpt.conditions.checkpoint import CheckpointCondition, CheckpointGoal
from airflow_provider_ckpt.conditions.job import (
    JobStatusCondition,
    Operation,
    OperationCondition,
    ReadyForSnapshotCondition,
)
from airflow_provider_ckpt.event_hub import SharedAnswers
from airflow_provider_ckpt.triggers.wait import CkptTrigger
from ckpt_runtime.client import requests
from ckpt_runtime.client.errors import CkptApiError
from ckpt_runtime.client.event_stream import StreamedEvent
from ckpt_runtime.jobmaster.event_log import EventLog, EventType
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.support.patience import patient
from tests.unit.provider.conftest import JOB, JobManager, run_at_hubs, until

TIMEOUT_S = patient(60.0)
STREAM = "GET /events"
WAIT: dict[str, Any] = {"ckpt_conn_id": "ckpt_default", "poll_interval": 0.05}

pytestmark = pytest.mark.row("air.11")


def waiting(condition: Condition) -> CkptTrigger:
    return CkptTrigger(**WAIT, deadline=time.time() + TIMEOUT_S, condition=condition)


def finished(job_id: str = JOB) -> CkptTrigger:
    return waiting(JobStatusCondition(job_id, ["FINISHED"]))


def checkpoints(count: int = 1) -> CkptTrigger:
    return waiting(CheckpointCondition(JOB, CheckpointGoal(count=count)))


async def status(trigger: CkptTrigger) -> str:
    found: str = (await anext(aiter(trigger.run()))).payload["status"]
    return found


def waits(triggers: list[CkptTrigger]) -> list[asyncio.Task[str]]:
    return [asyncio.create_task(status(trigger)) for trigger in triggers]


def streaming(manager: JobManager) -> bool:
    return manager.gateway.events.listeners == 1


def requests_for(manager: JobManager, triggers: list[CkptTrigger], end: Callable[[], Awaitable[None]]) -> int:
    """How many requests these waits make up to their end."""

    async def wait() -> None:
        tasks = waits(triggers)
        await until(lambda: streaming(manager) and f"GET /jobs/{JOB}" in manager.received)
        await end()
        async with asyncio.timeout(TIMEOUT_S):
            assert set(await asyncio.gather(*tasks)) == {"done"}
        await until(lambda: manager.gateway.events.listeners == 0)

    manager.received.clear()
    run_at_hubs(wait())
    assert manager.count(STREAM) == 1
    return len(manager.received)


def test_five_hundred_waits_are_one_stream_and_ask_as_much_as_one(job_manager: JobManager) -> None:
    """Of all kinds, and with a checkpoint that wakes many of them to no avail."""
    job_manager.streams = True

    async def end() -> None:
        job_manager.happens(EventType.FAILURE)
        job = job_manager.gateway.jobs[JOB]
        job_manager.gateway.complete_checkpoint(job)
        job_manager.happens(EventType.CHECKPOINT_COMPLETED)
        looks = job_manager.count(f"GET /jobs/{JOB}/checkpoints")
        await until(lambda: job_manager.count(f"GET /jobs/{JOB}/checkpoints") > looks)
        job_manager.gateway.complete_checkpoint(job)
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        job_manager.happens(EventType.CHECKPOINT_COMPLETED)
        job_manager.happens(EventType.JOB_STATUS)

    found = {}
    for each in (2, 250):
        job_manager.gateway.jobs.pop(JOB)
        job_manager.gateway.add_job(JOB)
        found[each] = requests_for(job_manager, [finished() for _ in range(each)] + [checkpoints(2)] * each, end)
    assert found[250] <= found[2] + 12, found


def test_wait_polls_only_after_an_event_about_its_job(job_manager: JobManager) -> None:
    job_manager.streams = True
    job_manager.gateway.events = EventLog("5e551017a2b3c4d5")

    async def wait() -> None:
        other = "0" * 31 + "1"
        job_manager.gateway.add_job(other)
        (task,), others = waits([finished()]), waits([finished(other)])
        await until(lambda: streaming(job_manager) and job_manager.count(f"GET /jobs/{JOB}") > 0)
        await until(lambda: job_manager.count(f"GET /jobs/{other}") > 0)
        await asyncio.sleep(hub.GAP_SECONDS)
        looked = job_manager.count(f"GET /jobs/{JOB}")
        for _ in range(5):
            job_manager.happens(EventType.CHECKPOINT_COMPLETED)
            job_manager.happens(EventType.JOB_STATUS, other)
        job_manager.gateway.move(other, JobStatus.FINISHED)
        job_manager.happens(EventType.JOB_STATUS, other)
        assert await others[0] == "done"
        assert job_manager.count(f"GET /jobs/{JOB}") == looked
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        job_manager.happens(EventType.JOB_STATUS)
        assert await task == "done"

    run_at_hubs(wait())


def test_one_poll_serves_all_waits_without_event_streams(job_manager: JobManager) -> None:
    """As against Flink: the list of jobs, and for each job and poll what that cannot tell, however many wait."""

    async def polls(more: int) -> None:
        enough = job_manager.count("GET /jobs/overview") + more
        await until(lambda: job_manager.count("GET /jobs/overview") >= enough)

    async def wait() -> None:
        tasks = waits([finished() for _ in range(100)] + [checkpoints() for _ in range(100)])
        await polls(10)
        assert job_manager.count(f"GET /jobs/{JOB}") <= 2 * job_manager.count("GET /jobs/overview")
        job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
        async with asyncio.timeout(TIMEOUT_S):
            assert set(await asyncio.gather(*tasks[100:])) == {"done"}
        # Those who wait for the job's state alone see in the list that there is nothing to look at.
        await polls(10)
        looked = job_manager.count(f"GET /jobs/{JOB}")
        await polls(10)
        assert job_manager.count(f"GET /jobs/{JOB}") == looked
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        async with asyncio.timeout(TIMEOUT_S):
            assert set(await asyncio.gather(*tasks[:100])) == {"done"}

    run_at_hubs(wait())
    assert job_manager.count(STREAM) == 1


@pytest.mark.parametrize("begins", ["before the change", "after the change"])
def test_a_wait_that_gets_details_from_before_a_change_looks_again_until_they_agree_with_the_list(
    begins: str, job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flink answers so: with a list of jobs that is up to date, and with details from a copy that it renews later."""
    copies: dict[str, Any] = {}
    gateway, details = job_manager.gateway, job_manager.gateway.job_details

    async def from_a_copy(job_id: str) -> Any:
        if job_id not in copies:
            copies[job_id] = await details(job_id)
        return copies[job_id]

    monkeypatch.setattr(gateway, "job_details", from_a_copy)
    other = "0" * 31 + "1"
    gateway.add_job(other)

    async def more(request: str, times: int = 1) -> None:
        enough = job_manager.count(request) + times
        await until(lambda: job_manager.count(request) >= enough)

    async def wait() -> None:
        (keeps_the_poll,) = waits([finished(other)])
        tasks = waits([finished()] * 3) if begins == "before the change" else []
        if tasks:
            await until(lambda: JOB in copies)
        else:
            await from_a_copy(JOB)
        await more("GET /jobs/overview", 2)
        gateway.move(JOB, JobStatus.FINISHED)
        await more("GET /jobs/overview", 2)  # the first of the two may have been answered before the change
        tasks = tasks or waits([finished()] * 3)
        await more(f"GET /jobs/{JOB}", 2)
        assert not any(task.done() for task in tasks)
        copies.clear()
        gateway.move(other, JobStatus.FINISHED)
        async with asyncio.timeout(TIMEOUT_S):
            assert set(await asyncio.gather(*tasks, keeps_the_poll)) == {"done"}

    run_at_hubs(wait())


@pytest.mark.parametrize("streams", [True, False])
def test_waits_continue_after_another_driver_took_over(
    job_manager: JobManager, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away for a while, gets no request twice, and never reports what has happened meanwhile."""
    job_manager.streams = streams

    async def wait() -> None:
        tasks = waits([finished() for _ in range(20)])
        await until(lambda: job_manager.count(f"GET /jobs/{JOB}") > 0)
        await asyncio.to_thread(job_manager.stop)
        (found,) = hub._hubs.values()
        await until(lambda: found._away is not None)
        job_manager.gateway.events = EventLog("another-driver")
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        await asyncio.to_thread(job_manager.start)
        async with asyncio.timeout(TIMEOUT_S):
            assert set(await asyncio.gather(*tasks)) == {"done"}

    run_at_hubs(wait())


def test_a_driver_that_does_not_lead_is_waited_for(job_manager: JobManager) -> None:
    job_manager.streams = True
    job_manager.gateway.ready = False

    async def wait() -> None:
        (task,) = waits([finished()])
        await until(lambda: job_manager.count(STREAM) > 1)
        job_manager.gateway.ready = True
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        assert await task == "done"

    run_at_hubs(wait())


def test_stream_held_back_by_a_proxy_is_replaced_by_polling(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "STARTING_SECONDS", 0.2)
    original = JobManager.serve

    async def serve(self: JobManager, scope: Any, receive: Any, send: Any) -> None:
        if scope.get("path") == "/events":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        await original(self, scope, receive, send)

    monkeypatch.setattr(JobManager, "serve", serve)
    job_manager.stop()
    job_manager.start()

    async def wait() -> None:
        (task,) = waits([finished()])
        await until(lambda: job_manager.count("GET /jobs/overview") > 3)
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        assert await task == "done"

    run_at_hubs(wait())
    monkeypatch.undo()
    job_manager.stop()


def test_cancelled_waits_leave_no_hub_and_no_stream(job_manager: JobManager) -> None:
    """However far they have come; the last one closes the stream."""
    job_manager.streams = True

    async def wait() -> None:
        kinds: list[Callable[[], CkptTrigger]] = [
            finished,
            checkpoints,
            lambda: waiting(ReadyForSnapshotCondition("0" * 32)),
            lambda: waiting(OperationCondition("0" * 32, Operation.SAVEPOINT, "1" * 32)),
        ]
        for steps in range(12):
            tasks = waits([kind() for kind in kinds])
            for _ in range(steps):
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            assert hub._hubs == {}
        tasks = waits([kind() for kind in kinds])
        await until(lambda: streaming(job_manager))
        for task in tasks[1:]:
            task.cancel()
        await asyncio.wait(tasks[1:])
        assert streaming(job_manager)
        tasks[0].cancel()
        await asyncio.wait(tasks)
        await until(lambda: job_manager.gateway.events.listeners == 0)

    run_at_hubs(wait())


@pytest.mark.parametrize(
    ("waiting", "periods"), [(1, 1), (hub.WAITS_PER_FALLBACK_POLL, 1), (hub.WAITS_PER_FALLBACK_POLL + 1, 2), (500, 4)]
)
def test_waits_for_one_job_poll_together_without_events_and_less_often_if_many(waiting: int, periods: int) -> None:
    """Whenever they compute their pause, and so that a growing number still polls together."""
    for asked in range(1, 4000, 17):
        left = hub.seconds_until_polled(float(asked), waiting)
        assert hub.GAP_SECONDS < left <= periods * hub.FALLBACK_POLL_SECONDS + hub.GAP_SECONDS
        assert (asked + left) % (periods * hub.FALLBACK_POLL_SECONDS) == pytest.approx(0)


def test_many_waits_say_the_same_again_less_often(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All their lines go through one pipe of Airflow's, which is slow."""
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.05)
    monkeypatch.setattr(hub, "LINES_PER_SECOND", 20.0)
    job_manager.streams = True

    async def wait() -> None:
        tasks = waits([finished() for _ in range(40)])
        await until(lambda: job_manager.count(f"GET /jobs/{JOB}") > 0)
        begun, lines = time.monotonic(), ""
        while lines.count("seen") < 60:
            await asyncio.sleep(0.1)
            lines += capsys.readouterr().out
        assert lines.count("seen") <= 40 + 20 * (time.monotonic() - begun)
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        job_manager.happens(EventType.JOB_STATUS)
        async with asyncio.timeout(TIMEOUT_S):
            assert set(await asyncio.gather(*tasks)) == {"done"}

    run_at_hubs(wait())


def test_conditions_look_only_for_the_events_that_concern_them() -> None:
    def concerned(condition: Condition) -> set[str]:
        types = [*EventType, POLL]
        return {kind for kind in types if condition.concerns(StreamedEvent("", kind, {"request-id": "x"}))}

    states = {"job-status", "deployment", "tasks-running"}
    assert concerned(finished().condition) == states
    assert concerned(ReadyForSnapshotCondition(JOB)) == states | {"savepoint-triggered", "savepoint-failed", POLL}
    ended = {f"{what}-{how}" for what in ("checkpoint", "savepoint") for how in ("completed", "failed")}
    assert concerned(checkpoints().condition) == ended | {"job-status", POLL}
    operation = OperationCondition(JOB, Operation.STOP, "1" * 32)
    assert concerned(operation) == {POLL}
    mine = StreamedEvent("", "operation", {"request-id": "1" * 32})
    assert operation.concerns(mine)


def test_answers_are_shared_until_something_happens() -> None:
    asked: list[str] = []

    async def execute(call: requests.Call[Any]) -> Any:
        asked.append(call.path)
        await asyncio.sleep(0)
        if "fails" in call.path:
            raise CkptApiError(503, ["not now"])
        return f"answer {len(asked)}"

    async def ask() -> None:
        answers = SharedAnswers(execute)
        mine: requests.Call[Any] = requests.job_details("mine")
        other: requests.Call[Any] = requests.job_details("other")
        slow: requests.Call[Any] = requests.job_details("slow")
        first = await asyncio.gather(*(answers.get(mine, "mine") for _ in range(10)))
        assert set(first) == {"answer 1"}
        assert [await answers.get(mine, "mine"), await answers.get(other, "other")] == ["answer 1", "answer 2"]
        answers.changed("mine")
        assert [await answers.get(mine, "mine"), await answers.get(other, "other")] == ["answer 3", "answer 2"]
        answers.changed()
        assert [await answers.get(mine, "mine"), await answers.get(other, "other")] == ["answer 4", "answer 5"]
        early = asyncio.create_task(answers.get(slow, "mine"))
        await asyncio.sleep(0)
        early.cancel()
        assert await answers.get(slow, "mine") == "answer 6"
        answers.forget("mine")
        assert await answers.get(mine, "mine") == "answer 7"
        for _ in range(2):
            with pytest.raises(CkptApiError):
                await answers.get(requests.job_details("fails"), "fails")
        assert asked.count("/jobs/fails") == 2

    asyncio.run(ask())
