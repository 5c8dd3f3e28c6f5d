"""A restore drill as a task: it judges, notes the result in the catalogue, and always removes the job."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferred

from airflow_provider_ckpt.conditions.health import progress_of_restore
from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptDrillFailed,
    CkptNotFound,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.operators.drill import RestoreDrillOperator
from ckpt_runtime.contract.jobs import JobDetails, Vertex
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster import gateway_values as g
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.savepoint_entry import Mark, SavepointEntry
from tests.support.rest_examples import SNAPSHOT, catalogue
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task, deferral, fire

FAST: dict[str, Any] = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 10}


@pytest.fixture(autouse=True)
def savepoints(job_manager: JobManager) -> None:
    job_manager.gateway.catalogue = catalogue(job_manager.gateway.now)


@pytest.fixture
def drill(tmp_path: Path) -> RestoreDrillOperator:
    path = tmp_path / "flights.py"
    path.write_text("def pipeline(spark): ...\n")
    return RestoreDrillOperator(task_id="t", dag=None, pipeline=str(path), latest_of="flights", checkpoints="2", **FAST)


def resumed(operator: RestoreDrillOperator, deferred: TaskDeferred, context: Any) -> Any:
    return operator.resume_execution("execute_complete", {"event": fire(deferred)}, context)


def entry(job_manager: JobManager) -> SavepointEntry:
    found = job_manager.gateway.catalogue[0].entry
    assert found is not None
    return found


def newest(job_manager: JobManager) -> Mark:
    return entry(job_manager).drills[-1]


@pytest.mark.row("air.2", "air.9", "air.10")
def test_the_latest_good_savepoint_is_drilled_noted_and_the_job_removed(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator
) -> None:
    context = task.context()
    deferred = deferral(drill, context)
    job = job_manager.gateway.jobs[deferred.trigger.condition.job_id]
    assert (job.request.drill, job.request.savepoint_path) == (True, SNAPSHOT)
    assert job.request.configuration == {"execution.checkpointing.interval": "5000 ms"}
    assert job.job_id in context["ti"].xcoms["_link_CkptJobLink"]
    for _ in range(2):
        job_manager.gateway.complete_checkpoint(job)
    result = resumed(drill, deferred, context)
    assert (result["savepoint_path"], result["passed"], result["checkpoints"]) == (SNAPSHOT, True, 2)
    assert result["restored_after_ms"] == 5
    assert result["healthy_after_ms"] >= 0
    assert job.status is JobStatus.CANCELED
    mark = newest(job_manager)
    assert (mark.passed, mark.duration_ms) == (True, result["healthy_after_ms"])
    assert "2 checkpoints after" in mark.detail
    assert (mark.by or "").startswith("airflow: ")
    assert task.store == {}


@pytest.mark.row("air.9", "air.10")
def test_a_drill_that_fails_is_noted_with_the_reason(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator
) -> None:
    context = task.context()
    deferred = deferral(drill, context)
    job = job_manager.gateway.jobs[deferred.trigger.condition.job_id]
    job.exceptions = [g.ExceptionEntry(FailureCause("StateError", "the state does not fit", "StateError: no"), 1)]
    job_manager.gateway.move(job.job_id, JobStatus.FAILED)
    with pytest.raises(CkptDrillFailed, match="is FAILED after 0 checkpoints"):
        resumed(drill, deferred, context)
    assert not newest(job_manager).passed
    assert "is FAILED" in newest(job_manager).detail


@pytest.mark.row("air.9")
@pytest.mark.parametrize("end", [JobStatus.CANCELED, None])
def test_drill_ended_from_outside_is_not_noted(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator, end: JobStatus | None
) -> None:
    """Cancelled by a person, or gone with its driver: it may be tried again."""
    before = entry(job_manager)
    context = task.context()
    deferred = deferral(drill, context)
    if end is None:
        del job_manager.gateway.jobs[deferred.trigger.condition.job_id]
    else:
        job_manager.gateway.move(deferred.trigger.condition.job_id, end)
    with pytest.raises(CkptOperationFailed):
        resumed(drill, deferred, context)
    assert entry(job_manager) == before


@pytest.mark.row("air.9")
def test_drill_without_checkpoints_in_time_fails_and_is_removed(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator
) -> None:
    drill.wait_timeout = 0.2
    context = task.context()
    deferred = deferral(drill, context)
    with pytest.raises(CkptWaitTimeout, match="The drill is removed"):
        resumed(drill, deferred, context)
    assert job_manager.gateway.jobs[deferred.trigger.condition.job_id].status is JobStatus.CANCELED
    assert not newest(job_manager).passed
    assert "its state is restored" in newest(job_manager).detail


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"SCHEDULED": 1, "RUNNING": 1}, "it waits for slots"),
        ({"INITIALIZING": 1, "RUNNING": 1}, "its state is being restored"),
        ({"RUNNING": 2}, "its state is restored"),
    ],
)
def test_drill_logs_the_progress_of_a_restore(tasks: dict[str, int], expected: str) -> None:
    vertex = Vertex(id="v", name="v", parallelism=2, max_parallelism=128, state="RUNNING", tasks=tasks)
    job = JobDetails(
        job_id=JOB, name="n", state="RUNNING", start_time_ms=1, end_time_ms=-1, duration_ms=1, timestamps_ms={},
        vertices=(vertex,),
    )  # fmt: skip
    assert progress_of_restore(job) == expected


@pytest.mark.row("air.3", "air.9")
def test_later_try_removes_the_drill_of_an_earlier_one(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator
) -> None:
    first = deferral(drill, task.context()).trigger.condition.job_id
    second = deferral(drill, task.context()).trigger.condition.job_id
    assert first != second
    assert job_manager.gateway.jobs[first].status is JobStatus.CANCELED
    assert job_manager.gateway.jobs[second].status is JobStatus.RUNNING
    drill.on_kill()
    assert job_manager.gateway.jobs[second].status is JobStatus.CANCELED


@pytest.mark.row("air.9")
def test_drill_is_removed_although_its_result_cannot_be_recorded(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator
) -> None:
    context = task.context()
    deferred = deferral(drill, context)
    job = job_manager.gateway.jobs[deferred.trigger.condition.job_id]
    for _ in range(2):
        job_manager.gateway.complete_checkpoint(job)
    job_manager.faults = [Fault("POST /savepoints/marks", 409)]
    with pytest.raises(CkptOperationFailed):
        resumed(drill, deferred, context)
    assert job.status is JobStatus.CANCELED


@pytest.mark.row("air.8", "air.9")
def test_a_server_without_drills_starts_nothing(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Flink cluster, or an earlier session: no request of the drill may be taken for one of a real job."""
    known = set(job_manager.gateway.jobs)
    drill.savepoint_path, drill.latest_of = "/data/sp", None
    job_manager.faults = [Fault(r"POST /jars/.*/drill", 404, times=10)]
    with pytest.raises((CkptNotFound, CkptOperationFailed)):
        drill.execute(task.context())
    assert set(job_manager.gateway.jobs) == known
    assert job_manager.gateway.planned == []


