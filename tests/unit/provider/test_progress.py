"""What a task says in its log while it waits, in a worker and in the triggerer, and when its job has failed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ckpt.conditions import base as progress
from airflow_provider_ckpt.conditions.base import Condition, Progress, Wait, moment
from airflow_provider_ckpt.conditions.checkpoint import CheckpointCondition, CheckpointGoal
from airflow_provider_ckpt.conditions.job import (
    MAX_TRACE_CHARS,
    JobStatusCondition,
    Operation,
    OperationCondition,
    ReadyForSnapshotCondition,
    shortened,
)
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.operators.cancel import CancelJobOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor
from airflow_provider_ckpt.sensors.job import JobStatusSensor
from airflow_provider_ckpt.triggers.wait import CkptTrigger
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task, finish

TRACE = 'ValueError: no such airport\n  File "flights.py", line 12, in enrich\n    raise ValueError(code)'
FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 30}


class Lines:
    """A log, as far as progress needs one."""

    def __init__(self, then: Callable[[], None] = lambda: None) -> None:
        self.said: list[str] = []
        self._then = then

    def info(self, text: Any, /, *args: Any) -> None:
        self.said.append(str(text) % args if args else str(text))
        self._then()

    def warning(self, text: Any, /, *args: Any) -> None:
        """Airflow's, of a task that is executed by a test."""

    error = debug = warning


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def wait_in_a_worker(condition: JobStatusCondition, seconds: float, log: Lines) -> None:
    with CkptHook().get_conn() as client:
        client.run(Wait(condition, time.time() + seconds, 0.01, log).until_verdict(client.calls))


def wait_in_the_triggerer(condition: JobStatusCondition, seconds: float, log: Lines) -> None:
    async def run() -> None:
        async with await CkptHook().aget_conn() as client:
            await Wait(condition, time.time() + seconds, 0.01, log).until_verdict(client)

    asyncio.run(run())


Waiting = Callable[[JobStatusCondition, float, Lines], None]
WAITS = pytest.mark.parametrize("waiting", [wait_in_a_worker, wait_in_the_triggerer])


def fail(job_manager: JobManager, state: JobStatus = JobStatus.FAILED, job_id: str = JOB) -> None:
    job = job_manager.gateway.jobs[job_id]
    failure = FailureCause("ValueError", "no such airport", TRACE)
    job.exceptions.insert(0, ExceptionEntry(failure, 1_700_000_000_000, "enrich (1/2)", "host-7:4711"))
    job_manager.gateway.move(job_id, state)


@WAITS
def test_wait_logs_state_and_last_checkpoint(job_manager: JobManager, waiting: Waiting) -> None:
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    job_manager.at_request(5, f"GET /jobs/{JOB}$", lambda: job_manager.gateway.move(JOB, JobStatus.FINISHED))
    log = Lines()
    waiting(JobStatusCondition(JOB, ["FINISHED"]), 60, log)
    [line] = log.said  # nothing changes until then, and half a minute does not pass
    assert re.fullmatch(
        rf"Waiting for job {JOB} to be FINISHED: it is RUNNING; last checkpoint 1 of .* \(1 completed, 0 in .*\)", line
    )


@WAITS
def test_wait_logs_a_change_at_once_with_the_cause_of_a_restart(job_manager: JobManager, waiting: Waiting) -> None:
    steps = [lambda: fail(job_manager, JobStatus.RESTARTING), lambda: job_manager.gateway.move(JOB, JobStatus.FINISHED)]
    log = Lines(lambda: steps.pop(0)() if steps else None)
    waiting(JobStatusCondition(JOB, ["FINISHED"]), 60, log)
    assert len(log.said) == 2
    assert "it is RESTARTING; last failure: ValueError: no such airport; no checkpoint yet" in log.said[1]


