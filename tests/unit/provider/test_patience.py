"""A session that is away, a new leader, and what looks like it: waited for by every request of every operator."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ckpt.exceptions import (
    CkptJobFailed,
    CkptNotFound,
    CkptUnavailable,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.operators.cancel import CancelJobOperator
from airflow_provider_ckpt.operators.checkpoint import TriggerCheckpointOperator
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor
from airflow_provider_ckpt.sensors.job import JobStatusSensor
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster.gateway_values import JobTerminated, OperationStatus
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task, deferral, finish, fire

FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 30}
SENSOR = {"defer_after": 0, "poke_interval": 0.01, "timeout": 30}


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    path = tmp_path / "flights.py"
    path.write_text("def pipeline(spark): ...\n")
    return str(path)


def operators(pipeline: str, wait_timeout: float = 30) -> dict[str, Any]:
    fast = FAST | {"wait_timeout": wait_timeout}
    return {
        "submit": SubmitJobOperator(task_id="t", pipeline=pipeline, **fast),
        "patch": PatchCheckpointConfigOperator(task_id="t", job=JOB, interval="5 s", **fast),
        "checkpoint": TriggerCheckpointOperator(task_id="t", job=JOB, **fast),
        "savepoint": TakeSavepointOperator(task_id="t", job=JOB, target_directory="/data", **fast),
        "stop": StopWithSavepointOperator(task_id="t", job=JOB, target_directory="/data", **fast),
        "cancel": CancelJobOperator(task_id="t", job=JOB, **fast),
        "status": JobStatusSensor(task_id="t", job=JOB, expected="RUNNING", **SENSOR),
        "checkpoints": CheckpointCompletedSensor(task_id="t", job=JOB, since_checkpoint_id=0, **SENSOR),
    }


NAMES = sorted(operators("x.py"))


@pytest.mark.row("air.3")
@pytest.mark.parametrize("name", NAMES)
def test_every_request_is_repeated_while_another_driver_takes_over(
    job_manager: JobManager, pipeline: str, name: str
) -> None:
    """Each distinct request fails first: a driver that does not lead, a proxy without one, or a lost connection."""
    lines = _requests(job_manager, pipeline, name) & _requests(job_manager, pipeline, name)
    assert lines
    job_manager.reset()
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    job_manager.faults += [Fault(f"^{line}$", status) for line in lines for status in (503, 502)]
    assert finish(operators(pipeline)[name], Task().context())
    assert all(fault.times == 0 for fault in job_manager.faults)


def _requests(job_manager: JobManager, pipeline: str, name: str) -> set[str]:
    """Patterns of what the task sends; once in a while also of what a wait that another test has ended still sent."""
    job_manager.reset()
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    finish(operators(pipeline)[name], Task().context())
    return {line.replace(_own_id(line), "[0-9a-f]{32}") for line in job_manager.received}


def _own_id(line: str) -> str:
    """An id that another run does not have: of a job or an operation; never a job that was there before."""
    parts = [part for part in line.split("/") if len(part) == 32 and part != JOB]
    return parts[0] if parts else "\0"


@pytest.mark.parametrize("name", ["submit", "patch", "stop", "cancel"])
def test_error_names_a_session_that_never_answers(
    job_manager: JobManager, task: Task, pipeline: str, name: str
) -> None:
    job_manager.stop()
    with pytest.raises(CkptUnavailable, match="cannot be reached"):
        operators(pipeline, wait_timeout=0.3)[name].execute(task.context())


@pytest.mark.parametrize("name", ["patch", "checkpoint", "savepoint", "stop", "cancel", "status", "checkpoints"])
def test_single_not_found_is_looked_up_again(job_manager: JobManager, task: Task, pipeline: str, name: str) -> None:
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    job_manager.faults.append(Fault(f"/jobs/{JOB}", 404, times=2))
    assert finish(operators(pipeline)[name], task.context())


@pytest.mark.parametrize("name", ["patch", "checkpoint", "savepoint", "stop", "cancel", "status", "checkpoints"])
def test_an_unknown_job_costs_no_retry(job_manager: JobManager, task: Task, pipeline: str, name: str) -> None:
    del job_manager.gateway.jobs[JOB]
    with pytest.raises(CkptNotFound):
        finish(operators(pipeline)[name], task.context())


@pytest.mark.row("air.3")
@pytest.mark.parametrize("name", ["checkpoint", "savepoint", "stop"])
def test_a_deferred_wait_survives_a_driver_that_forgot_the_operation(
    job_manager: JobManager, task: Task, pipeline: str, name: str
) -> None:
    operator, context = operators(pipeline)[name], task.context()
    deferred = deferral(operator, context)
    job_manager.gateway.operations.clear()
    job_manager.faults.append(Fault(f"/jobs/{JOB}/.*/", 503, times=2))
    event = fire(deferred)
    assert event["status"] == "missing"
    resume = lambda: operator.resume_execution("execute_complete", {"event": event}, context)  # noqa: E731
    assert finish(operator, context, start=resume)["trigger_id"] in job_manager.gateway.operations


def test_a_stop_whose_job_ended_under_the_driver_before_is_recovered(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    operator, context = operators(pipeline)["stop"], task.context()
    deferred = deferral(operator, context)
    fire(deferred)
    job_manager.gateway.operations.clear()
    event = fire(deferred)
    assert event["status"] == "missing"
    result = operator.resume_execution("execute_complete", {"event": event}, context)
    assert result["savepoint_path"].startswith("file:/data/savepoint-")
    assert job_manager.gateway.triggered["savepoint"] == 1


@pytest.mark.row("air.3")
@pytest.mark.parametrize("state", [JobStatus.RESTARTING, JobStatus.CREATED, JobStatus.RECONCILING])
@pytest.mark.parametrize("name", ["checkpoint", "savepoint", "stop"])
def test_a_job_that_is_restarting_is_waited_for(
    job_manager: JobManager, task: Task, pipeline: str, name: str, state: JobStatus
) -> None:
    gateway = job_manager.gateway
    gateway.move(JOB, state)
    operator, context = operators(pipeline)[name], task.context()
    deferred = deferral(operator, context)
    assert sum(gateway.triggered.values()) == 0
    gateway.move(JOB, JobStatus.RUNNING)
    event = fire(deferred)
    resume = lambda: operator.resume_execution("execute_complete", {"event": event}, context)  # noqa: E731
    assert finish(operator, context, start=resume)["job_id"] == JOB


def test_a_job_that_restarts_for_too_long_gets_no_savepoint(job_manager: JobManager, task: Task, pipeline: str) -> None:
    job_manager.gateway.move(JOB, JobStatus.RESTARTING)
    operator = TakeSavepointOperator(task_id="t", job=JOB, target_directory="/d", **FAST | {"wait_timeout": 0.1})
    with pytest.raises(CkptWaitTimeout, match="No savepoint was started"):
        finish(operator, task.context())


def failing_once(job_manager: JobManager, meanwhile: Callable[[], None]) -> None:
    """The next operation fails, and ``meanwhile`` something happens to the job."""
    gateway, savepoint = job_manager.gateway, job_manager.gateway._savepoint

    def fail(*_: Any) -> OperationStatus:
        gateway._savepoint = savepoint  # type: ignore[method-assign]
        meanwhile()
        return OperationStatus(
            True, failure=FailureCause("CheckpointException", "suspending", "CheckpointException: suspending")
        )

    gateway._savepoint = fail  # type: ignore[assignment, method-assign]


@pytest.mark.row("air.3")
@pytest.mark.parametrize("name", ["savepoint", "stop"])
def test_operation_ended_by_a_job_restart_is_started_again(
    job_manager: JobManager, task: Task, pipeline: str, name: str
) -> None:
    def restart() -> None:
        job_manager.gateway.move(JOB, JobStatus.RESTARTING)
        job_manager.gateway.move(JOB, JobStatus.RUNNING)

    failing_once(job_manager, restart)
    assert finish(operators(pipeline)[name], task.context())["savepoint_path"]
    assert job_manager.gateway.triggered["savepoint"] == 2


@pytest.mark.row("air.3")
def test_the_second_of_two_stops_returns_the_savepoint_of_the_first(job_manager: JobManager, pipeline: str) -> None:
    first, context = operators(pipeline)["stop"], Task().context()
    deferred = deferral(first, context)
    failing_once(job_manager, lambda: None)
    second, second_context = operators(pipeline)["stop"], Task().context()
    losing = deferral(second, second_context)
    event = fire(losing)
    assert event["status"] == "failed"
    winner = fire(deferred)
    result = second.resume_execution("execute_complete", {"event": event}, second_context)
    assert result["savepoint_path"] == winner["result"]["savepoint_path"]


@pytest.mark.row("air.3")
def test_a_stop_that_comes_while_another_one_ends_returns_its_savepoint(
    job_manager: JobManager, task: Task, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway = job_manager.gateway

    async def too_late(job_id: str, *_: Any) -> str:
        gateway.complete_checkpoint(gateway.jobs[job_id], CheckpointType.SYNC_SAVEPOINT, "NATIVE")
        gateway.move(job_id, JobStatus.FINISHED)
        raise JobTerminated(job_id, JobStatus.FINISHED)

    monkeypatch.setattr(gateway, "take_savepoint", too_late)
    assert finish(operators(pipeline)["stop"], task.context())["savepoint_path"].startswith("file:/data/savepoint-")


@pytest.mark.parametrize("name", ["checkpoint", "savepoint", "stop"])
def test_operation_on_an_ended_job_fails_the_task(
    job_manager: JobManager, task: Task, pipeline: str, name: str
) -> None:
    job_manager.gateway.move(JOB, JobStatus.CANCELED)
    with pytest.raises(CkptJobFailed, match=r"is CANCELED; it can no longer take a .*"):
        finish(operators(pipeline)[name], task.context())
    assert sum(job_manager.gateway.triggered.values()) == 0


def test_a_stop_of_a_job_that_is_being_stopped_waits_for_that(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    gateway = job_manager.gateway
    gateway.start_checkpoint(gateway.jobs[JOB], CheckpointType.SYNC_SAVEPOINT, "NATIVE")
    operator, context = operators(pipeline)["stop"], task.context()
    deferred = deferral(operator, context)
    assert gateway.triggered["savepoint"] == 0
    _, path = gateway.complete_checkpoint(gateway.jobs[JOB], CheckpointType.SYNC_SAVEPOINT, "NATIVE")
    gateway.move(JOB, JobStatus.FINISHED)
    result = operator.resume_execution("execute_complete", {"event": fire(deferred)}, context)
    assert result["savepoint_path"] == path
    assert gateway.triggered["savepoint"] == 0


@pytest.mark.row("air.3")
@pytest.mark.parametrize("forgotten", [True, False])
def test_clearing_a_stop_that_had_succeeded_returns_its_savepoint(
    job_manager: JobManager, task: Task, pipeline: str, forgotten: bool
) -> None:
    first = finish(operators(pipeline)["stop"], task.context())
    if forgotten:
        job_manager.gateway.operations.clear()
        del job_manager.gateway.jobs[JOB]
    assert finish(operators(pipeline)["stop"], task.context())["savepoint_path"] == first["savepoint_path"]
    assert job_manager.gateway.triggered["savepoint"] == 1