def test_missing_good_savepoint_fails_the_drill(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator
) -> None:
    job_manager.gateway.catalogue = [replace(found, problem="no") for found in job_manager.gateway.catalogue]
    with pytest.raises(CkptNotFound, match="there is no good savepoint"):
        drill.execute(task.context())


def test_a_refused_drill_is_not_noted(job_manager: JobManager, task: Task, drill: RestoreDrillOperator) -> None:
    before = entry(job_manager)
    drill.savepoint_path, drill.latest_of = "/data/nope", None
    with pytest.raises(CkptRequestRejected, match="Cannot find checkpoint or savepoint directory"):
        drill.execute(task.context())
    assert entry(job_manager) == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latest_of": ""}, "savepoint_path: None is not acceptable, set either it or latest_of"),
        ({"savepoint_path": "/s"}, "set either it or latest_of"),
        ({"pipeline_id": "p"}, "set either pipeline, a path, or pipeline_id"),
        ({"checkpoints": 0}, "checkpoints: 0 is not acceptable"),
        ({"checkpoint_interval": "soon"}, "checkpoint_interval: 'soon' is not acceptable"),
        ({"mark": "perhaps"}, "mark: 'perhaps' is not acceptable"),
        ({"args": "--rows"}, "args: '--rows' is not acceptable, it must be a list of texts"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_sent(
    job_manager: JobManager, task: Task, drill: RestoreDrillOperator, change: dict[str, Any], message: str
) -> None:
    for name, value in change.items():
        setattr(drill, name, value)
    with pytest.raises(CkptArgumentInvalid, match=message):
        drill.execute(task.context())
    assert job_manager.received == []


@pytest.mark.row("air.10")
def test_the_hook_knows_the_catalogue(job_manager: JobManager) -> None:
    hook = CkptHook()
    assert [found.good for found in hook.savepoints()] == [True, False, True, False]
    latest = hook.latest_good_savepoint("/s", job="flights")
    assert latest is not None
    assert latest.location == SNAPSHOT
    assert hook.latest_good_savepoint("/s", job="another") is None
    completed = datetime.fromtimestamp(latest.completion_timestamp / 1000, UTC)
    assert hook.latest_good_savepoint("/s", before=completed + timedelta(seconds=1)) == latest
    assert hook.latest_good_savepoint("/s", before=datetime(1971, 1, 1, tzinfo=UTC)) is None


@pytest.mark.row("air.6")
def test_the_dag_is_installed_by_one_line_and_its_parameters_are_checked() -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    from airflow_provider_ckpt.dags import ckpt_restore_drill

    assert ckpt_restore_drill.dag_id == "ckpt_restore_drill"
    assert DagSerialization.to_dict(ckpt_restore_drill)
    for name, bad in (("checkpoint_interval", "soon"), ("entry", "main"), ("checkpoints", 0), ("parallelism", 0)):
        param = ckpt_restore_drill.params.get_param(name)
        with pytest.raises(ValueError, match="Failed validating"):
            param.resolve(bad)
    for param in map(ckpt_restore_drill.params.get_param, ckpt_restore_drill.params):
        assert param.schema["title"]
        assert param.description
        assert param.schema["section"]