@WAITS
def test_wait_logs_when_the_session_stops_and_starts_answering(job_manager: JobManager, waiting: Waiting) -> None:
    steps = [job_manager.stop, job_manager.start, lambda: job_manager.gateway.move(JOB, JobStatus.FINISHED)]
    log = Lines(lambda: steps.pop(0)() if steps else None)
    waiting(JobStatusCondition(JOB, ["FINISHED"]), 30, log)
    assert [bool(re.search(r"the session is away; .*cannot be reached", line)) for line in log.said] == [
        False,
        True,
        False,
    ]


@WAITS
def test_wait_logs_that_a_driver_does_not_lead_yet(job_manager: JobManager, waiting: Waiting) -> None:
    job_manager.faults.append(Fault(f"/jobs/{JOB}$", 503, times=3))
    log = Lines(lambda: job_manager.gateway.move(JOB, JobStatus.FINISHED) if len(log.said) == 2 else None)
    waiting(JobStatusCondition(JOB, ["FINISHED"]), 30, log)
    assert "the session does not serve now; " in log.said[0]
    assert "a fault of the test" in log.said[0]
    assert "it is RUNNING; no checkpoint yet" in log.said[1]


@WAITS
def test_wait_without_a_change_is_logged_repeatedly(
    job_manager: JobManager, waiting: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_SECONDS", 0.05)
    log = Lines(lambda: job_manager.gateway.move(JOB, JobStatus.FINISHED) if len(log.said) == 3 else None)
    waiting(JobStatusCondition(JOB, ["FINISHED"]), 60, log)
    assert len(log.said) >= 3  # the end may arrive after the next interval
    assert all("it is RUNNING" in line for line in log.said)


def test_wait_logs_a_line_at_least_every_half_minute() -> None:
    clock, log = Clock(), Lines()
    waiting = Progress(log, "a job", clock)
    waiting.say("it is RUNNING", "no checkpoint yet")
    for pause in waiting.pauses(100.0):
        clock.now += pause
    assert clock.now == 1100.0
    assert log.said[1:] == [
        f"Waiting for a job: it is RUNNING; no checkpoint yet (seen {age} s ago)" for age in (30, 60, 90)
    ]
    assert not waiting.is_due("it is RUNNING")
    clock.now += 20
    assert waiting.is_due("it is RUNNING")


CONDITIONS = [
    (JobStatusCondition(JOB, ["FINISHED"]), "it is RUNNING; last checkpoint 1 of"),
    (
        CheckpointCondition(JOB, CheckpointGoal(since_id=1, count=3)),
        "0 of 3 completed, the job is RUNNING; last checkpoint 1 of",
    ),
]


@pytest.mark.parametrize(("condition", "words"), CONDITIONS)
def test_triggerer_logs_the_standing_of_a_wait(
    job_manager: JobManager, condition: Condition, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    assert words in triggerer_log(job_manager, condition, monkeypatch)


def test_triggerer_logs_the_standing_of_an_operation(job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> None:
    job_manager.gateway.polls_until_done = 10_000
    with CkptHook().get_conn() as client:
        client.trigger_savepoint(JOB, "/data", trigger_id="ab" * 16)
    said = triggerer_log(job_manager, OperationCondition(JOB, Operation.SAVEPOINT, "ab" * 16), monkeypatch)
    assert "it is in progress; the job is RUNNING; no checkpoint yet" in said
    fail(job_manager, JobStatus.RESTARTING)
    said = triggerer_log(job_manager, ReadyForSnapshotCondition(JOB), monkeypatch)
    assert "it is RESTARTING; last failure: ValueError: no such airport" in said


def triggerer_log(job_manager: JobManager, condition: Condition, monkeypatch: pytest.MonkeyPatch) -> str:
    """The job and its operations end when something has been logged."""

    def end() -> None:
        for operation in job_manager.gateway.operations.values():
            operation.polls_left = 0
        job_manager.gateway.move(JOB, JobStatus.FINISHED)

    wait = {"ckpt_conn_id": "ckpt_default", "deadline": time.time() + 3600, "poll_interval": 0.01}
    trigger, log = CkptTrigger(condition=condition, **wait), Lines(end)
    monkeypatch.setattr(type(trigger), "log", log)

    async def first() -> Any:
        return await anext(trigger.run())

    asyncio.run(first())
    return "\n".join(log.said)


def operators(**how: Any) -> dict[str, Any]:
    sensor = {"poke_interval": 0.01, "timeout": 30, **how}
    return {
        "savepoint": TakeSavepointOperator(task_id="t", job=JOB, target_directory="/d", **FAST, **how),
        "stop": StopWithSavepointOperator(task_id="t", job=JOB, target_directory="/d", **FAST, **how),
        "status": JobStatusSensor(task_id="t", job=JOB, expected="FINISHED", **sensor),
        "checkpoints": CheckpointCompletedSensor(task_id="t", job=JOB, since_checkpoint_id=0, **sensor),
    }


@pytest.mark.parametrize("deferrable", [True, False])
@pytest.mark.parametrize("name", ["savepoint", "stop", "status", "checkpoints"])
def test_failed_job_is_logged_with_its_trace(
    job_manager: JobManager, task: Task, name: str, deferrable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(job_manager)
    operator, log = operators(deferrable=deferrable)[name], Lines()
    monkeypatch.setattr(type(operator), "log", log)
    with pytest.raises(Exception, match=r"is FAILED.*: ValueError: no such airport"):
        finish(operator, task.context())
    said = "\n".join(log.said)
    assert "Failure of task enrich (1/2) on host-7:4711 at 2023-11-14 22:13:20+00:00\n" + TRACE in said


def test_repeated_request_is_logged(job_manager: JobManager, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single request of an operator, not a wait, is repeated for minutes."""
    operator = CancelJobOperator(task_id="t", job=JOB, deferrable=False, **FAST)
    job_manager.stop()
    log = Lines(job_manager.start)
    monkeypatch.setattr(type(operator), "log", log)
    assert operator.execute(task.context())["status"] == "CANCELED"
    assert log.said[0].startswith("Waiting for the session to answer: the session is away; ")


def test_poking_sensor_logs_its_standing(job_manager: JobManager, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, log = JobStatusSensor(task_id="t", job=JOB, mode="poke"), Lines()
    monkeypatch.setattr(type(operator), "log", log)
    assert [operator.poke(task.context()) for _ in range(3)] == [False] * 3
    [line] = log.said
    assert line.startswith(f"Waiting for job {JOB} to be FINISHED: it is RUNNING; no checkpoint yet ")
    job_manager.stop()
    assert operator.poke(task.context()) is False
    assert "the session is away; " in log.said[1]


def test_number_that_is_not_a_time_is_shown_unchanged() -> None:
    assert moment(1_700_000_000_000) == "2023-11-14 22:13:20+00:00"
    assert moment(2**63 - 1) == f"{2**63 - 1} ms"


def test_both_ends_of_a_long_trace_are_kept() -> None:
    text = "the first line\n" + "x" * 3 * MAX_TRACE_CHARS + "\nCaused by: the last line"
    assert shortened(TRACE) == TRACE
    assert len(shortened(text)) < MAX_TRACE_CHARS + 100
    assert shortened(text).startswith("the first line\n")
    assert shortened(text).endswith("\nCaused by: the last line")


@pytest.mark.parametrize("deferrable", [True, False])
def test_job_that_fails_after_its_submission_is_logged_with_its_trace(
    job_manager: JobManager,
    task: Task,
    deferrable: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "flights.py").write_text("def pipeline(spark): ...\n")
    operator = SubmitJobOperator(
        task_id="t", pipeline=str(tmp_path / "flights.py"), deferrable=deferrable, wait_for_completion=True, **FAST
    )
    context = task.context()
    log = Lines(lambda: fail(job_manager, job_id=started(job_manager)) if "RUNNING" in log.said[-1] else None)
    monkeypatch.setattr(type(operator), "log", log)
    monkeypatch.setattr(CkptTrigger, "log", log)
    with pytest.raises(Exception, match=r"is FAILED, not FINISHED: ValueError: no such airport"):
        finish(operator, context)
    assert TRACE in "\n".join(log.said)


def started(job_manager: JobManager) -> str:
    return next(job_id for job_id in job_manager.gateway.jobs if job_id != JOB)
