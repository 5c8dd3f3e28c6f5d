"""Checkpoint, savepoint and stop as tasks: started once, found again after a crash, a retry and a clear."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferralTimeout

from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.operators.checkpoint import TriggerCheckpointOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, JobManager, Task, deferral, finish, fire

FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 10}
CAUSE = FailureCause("java.io.IOException", "disk full", "java.io.IOException: disk full\n\tat somewhere")


def savepoint(**kwargs: Any) -> TakeSavepointOperator:
    return TakeSavepointOperator(task_id="t", job=JOB, target_directory="/data", **FAST | kwargs)


def stop(**kwargs: Any) -> StopWithSavepointOperator:
    return StopWithSavepointOperator(task_id="t", job=JOB, target_directory="/data", **FAST | kwargs)


def test_links_are_stored_while_the_task_is_still_deferred(job_manager: JobManager, task: Task) -> None:
    context = task.context()
    deferral(savepoint(), context)
    url = f"/ckpt/ckpt_default/web/#/jobs/{JOB}"
    assert context["ti"].xcoms == {
        "job_id": JOB,
        "ckpt_conn_id": "ckpt_default",
        "_link_CkptJobLink": f"{url}/health",
        "_link_CkptCheckpointsLink": f"{url}/checkpoints",
    }


@pytest.mark.row("air.3")
def test_a_retry_attaches_to_the_operation_of_the_try_before(job_manager: JobManager, task: Task) -> None:
    first = deferral(savepoint(), task.context())
    second = deferral(savepoint(), task.context())
    assert second.trigger.condition.trigger_id == first.trigger.condition.trigger_id
    finish(savepoint(), task.context(), start=None)
    assert job_manager.gateway.triggered["savepoint"] == 1


@pytest.mark.row("air.3")
def test_retry_returns_the_result_of_an_operation_that_has_ended(job_manager: JobManager, task: Task) -> None:
    fire(deferral(savepoint(), task.context()))
    result = savepoint().execute(task.context())
    assert result["savepoint_path"].startswith("file:/data/savepoint-")
    assert job_manager.gateway.triggered["savepoint"] == 1
    assert task.store == {}


@pytest.mark.row("air.3")
def test_a_crash_between_writing_down_and_asking_repeats_the_request_with_the_same_id(
    job_manager: JobManager, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    operator = savepoint()

    def crash(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(operator, "ask", crash)
    with pytest.raises(KeyboardInterrupt):
        operator.execute(task.context())
    assert task.store is not None
    written = task.store["ckpt_operation"]["trigger_id"]
    result = finish(savepoint(), task.context())
    assert result["trigger_id"] == written
    assert list(job_manager.gateway.operations) == [written]


@pytest.mark.row("air.3")
def test_a_retry_after_a_failed_operation_starts_another(job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.savepoint_failure = CAUSE
    with pytest.raises(CkptOperationFailed, match="disk full"):
        finish(savepoint(), task.context())
    job_manager.gateway.savepoint_failure = None
    assert finish(savepoint(), task.context())["savepoint_path"]
    assert job_manager.gateway.triggered["savepoint"] == 2


@pytest.mark.row("air.3")
def test_an_inherited_operation_that_fails_is_replaced_once(job_manager: JobManager, task: Task) -> None:
    deferral(savepoint(), task.context())
    job_manager.gateway.savepoint_failure = CAUSE
    with pytest.raises(CkptOperationFailed, match="disk full"):
        finish(savepoint(), task.context())
    assert job_manager.gateway.triggered["savepoint"] == 2


@pytest.mark.row("air.3")
def test_a_cleared_task_that_had_succeeded_takes_a_new_savepoint(job_manager: JobManager, task: Task) -> None:
    first = finish(savepoint(), task.context())
    second = finish(savepoint(), task.context())
    assert first["savepoint_path"] != second["savepoint_path"]


def test_another_job_id_after_a_clear_is_another_operation(job_manager: JobManager, task: Task) -> None:
    other = "00" * 16
    job_manager.gateway.add_job(other)
    deferral(savepoint(), task.context())
    operator = TakeSavepointOperator(task_id="t", job=other, target_directory="/data", **FAST)
    assert finish(operator, task.context())["job_id"] == other
    assert job_manager.gateway.triggered["savepoint"] == 2


def test_task_without_a_state_store_starts_from_the_beginning(job_manager: JobManager) -> None:
    task = Task(store=None)
    deferral(savepoint(), task.context())
    assert finish(savepoint(), task.context())["savepoint_path"]
    assert job_manager.gateway.triggered["savepoint"] == 2


@pytest.mark.row("air.3")
def test_a_stop_whose_record_expired_is_recovered_from_the_ended_job(job_manager: JobManager, task: Task) -> None:
    fire(deferral(stop(), task.context()))
    job_manager.gateway.operations.clear()
    result = stop().execute(task.context())
    assert result == {
        "job_id": JOB,
        "trigger_id": None,
        "savepoint_path": f"file:/data/savepoint-{JOB[:6]}-000000000001",
    }
    assert job_manager.gateway.triggered["savepoint"] == 1


def test_a_stop_of_a_job_that_was_started_again_under_its_id_is_a_new_stop(job_manager: JobManager, task: Task) -> None:
    fire(deferral(stop(), task.context()))
    job_manager.gateway.move(JOB, JobStatus.RUNNING)
    assert finish(stop(), task.context())["savepoint_path"].endswith("000000000002")


@pytest.mark.row("air.3")
def test_operation_past_its_deadline_fails_the_task_and_reports_whether_it_continues(
    job_manager: JobManager, task: Task
) -> None:
    job_manager.gateway.polls_until_done = 10**9
    with pytest.raises(CkptWaitTimeout, match="cannot be cancelled.*attaches to it"):
        finish(savepoint(wait_timeout=0.05), task.context())


def test_airflows_own_deferral_timeout_becomes_a_clear_message(job_manager: JobManager, task: Task) -> None:
    with pytest.raises(CkptWaitTimeout, match="no triggerer runs") as caught:
        savepoint().resume_execution("__fail__", {"error": "Trigger timeout"}, task.context())
    assert isinstance(caught.value.__cause__, TaskDeferralTimeout)


def test_a_refused_request_is_not_retried(job_manager: JobManager, task: Task) -> None:
    operator = TakeSavepointOperator(task_id="t", job=JOB, **FAST)
    with pytest.raises(CkptRequestRejected, match="savepoint-dir"):
        operator.execute(task.context())


@pytest.mark.parametrize(
    ("operator", "name"),
    [
        (TriggerCheckpointOperator(task_id="t", job=""), "job"),
        (TriggerCheckpointOperator(task_id="t", job=JOB, checkpoint_type="INCREMENTAL"), "checkpoint_type"),
        (TakeSavepointOperator(task_id="t", job=JOB, savepoint_format="zip"), "savepoint_format"),
        (StopWithSavepointOperator(task_id="t", job=JOB, drain="perhaps"), "drain"),
        (TriggerCheckpointOperator(task_id="t", job=JOB, wait_timeout=-1), "wait_timeout"),
    ],
)
def test_a_bad_argument_is_named_and_nothing_is_sent(
    job_manager: JobManager, task: Task, operator: Any, name: str
) -> None:
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        operator.execute(task.context())
    assert job_manager.received == []
