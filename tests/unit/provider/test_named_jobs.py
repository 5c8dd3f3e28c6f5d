"""Jobs that are given by their names: found once, kept over retries and deferrals, and messages without one."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSkipException, TaskDeferred

from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptJobAmbiguous,
    CkptJobFailed,
    CkptJobNotFound,
    CkptJobNotResumable,
    CkptJobRunning,
    CkptOperationFailed,
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
from ckpt_runtime.jobmaster.gateway_values import Conflict, JobAlreadyExists
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, JobManager, Task, deferral, finish, fire

FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 10}
SENSOR = {"defer_after": 0, "poke_interval": 0.01, "timeout": 10}
NAME = "contract-job"
OTHER = "1" * 32

BY_NAME = [
    (CancelJobOperator, FAST),
    (TriggerCheckpointOperator, FAST),
    (PatchCheckpointConfigOperator, FAST | {"interval": 5}),
    (TakeSavepointOperator, FAST | {"target_directory": "/data"}),
    (StopWithSavepointOperator, FAST | {"target_directory": "/data"}),
    (JobStatusSensor, SENSOR | {"expected": "RUNNING"}),
    (JobStatusSensor, SENSOR | {"expected": "RUNNING", "mode": "poke"}),
    (CheckpointCompletedSensor, SENSOR | {"since_checkpoint_id": 0}),
]


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    path = tmp_path / "orders.py"
    path.write_text("def pipeline(spark): ...\n")
    return str(path)


@pytest.mark.row("air.2")
@pytest.mark.parametrize(("kind", "arguments"), BY_NAME)
def test_every_task_takes_a_name(job_manager: JobManager, task: Task, kind: Any, arguments: dict[str, Any]) -> None:
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    job_manager.gateway.move(job_manager.gateway.add_job(OTHER, NAME).job_id, JobStatus.FINISHED)
    context = task.context()
    assert finish(kind(task_id="t", job=f" {NAME}", **arguments), context)["job_id"] == JOB
    assert f"/jobs/{JOB}" in context["ti"].xcoms["_link_CkptJobLink"]


@pytest.mark.row("air.2")
@pytest.mark.parametrize(("kind", "arguments"), BY_NAME)
def test_an_ambiguous_name_lists_the_candidates(
    job_manager: JobManager, task: Task, kind: Any, arguments: dict[str, Any]
) -> None:
    job_manager.gateway.add_job(OTHER, NAME)
    with pytest.raises(CkptJobAmbiguous, match=rf"2 active jobs, .*{OTHER} .*RUNNING.*{JOB}.*Give the id"):
        kind(task_id="t", job=NAME, **arguments).execute(task.context())
    assert {line.partition(" ")[0] for line in job_manager.received} == {"GET"}


@pytest.mark.parametrize(("kind", "arguments"), BY_NAME)
def test_missing_job_fails_or_skips_the_task_as_configured(
    job_manager: JobManager, task: Task, kind: Any, arguments: dict[str, Any]
) -> None:
    with pytest.raises(CkptJobNotFound, match=f"no job is named 'nope'; active jobs are {JOB}.*if_not_found='skip'"):
        kind(task_id="t", job="nope", **arguments).execute(task.context())
    for job in ("nope", OTHER, None):  # the last is what a failed task gives that came to know no job
        with pytest.raises(AirflowSkipException):
            kind(task_id="t", job=job, if_not_found="skip", **arguments).execute(task.context())


def test_name_of_an_ended_job_fails_with_the_state_of_that_job(job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.move(JOB, JobStatus.FINISHED)
    with pytest.raises(CkptJobNotFound, match=f"the latest one, {JOB}, is FINISHED; no job is active in this session"):
        TakeSavepointOperator(task_id="t", job=NAME, **FAST).execute(task.context())
    sensor = JobStatusSensor(task_id="t", job=NAME, **SENSOR)
    assert fire(deferral(sensor, task.context()))["result"]["job_id"] == JOB


def test_a_restore_drill_does_not_share_the_name_of_the_job_that_it_restores(
    job_manager: JobManager, task: Task
) -> None:
    drill = job_manager.gateway.add_job(OTHER, NAME)
    drill.request = replace(drill.request, drill=True)
    operator = TakeSavepointOperator(task_id="t", job=NAME, target_directory="/data", **FAST)
    assert finish(operator, task.context())["job_id"] == JOB
    job_manager.gateway.move(JOB, JobStatus.FINISHED)
    job_manager.gateway.move(OTHER, JobStatus.CANCELED)
    sensor = JobStatusSensor(task_id="t", job=NAME, **SENSOR)
    assert fire(deferral(sensor, task.context()))["result"]["job_id"] == JOB


def test_a_job_that_ends_after_it_was_found_skips_the_task_that_may_be_skipped_unless_it_has_failed(
    job_manager: JobManager,
) -> None:
    def savepoint(if_not_found: str, ends: JobStatus) -> Any:
        job_manager.reset()
        operator = TakeSavepointOperator(task_id="t", job=NAME, if_not_found=if_not_found, **FAST)
        context = Task().context()
        job_manager.gateway.move(JOB, JobStatus.RESTARTING)
        deferred = deferral(operator, context)
        job_manager.gateway.move(JOB, ends)
        event = fire(deferred)
        return operator.resume_execution("execute_complete", {"event": event}, context)

    for ends in (JobStatus.FINISHED, JobStatus.CANCELED):
        with pytest.raises(AirflowSkipException, match=f"{JOB} is {ends}; it can no longer take a savepoint"):
            savepoint("skip", ends)
        with pytest.raises(CkptJobFailed, match=f"{JOB} is {ends}; it can no longer take a savepoint"):
            savepoint("fail", ends)
    with pytest.raises(CkptJobFailed, match=f"{JOB} is FAILED"):
        savepoint("skip", JobStatus.FAILED)


def test_an_id_needs_no_look_and_a_wrong_word_is_refused(job_manager: JobManager, task: Task) -> None:
    PatchCheckpointConfigOperator(task_id="t", job=JOB.upper(), interval=5, **FAST).execute(task.context())
    assert job_manager.count("GET /jobs/overview") == 0
    with pytest.raises(CkptArgumentInvalid, match="^if_not_found: "):
        PatchCheckpointConfigOperator(task_id="t", job=JOB, interval=5, if_not_found="perhaps").execute(task.context())


@pytest.mark.row("air.3")
def test_a_deferral_and_a_retry_keep_the_job_and_a_cleared_success_looks_again(
    job_manager: JobManager, task: Task
) -> None:
    def stop() -> StopWithSavepointOperator:
        return StopWithSavepointOperator(task_id="t", job=NAME, target_directory="/data", **FAST)

    def savepoint() -> TakeSavepointOperator:
        return TakeSavepointOperator(task_id="t", job=NAME, target_directory="/data", **FAST)

    event = fire(deferral(stop(), task.context()))
    job_manager.gateway.add_job(OTHER, NAME)
    resumed, context = stop(), task.context()
    start = partial(resumed.resume_execution, "execute_complete", {"event": event}, context)
    assert finish(resumed, context, start=start)["job_id"] == JOB
    assert finish(stop(), task.context())["job_id"] == JOB

    job_manager.reset()
    task = Task()
    deferral(savepoint(), task.context())
    job_manager.gateway.add_job(OTHER, NAME)
    assert finish(savepoint(), task.context())["job_id"] == JOB
    job_manager.gateway.move(JOB, JobStatus.CANCELED)
    assert finish(savepoint(), task.context())["job_id"] == OTHER


# --- submitting under a name


def submit(pipeline: str, **arguments: Any) -> SubmitJobOperator:
    return SubmitJobOperator(task_id="t", pipeline=pipeline, **FAST | arguments)


def started(job_manager: JobManager) -> list[Any]:
    return [job for job_id, job in job_manager.gateway.jobs.items() if job_id != JOB]


@pytest.mark.row("air.2")
def test_a_name_is_given_to_the_job_and_has_to_be_free(job_manager: JobManager, task: Task, pipeline: str) -> None:
    finish(submit(pipeline, job_name="orders"), task.context())
    (job,) = started(job_manager)
    assert job.request.configuration == {"pipeline.name": "orders", "pipeline.unique-name": "true"}
    with pytest.raises(CkptJobRunning, match=f"{NAME!r} is already the name of job {JOB} .RUNNING.; end it first"):
        submit(pipeline, job_name=NAME).execute(Task().context())
    assert started(job_manager) == [job]


@pytest.mark.row("air.2")
@pytest.mark.parametrize("if_running", ["fail", "wait", "reuse"])
@pytest.mark.parametrize("during", ["store_pipeline", "run_pipeline"])
def test_one_of_several_runs_that_start_at_once_gets_its_job(
    job_manager: JobManager,
    task: Task,
    pipeline: str,
    monkeypatch: pytest.MonkeyPatch,
    if_running: str,
    during: str,
) -> None:
    """The other run's job comes with this one's upload, or only the job manager sees it, which refuses this one."""
    gateway = job_manager.gateway
    done = getattr(gateway, during)

    async def beside_another_run(*arguments: Any) -> Any:
        gateway.add_job(OTHER, "orders")
        if during == "run_pipeline":
            raise Conflict(f"Job {OTHER}, which is CREATED, has the name 'orders' too")
        return await done(*arguments)

    monkeypatch.setattr(gateway, during, beside_another_run)
    operator, context = submit(pipeline, job_name="orders", if_running=if_running), task.context()
    if if_running == "fail":
        with pytest.raises(CkptJobRunning, match=OTHER):
            operator.execute(context)
    elif if_running == "reuse":
        assert finish(operator, context)["job_id"] == OTHER
    else:
        assert deferral(operator, context).trigger.condition.name == "orders"
    assert [job.job_id for job in started(job_manager)] == [OTHER]
    monkeypatch.setattr(gateway, during, done)
    gateway.move(OTHER, JobStatus.CANCELED)
    result = finish(submit(pipeline, job_name="orders", if_running=if_running), context)
    assert [job.job_id for job in started(job_manager)] == [OTHER, result["job_id"]]


def test_other_refusal_of_the_start_is_reported_unchanged(
    job_manager: JobManager, task: Task, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(request: Any) -> Any:
        raise JobAlreadyExists(request.job_id)

    monkeypatch.setattr(job_manager.gateway, "run_pipeline", run)
    with pytest.raises(CkptOperationFailed, match="already exists and was submitted with a different request"):
        submit(pipeline, job_name="orders").execute(task.context())


def test_the_end_of_the_other_job_is_waited_for(job_manager: JobManager, task: Task, pipeline: str) -> None:
    operator, context = submit(pipeline, job_name=NAME, if_running="wait"), task.context()
    deferred = deferral(operator, context)
    assert not started(job_manager)
    job_manager.gateway.move(JOB, JobStatus.FINISHED)
    start = partial(operator.resume_execution, "execute_complete", {"event": fire(deferred)}, context)
    result = finish(operator, context, start=start)
    assert [job.job_id for job in started(job_manager)] == [result["job_id"]]


def test_the_time_of_a_paused_dag_is_not_the_tasks(job_manager: JobManager, task: Task, pipeline: str) -> None:
    """The job that it starts then gets what was left for it."""
    operator, context = submit(pipeline, job_name=NAME, if_running="wait"), task.context()
    deferred = deferral(operator, context)
    job_manager.gateway.move(JOB, JobStatus.FINISHED)
    event = fire(deferred)
    event["at"] -= 3600
    event["trigger"]["deadline"] -= 3600
    with pytest.raises(TaskDeferred) as again:
        operator.resume_execution("execute_complete", {"event": event}, context)
    assert 0 < again.value.trigger.serialize()[1]["deadline"] - time.time() < FAST["wait_timeout"]


@pytest.mark.parametrize("deferrable", [True, False])
def test_the_other_job_is_reused_and_never_cancelled(
    job_manager: JobManager, task: Task, pipeline: str, deferrable: bool
) -> None:
    operator = submit(pipeline, job_name=NAME, if_running="reuse", deferrable=deferrable, wait_for_completion=True)
    operator.wait_timeout = 0.05
    operator.cancel_on_timeout = True
    with pytest.raises(Exception, match=f"Job {JOB} was not cancelled and keeps running"):
        finish(operator, task.context())
    operator.on_kill()
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING
    result = finish(submit(pipeline, job_name=NAME, if_running="reuse"), task.context())
    assert result["job_id"] == JOB
    assert not started(job_manager)


def test_a_job_that_follows_a_reused_one_has_an_id_of_its_own(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    gateway = job_manager.gateway
    gateway.move(JOB, JobStatus.CANCELED)
    finish(submit(pipeline, job_name="orders"), task.context())
    (own,) = started(job_manager)
    gateway.move(own.job_id, JobStatus.CANCELED)
    gateway.add_job(OTHER, "orders")
    reused = finish(submit(pipeline, job_name="orders", if_running="reuse"), task.context())
    assert reused["job_id"] == OTHER
    gateway.move(OTHER, JobStatus.CANCELED)
    third = finish(submit(pipeline, job_name="orders", if_running="reuse"), task.context())
    assert third["job_id"] not in (OTHER, own.job_id)
    assert len(started(job_manager)) == 3


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"if_running": "wait"}, "if_running"),
        ({"job_name": "a", "configuration": {"pipeline.name": "b"}}, "job_name"),
        ({"job_name": "a", "if_running": "perhaps"}, "if_running"),
        ({"from_latest_of": NAME, "savepoint_path": "/data/sp"}, "from_latest_of"),
        ({"from_latest_of": NAME, "latest_kind": "newest"}, "latest_kind"),
    ],
)
def test_bad_arguments_are_named(
    job_manager: JobManager, task: Task, pipeline: str, arguments: dict[str, Any], name: str
) -> None:
    job_manager.gateway.jobs[JOB].graph = job_manager.gateway.jobs[JOB].graph.__class__("a", (), ())
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        submit(pipeline, **arguments).execute(task.context())
    assert not started(job_manager)


# --- from the latest snapshot of a job


@pytest.mark.row("air.2")
@pytest.mark.parametrize(("kind", "wanted"), [("any", 2), ("savepoint", 1), ("checkpoint", 2)])
def test_a_job_starts_from_the_latest_of_another_once(
    job_manager: JobManager, task: Task, pipeline: str, kind: str, wanted: int
) -> None:
    gateway, job = job_manager.gateway, job_manager.gateway.jobs[JOB]
    paths = {1: gateway.complete_checkpoint(job, CheckpointType.SAVEPOINT, "NATIVE")[1]}
    paths[2] = gateway.complete_checkpoint(job)[1]
    gateway.move(JOB, JobStatus.CANCELED)
    first = submit(pipeline, from_latest_of=NAME, latest_kind=kind)
    deferral(first, task.context())
    (fresh,) = started(job_manager)
    assert fresh.request.savepoint_path == paths[wanted]
    fresh.graph = type(fresh.graph)(NAME, fresh.graph.vertices, fresh.graph.edges)
    gateway.complete_checkpoint(job)  # too late: the choice is made
    result = finish(submit(pipeline, from_latest_of=NAME, latest_kind=kind), task.context())
    assert (result["job_id"], result["started_from"]) == (fresh.job_id, paths[wanted])
    assert started(job_manager) == [fresh]


def test_cleared_success_whose_job_has_ended_resumes_from_the_latest_of_the_name(
    job_manager: JobManager, task: Task, pipeline: str
) -> None:
    gateway = job_manager.gateway
    gateway.complete_checkpoint(gateway.jobs[JOB])
    gateway.move(JOB, JobStatus.FINISHED)
    operator = submit(pipeline, from_latest_of="orders.py", if_no_snapshot="start")
    assert finish(operator, task.context())["started_from"] is None
    (first,) = started(job_manager)
    _, path = gateway.complete_checkpoint(first, CheckpointType.SYNC_SAVEPOINT, "NATIVE")
    gateway.move(first.job_id, JobStatus.FINISHED)
    assert finish(submit(pipeline, from_latest_of="orders.py"), task.context())["started_from"] == path


def test_missing_snapshot_to_start_from_is_reported(job_manager: JobManager, task: Task, pipeline: str) -> None:
    with pytest.raises(CkptJobNotFound, match="no job is named 'nope'"):
        submit(pipeline, from_latest_of="nope").execute(task.context())
    with pytest.raises(CkptJobNotResumable, match=f"{JOB} .*has no completed checkpoint or savepoint to start from"):
        submit(pipeline, from_latest_of=NAME).execute(Task().context())
    gateway, job = job_manager.gateway, job_manager.gateway.jobs[JOB]
    _, path = gateway.complete_checkpoint(job, CheckpointType.SAVEPOINT, "NATIVE")
    number, _ = gateway.complete_checkpoint(job)
    job.tracker.report_discarded(number)
    with pytest.raises(CkptJobNotResumable, match=f"the latest .* {number}, is not retained"):
        submit(pipeline, from_latest_of=NAME).execute(Task().context())
    assert not started(job_manager)
    result = finish(submit(pipeline, from_latest_of=NAME, latest_kind="savepoint"), Task().context())
    assert result["started_from"] == path
