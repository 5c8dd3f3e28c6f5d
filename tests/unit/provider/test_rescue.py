"""A pending checkpoint that is nearly done gets more time: the design's example, on a clock that the test moves."""

from __future__ import annotations

import time
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.rescue import RescueCheckpointOperator
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics, SubtaskStats
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Finish, JobManager, Task, deferral, fire
from tests.unit.runtime.rest.fake_gateway import PARALLELISM, VERTICES

MINUTE = 60_000
FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 5}


def pending(job_manager: JobManager, acknowledged: int, left_ms: int) -> int:
    """A checkpoint that so many of the six subtasks have acknowledged, and so long before it expires."""
    gateway, job = job_manager.gateway, job_manager.gateway.jobs[JOB]
    gateway.now = round(time.time() * 1000)
    number = gateway.start_checkpoint(job)
    job.tracker.report_deadline(number, gateway.now + left_ms)
    subtasks = [(vertex, index) for vertex in VERTICES for index in range(PARALLELISM)]
    for vertex, index in subtasks[:acknowledged]:
        metrics = CheckpointMetrics(1, 2, 100, processed_data=5, alignment_duration=3, start_delay=1)
        job.tracker.report_subtask(number, vertex, SubtaskStats(index, gateway.now, 100, metrics))
    return number


def timeout_of(job_manager: JobManager) -> int:
    job = job_manager.gateway.jobs[JOB]
    return int(job.overrides.applied_to(job.submitted.settings).timeout_ms)


def rescue(**arguments: Any) -> RescueCheckpointOperator:
    return RescueCheckpointOperator(task_id="t", job=JOB, **FAST | {"min_progress": 80} | arguments)


@pytest.mark.row("571.3")
@pytest.mark.row("air.6")
def test_a_checkpoint_that_is_nearly_done_gets_five_more_minutes_and_then_the_old_timeout_holds(
    job_manager: JobManager, task: Task, finish: Finish
) -> None:
    number = pending(job_manager, 5, left_ms=10_000)
    assert timeout_of(job_manager) == 10 * MINUTE
    first = deferral(rescue(), task.context())
    operator, context = rescue(), task.context()
    event = fire(first)

    def resume() -> Any:
        return operator.resume_execution("execute_complete", {"event": event}, context)

    with pytest.raises(TaskDeferred) as deferred:
        resume()
    assert timeout_of(job_manager) == 15 * MINUTE
    job = job_manager.gateway.jobs[JOB]
    job.tracker.report_deadline(number, job_manager.gateway.now + 5 * MINUTE)
    job.tracker.report_completed(number, f"file:/data/chk-{number}")
    event = fire(deferred.value)
    result = finish(operator, context, start=resume)
    assert (result["what"], result["checkpoint_id"]) == ("COMPLETED", number)
    assert (result["timeout_ms"], result["former_timeout_ms"]) == (15 * MINUTE, 10 * MINUTE)
    assert timeout_of(job_manager) == 10 * MINUTE


@pytest.mark.parametrize(("acknowledged", "left_ms"), [(4, 10_000), (5, 5 * MINUTE)])
def test_what_is_far_from_done_or_from_its_end_is_left_alone(
    job_manager: JobManager, task: Task, finish: Finish, acknowledged: int, left_ms: int
) -> None:
    pending(job_manager, acknowledged, left_ms)
    result = finish(rescue(wait_timeout=0.1, deferrable=False), task.context())
    assert (result["what"], result["checkpoint_id"]) == ("NOTHING", None)
    assert timeout_of(job_manager) == 10 * MINUTE


def test_no_more_than_the_longest_timeout_is_given(job_manager: JobManager, task: Task, finish: Finish) -> None:
    number = pending(job_manager, 6, left_ms=10_000)
    first = deferral(rescue(max_timeout="10 min"), task.context())
    job_manager.gateway.jobs[JOB].tracker.report_failed(number, job_manager.gateway.now, "expired")
    job_manager.gateway.jobs[JOB].tracker.report_failed_without_id()
    event = fire(first)
    assert event["status"] == "timeout"
    assert timeout_of(job_manager) == 10 * MINUTE


def test_the_end_of_the_job_ends_the_watch(job_manager: JobManager, task: Task, finish: Finish) -> None:
    job_manager.gateway.move(JOB, JobStatus.FINISHED)
    assert finish(rescue(), task.context())["what"] == "JOB_ENDED"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"min_progress": 101}, "min_progress"), ({"within": "soon"}, "within"), ({"extension": 0}, "extension")],
)
def test_bad_arguments_are_named(job_manager: JobManager, task: Task, arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        rescue(**arguments).execute(task.context())
