"""Cancelling a job, and changing its checkpoint configuration, as tasks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptJobFailed, CkptNotFound, CkptOperationFailed
from airflow_provider_ckpt.operators.cancel import CancelJobOperator
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, JobManager, Task, finish

FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 10}


@pytest.mark.row("air.2")
@pytest.mark.parametrize("deferrable", [True, False])
def test_cancelling_waits_for_the_end(job_manager: JobManager, task: Task, deferrable: bool) -> None:
    result = finish(CancelJobOperator(task_id="t", job=JOB, deferrable=deferrable, **FAST), task.context())
    assert result["status"] == "CANCELED"
    again = finish(CancelJobOperator(task_id="t", job=JOB, **FAST), task.context())
    assert again["status"] == "CANCELED"


def test_job_that_ended_before_the_cancellation_fails_the_task_only_if_configured(
    job_manager: JobManager, task: Task
) -> None:
    job_manager.gateway.move(JOB, JobStatus.FINISHED)
    assert finish(CancelJobOperator(task_id="t", job=JOB, **FAST), task.context())["status"] == "FINISHED"
    with pytest.raises(CkptJobFailed, match="it is FINISHED"):
        finish(CancelJobOperator(task_id="t", job=JOB, already_ended_ok=False, **FAST), task.context())


def test_an_unknown_job_fails_the_task(job_manager: JobManager, task: Task) -> None:
    with pytest.raises(CkptNotFound, match="not found"):
        CancelJobOperator(task_id="t", job="0" * 32, **FAST).execute(task.context())


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


def test_a_reset_returns_to_the_submitted_values(job_manager: JobManager, task: Task) -> None:
    PatchCheckpointConfigOperator(task_id="t", job=JOB, interval=5, **FAST).execute(task.context())
    result = PatchCheckpointConfigOperator(task_id="t", job=JOB, reset=True, **FAST).execute(task.context())
    assert result["interval_ms"] == 2000
    assert result["overrides"] == []


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
