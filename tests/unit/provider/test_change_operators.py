"""Changing a job's configuration and checkpoints, rescaling, cancelling, disposing as tasks; and its health sensor."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptJobFailed,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.operators.cancel import CancelJobOperator
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.operators.dispose import DisposeSavepointOperator
from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator
from airflow_provider_ckpt.operators.rescale import RescaleJobOperator
from airflow_provider_ckpt.sensors.health import CheckpointHealthSensor
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task, deferral, finish
from tests.unit.runtime.rest.fake_gateway import VERTICES

FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 10}
SENSOR = {"defer_after": 0, "poke_interval": 0.01, "timeout": 10}
INTERVAL = "execution.checkpointing.interval"
RESTARTS = "execution.checkpointing.incremental"


def update(**arguments: Any) -> UpdateJobConfigOperator:
    return UpdateJobConfigOperator(task_id="t", job=JOB, **FAST | arguments)


@pytest.fixture
def open_job(job_manager: JobManager) -> JobManager:
    job_manager.gateway.allow_list = ("*",)
    return job_manager


# --- configuration
@pytest.mark.row("air.2")
@pytest.mark.parametrize("deferrable", [True, False])
def test_configuration_change_is_logged_and_waited_for(
    open_job: JobManager, task: Task, deferrable: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = {INTERVAL: "7 s", RESTARTS: "true"}
    result = finish(update(configuration=changed, deferrable=deferrable), task.context())
    assert (result["job_id"], result["version"], result["restart"]) == (JOB, 2, True)
    assert result["changes"][INTERVAL] == {
        "before": None, "after": "7 s", "change": "live", "hidden_by_override": None,
    }  # fmt: skip
    said = capsys.readouterr().out
    assert f"{INTERVAL}: None -> 7 s (live)" in said
    again = finish(update(configuration=changed), Task().context())
    assert (again["version"], again["changes"]) == (2, {})
    removed = finish(update(configuration={INTERVAL: None}), Task().context())
    assert removed["changes"][INTERVAL]["after"] is None
    whole = finish(update(configuration={INTERVAL: "7 s"}, replace_all=True), Task().context())
    assert set(whole["changes"]) == {INTERVAL, RESTARTS}


def test_a_preview_changes_nothing(open_job: JobManager, task: Task) -> None:
    result = update(configuration={RESTARTS: "true"}, preview="true").execute(task.context())
    assert (result["dry_run"], result["restart"], list(result["changes"])) == (True, True, [RESTARTS])
    assert open_job.gateway.jobs[JOB].own.version == 1


def test_retry_returns_the_changes_of_the_first_try(open_job: JobManager, task: Task) -> None:
    deferral(update(configuration={RESTARTS: "true"}), task.context())
    result = finish(update(configuration={RESTARTS: "true"}), task.context())
    assert list(result["changes"]) == [RESTARTS]
    assert open_job.gateway.jobs[JOB].own.version == 2


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"configuration": {}}, CkptArgumentInvalid, "^configuration: "),
        ({"configuration": ["a"]}, CkptArgumentInvalid, "^configuration: "),
        ({"configuration": {"a": None}, "replace_all": True}, CkptArgumentInvalid, "omit options"),
        ({"configuration": {INTERVAL: "soon"}}, CkptRequestRejected, INTERVAL),
        ({"configuration": {RESTARTS: "true"}}, CkptRequestRejected, "allow-list"),
        ({"configuration": {INTERVAL: "7 s"}, "version": 9}, CkptOperationFailed, "version"),
    ],
)
def test_a_refused_change_names_the_option(
    job_manager: JobManager, task: Task, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        update(**arguments).execute(task.context())
    assert job_manager.gateway.jobs[JOB].own.version == 1


def test_the_configuration_of_an_ended_job_does_not_change(open_job: JobManager, task: Task) -> None:
    open_job.gateway.move(JOB, JobStatus.FINISHED)
    with pytest.raises(CkptJobFailed, match="is FINISHED, so its configuration cannot be changed"):
        update(configuration={INTERVAL: "7 s"}).execute(task.context())


def test_a_change_that_waits_for_another_passes_in_time(open_job: JobManager, task: Task) -> None:
    open_job.faults = [Fault(f"PATCH /jobs/{JOB}/config", 409, times=2)]
    assert update(configuration={INTERVAL: "7 s"}).execute(task.context())["version"] == 2


# --- rescale
@pytest.mark.row("air.2")
@pytest.mark.parametrize("deferrable", [True, False])
@pytest.mark.parametrize(
    ("given", "expected"), [(3, [3, 3, 3]), ("4", [4, 4, 4]), ({"count": 5, VERTICES[2]: "1"}, [2, 5, 1])]
)
def test_a_rescale_names_all_vertices_or_some(
    job_manager: JobManager, task: Task, deferrable: bool, given: Any, expected: list[int]
) -> None:
    operator = RescaleJobOperator(task_id="t", job=JOB, parallelism=given, deferrable=deferrable, **FAST)
    result = finish(operator, task.context())
    assert [result["parallelism"][vertex] for vertex in VERTICES] == expected
    assert [vertex.parallelism for vertex in job_manager.gateway.jobs[JOB].graph.vertices] == expected


@pytest.mark.parametrize("deferrable", [True, False])
def test_vertices_that_are_not_named_keep_their_bounds(job_manager: JobManager, task: Task, deferrable: bool) -> None:
    gateway = job_manager.gateway
    gateway.slots_for_rescale = 3
    asyncio.run(gateway.update_resource_requirements(JOB, dict.fromkeys(VERTICES, ParallelismBounds(1, 8))))
    operator = RescaleJobOperator(task_id="t", job=JOB, parallelism={"count": 2}, deferrable=deferrable, **FAST)
    result = finish(operator, task.context())
    assert result["parallelism"] == dict(zip(VERTICES, (3, 2, 3), strict=True))


def test_a_rescale_whose_answer_is_lost_is_joined(job_manager: JobManager, task: Task) -> None:
    job_manager.faults = [Fault("PUT .*/resource-requirements", 504, times=2)]
    result = finish(RescaleJobOperator(task_id="t", job=JOB, parallelism=3, **FAST), task.context())
    assert set(result["parallelism"].values()) == {3}


def test_refused_rescale_fails_with_the_reason(job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.rescale_failure = "no slots in time"
    with pytest.raises(CkptOperationFailed, match="keeps running as it was: no slots in time"):
        finish(RescaleJobOperator(task_id="t", job=JOB, parallelism=3, **FAST), task.context())
    with pytest.raises(CkptArgumentInvalid, match="'nope' is not acceptable, it must be one of .*'count'"):
        RescaleJobOperator(task_id="t", job=JOB, parallelism={"nope": 1}, **FAST).execute(task.context())
    for wrong in (0, "many", {}):
        with pytest.raises(CkptArgumentInvalid, match="^parallelism"):
            RescaleJobOperator(task_id="t", job=JOB, parallelism=wrong, **FAST).execute(task.context())
    job_manager.gateway.move(JOB, JobStatus.CANCELED)
    with pytest.raises(CkptJobFailed, match="is CANCELED, so it cannot be rescaled"):
        RescaleJobOperator(task_id="t", job=JOB, parallelism=3, **FAST).execute(task.context())


# --- disposal
@pytest.mark.row("air.2")
@pytest.mark.parametrize("deferrable", [True, False])
def test_a_savepoint_is_deleted_once(job_manager: JobManager, task: Task, deferrable: bool) -> None:
    def dispose() -> DisposeSavepointOperator:
        return DisposeSavepointOperator(task_id="t", savepoint_path="/data/sp", deferrable=deferrable, **FAST)

    assert finish(dispose(), task.context()) == {"savepoint_path": "/data/sp"}
    assert finish(dispose(), task.context()) == {"savepoint_path": "/data/sp"}
    assert job_manager.gateway.disposed == ["/data/sp"]
    with pytest.raises(CkptOperationFailed, match="^/data/sp: "):
        finish(dispose(), Task().context())


def test_a_retry_attaches_to_the_disposal(job_manager: JobManager, task: Task) -> None:
    operator = partial(DisposeSavepointOperator, task_id="t", savepoint_path={"savepoint_path": "/data/sp"}, **FAST)
    deferral(operator(), task.context())
    assert finish(operator(), task.context()) == {"savepoint_path": "/data/sp"}
    assert job_manager.gateway.triggered["savepoint-disposal"] == 1


# --- what a killed task and one whose time is over say
@pytest.mark.parametrize(
    ("operator", "words"),
    [
        (update(configuration={RESTARTS: "true"}), "takes effect"),
        (RescaleJobOperator(task_id="t", job=JOB, parallelism=3, **FAST), "cannot be undone"),
        (DisposeSavepointOperator(task_id="t", savepoint_path="/data/sp", **FAST), "continues"),
    ],
)
def test_killed_task_logs_whether_the_change_continues(
    open_job: JobManager, task: Task, operator: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    operator.on_kill()
    asyncio.run(deferral(operator, task.context()).trigger.on_kill())
    assert capsys.readouterr().out.count(words) >= 2


def test_rescale_past_its_deadline_reports_that_it_continues(job_manager: JobManager, task: Task) -> None:
    job_manager.faults = [Fault("PUT .*/resource-requirements", 504, times=10_000)]
    operator = RescaleJobOperator(task_id="t", job=JOB, parallelism=3, **FAST | {"wait_timeout": 0.2})
    with pytest.raises(CkptWaitTimeout, match="cannot be undone; the next try of this task attaches to it"):
        finish(operator, task.context())


def test_a_refused_token_names_the_field_of_the_connection(job_manager: JobManager, task: Task) -> None:
    job_manager.faults = [Fault("PATCH", 401, times=100)]
    with pytest.raises(CkptRequestRejected, match=r"Bearer token \(password\) of the connection 'ckpt_default'"):
        update(configuration={INTERVAL: "7 s"}).execute(task.context())


# --- sensors
@pytest.mark.row("air.2")
@pytest.mark.parametrize("mode", [{}, {"mode": "poke"}])
def test_the_health_of_a_job(job_manager: JobManager, task: Task, mode: dict[str, Any]) -> None:
    gateway, job = job_manager.gateway, job_manager.gateway.jobs[JOB]
    with pytest.raises(Exception, match=r"timed? ?out|not reached"):
        finish(CheckpointHealthSensor(task_id="t", job=JOB, **SENSOR | mode | {"timeout": 0.05}), Task().context())
    gateway.now = round(time.time() * 1000)
    gateway.complete_checkpoint(job)
    good = ["healthy", "degraded"]
    result = finish(
        CheckpointHealthSensor(task_id="t", job=JOB, expected=good, times=2, **SENSOR, **mode), task.context()
    )
    assert (result["verdict"], result["checkpoints"]["ended"]) == ("DEGRADED", 1)
    assert "cannot send" in str(result["reasons"])
    gateway.move(JOB, JobStatus.FAILED)
    with pytest.raises(CkptJobFailed, match="is UNHEALTHY: "):
        finish(CheckpointHealthSensor(task_id="t", job=JOB, failing="unhealthy", **SENSOR, **mode), task.context())
    with pytest.raises(CkptJobFailed, match="is FAILED, it was not HEALTHY"):
        finish(CheckpointHealthSensor(task_id="t", job=JOB, **SENSOR, **mode), task.context())
    with pytest.raises(CkptArgumentInvalid, match="^expected: 'fine'"):
        CheckpointHealthSensor(task_id="t", job=JOB, expected="fine", **SENSOR, **mode).execute(task.context())


def test_job_that_ended_before_the_cancellation_fails_the_task_only_if_configured(
    job_manager: JobManager, task: Task
) -> None:
    job_manager.gateway.move(JOB, JobStatus.FINISHED)
    assert finish(CancelJobOperator(task_id="t", job=JOB, **FAST), task.context())["status"] == "FINISHED"
    with pytest.raises(CkptJobFailed, match="it is FINISHED"):
        finish(CancelJobOperator(task_id="t", job=JOB, already_ended_ok=False, **FAST), task.context())


@pytest.mark.row("571.1")
@pytest.mark.row("571.2")
def test_patch_changes_the_given_fields_and_returns_the_effective_configuration(
    job_manager: JobManager, task: Task
) -> None:
    operator = PatchCheckpointConfigOperator(
        task_id="t",
        job=JOB,
        interval="5 s",
        timeout=timedelta(minutes=15),
        min_pause="0",
        max_concurrent="2",
        unaligned="True",
        aligned_timeout=30,
        tolerable_failed_checkpoints=0,
        max_inflight_data_bytes="",
        **FAST,
    )
    result = operator.execute(task.context())
    assert (result["interval_ms"], result["timeout_ms"], result["min_pause_ms"]) == (5000, 900_000, 0)
    assert (result["max_concurrent"], result["unaligned"], result["aligned_timeout_ms"]) == (2, True, 30_000)
    assert "checkpointInterval" in result["overrides"]
    assert "maxInflightDataBytes" not in result["overrides"]


@pytest.mark.row("571.6")
def test_a_patch_waits_for_another_change_that_is_in_progress(job_manager: JobManager, task: Task) -> None:
    job = job_manager.gateway.jobs[JOB]
    job.update_in_progress = True
    patches = f"PATCH /jobs/{JOB}/checkpoints/configuration"
    job_manager.at_request(3, patches, lambda: setattr(job, "update_in_progress", False))
    result = PatchCheckpointConfigOperator(task_id="t", job=JOB, interval=5, **FAST).execute(task.context())
    assert result["interval_ms"] == 5000
    assert job_manager.count(patches) >= 3  # a request whose connection was cut is sent again


def test_a_change_that_never_ends_fails_the_patch(job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.jobs[JOB].update_in_progress = True
    short = FAST | {"wait_timeout": 0.3}
    with pytest.raises(CkptOperationFailed, match="in progress"):
        PatchCheckpointConfigOperator(task_id="t", job=JOB, interval=5, **short).execute(task.context())


def test_an_ended_job_cannot_be_patched(job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.move(JOB, JobStatus.CANCELED)
    with pytest.raises(CkptJobFailed, match="is CANCELED"):
        PatchCheckpointConfigOperator(task_id="t", job=JOB, interval=5, **FAST).execute(task.context())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "reset"),
        ({"interval": "1 s", "reset": True}, "reset"),
        ({"interval": 0}, "interval"),
        ({"interval": "-5 s"}, "interval"),
        ({"interval": 0.0001}, "interval"),
        ({"timeout": "5 parsecs"}, "timeout"),
        ({"timeout": True}, "timeout"),
        ({"max_concurrent": 0}, "max_concurrent"),
        ({"unaligned": "x"}, "unaligned"),
    ],
)
def test_a_bad_argument_is_named_and_nothing_is_sent(
    job_manager: JobManager, task: Task, arguments: Any, name: str
) -> None:
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        PatchCheckpointConfigOperator(task_id="t", job=JOB, **arguments).execute(task.context())
    assert job_manager.received == []
