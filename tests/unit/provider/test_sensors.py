"""The sensors, deferred and poking."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSensorTimeout, AirflowSkipException

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptJobFailed, CkptNotFound, CkptWaitTimeout
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor
from airflow_provider_ckpt.sensors.job import JobStatusSensor
from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task, deferral, finish, fire

FAST = {"defer_after": 0, "poke_interval": 0.01, "timeout": 5}
BOTH = pytest.mark.parametrize("deferrable", [True, False])


@BOTH
def test_the_timeout_is_the_sensors_own(job_manager: JobManager, task: Task, deferrable: bool) -> None:
    sensor = JobStatusSensor(task_id="t", job=JOB, deferrable=deferrable, poke_interval=0.01, timeout=0.05)
    with pytest.raises(AirflowSensorTimeout, match=f"job {JOB} to be FINISHED: not reached .*it is RUNNING"):
        finish(sensor, task.context())


def test_deferred_sensor_keeps_its_execution_timeout_and_can_be_retried(job_manager: JobManager, task: Task) -> None:
    """Airflow itself does not look at it then."""
    sensor = JobStatusSensor(
        task_id="t", job=JOB, defer_after=0, poke_interval=0.01, execution_timeout=timedelta(seconds=0.1)
    )
    with pytest.raises(CkptWaitTimeout, match="not reached .*it is RUNNING"):
        finish(sensor, task.context())


def test_sensor_with_soft_fail_skips_instead_of_failing(job_manager: JobManager, task: Task) -> None:
    sensor = JobStatusSensor(task_id="t", job=JOB, soft_fail=True, poke_interval=0.01, timeout=0.05)
    with pytest.raises(AirflowSkipException):
        finish(sensor, task.context())


@pytest.mark.parametrize("kind", [JobStatusSensor, CheckpointCompletedSensor])
@pytest.mark.parametrize("mode", ["poke", "reschedule"])
def test_a_job_that_stays_unknown_is_noticed_in_the_first_poke_of_every_mode(
    job_manager: JobManager, task: Task, kind: Any, mode: str
) -> None:
    sensor = kind(task_id="t", job="0" * 32, mode=mode, poke_interval=0.01, timeout=5)
    assert not sensor.deferrable, "a mode says how to wait without the triggerer"
    with pytest.raises(CkptNotFound, match="not found"):
        sensor.poke(task.context())


def test_a_poke_does_not_believe_a_single_not_found(job_manager: JobManager, task: Task) -> None:
    job_manager.faults.append(Fault(f"GET /jobs/{JOB}", 404, times=2))
    sensor = JobStatusSensor(task_id="t", job=JOB, expected="RUNNING", mode="reschedule", poke_interval=0.01)
    found = sensor.poke(task.context())
    assert found
    assert found.xcom_value["status"] == "RUNNING"


def test_a_poke_whose_first_look_finds_no_session_is_repeated(job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.ready = False
    sensor = CheckpointCompletedSensor(task_id="t", job=JOB, mode="reschedule", poke_interval=0.01)
    assert sensor.poke(task.context()) is False
    assert task.store == {}
    job_manager.gateway.ready = True
    assert sensor.poke(task.context()) is False
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    assert sensor.poke(task.context())


def test_sensor_refuses_a_mode_together_with_deferral() -> None:
    with pytest.raises(CkptArgumentInvalid, match="^mode: 'reschedule'"):
        JobStatusSensor(task_id="t", job=JOB, deferrable=True, mode="reschedule")
    assert JobStatusSensor(task_id="t", job=JOB, deferrable=False, mode="reschedule").reschedule


@pytest.mark.row("air.2")
@BOTH
def test_any_completed_checkpoint_satisfies_the_sensor(job_manager: JobManager, task: Task, deferrable: bool) -> None:
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    sensor = CheckpointCompletedSensor(task_id="t", job=JOB, since_checkpoint_id=0, deferrable=deferrable, **FAST)
    result = finish(sensor, task.context())
    assert result["checkpoint_id"] == 1
    assert result["external_path"] == "file:/data/chk-1"
    assert result["checkpoint_ids"] == [1]


@pytest.mark.row("air.2")
def test_sensor_counts_new_checkpoints_since_its_first_poll_also_after_a_retry(
    job_manager: JobManager, task: Task
) -> None:
    job = job_manager.gateway.jobs[JOB]
    job_manager.gateway.complete_checkpoint(job)
    deferral(CheckpointCompletedSensor(task_id="t", job=JOB, count=2, **FAST), task.context())
    job_manager.gateway.complete_checkpoint(job, CheckpointType.SAVEPOINT, "NATIVE")
    job_manager.gateway.complete_checkpoint(job)
    second = CheckpointCompletedSensor(task_id="t", job=JOB, count=2, **FAST)
    context = task.context()
    deferred = deferral(second, context)
    job_manager.gateway.complete_checkpoint(job)
    result = second.resume_execution("execute_complete", {"event": fire(deferred)}, context)
    assert result["checkpoint_ids"] == [3, 4]
    assert task.store == {}


@pytest.mark.row("air.2")
def test_sensor_waits_for_a_checkpoint_by_its_id_or_after_a_moment(job_manager: JobManager, task: Task) -> None:
    gateway = job_manager.gateway
    job = gateway.jobs[JOB]
    gateway.complete_checkpoint(job)
    gateway.now += 60_000
    moment = datetime.fromtimestamp(gateway.now / 1000, UTC)
    gateway.complete_checkpoint(job)
    by_id = CheckpointCompletedSensor(task_id="t", job=JOB, checkpoint_id="1", **FAST)
    assert finish(by_id, task.context())["checkpoint_id"] == 1
    for after in (moment, moment.isoformat(), round(moment.timestamp() * 1000)):
        sensor = CheckpointCompletedSensor(task_id="t", job=JOB, after=after, **FAST)
        assert finish(sensor, task.context())["checkpoint_ids"] == [2]


@pytest.mark.row("air.2")
def test_savepoints_count_only_if_included(job_manager: JobManager, task: Task) -> None:
    job = job_manager.gateway.jobs[JOB]
    job_manager.gateway.complete_checkpoint(job, CheckpointType.SAVEPOINT, "CANONICAL")
    sensor = CheckpointCompletedSensor(task_id="t", job=JOB, since_checkpoint_id=0, include_savepoints=True, **FAST)
    assert finish(sensor, task.context())["checkpoint_type"] == "SAVEPOINT"


def test_a_wanted_checkpoint_that_failed_fails_the_sensor(job_manager: JobManager, task: Task) -> None:
    job = job_manager.gateway.jobs[JOB]
    checkpoint_id = job_manager.gateway.start_checkpoint(job)
    job.tracker.report_failed(checkpoint_id, job_manager.gateway.now, "it expired")
    sensor = CheckpointCompletedSensor(task_id="t", job=JOB, checkpoint_id=checkpoint_id, **FAST)
    with pytest.raises(CkptJobFailed, match="checkpoint 1 .* failed: it expired"):
        finish(sensor, task.context())


def test_a_checkpoint_that_has_left_the_history_is_not_waited_for(job_manager: JobManager, task: Task) -> None:
    job = job_manager.gateway.jobs[JOB]
    pending = job_manager.gateway.start_checkpoint(job)
    for _ in range(12):
        job_manager.gateway.complete_checkpoint(job)
    known = [item.id for item in job.tracker.snapshot().history]
    assert (pending in known, pending + 1 in known) == (True, False)
    sensor = CheckpointCompletedSensor(task_id="t", job=JOB, checkpoint_id=pending + 1, **FAST)
    with pytest.raises(CkptJobFailed, match=r"checkpoint 2 .* no longer in its history, .* since_checkpoint_id"):
        finish(sensor, task.context())
    deferral(CheckpointCompletedSensor(task_id="t", job=JOB, checkpoint_id=pending, **FAST), task.context())


def test_savepoint_id_does_not_satisfy_a_checkpoint_sensor(job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB], CheckpointType.SAVEPOINT, "NATIVE")
    sensor = CheckpointCompletedSensor(task_id="t", job=JOB, checkpoint_id=1, **FAST)
    with pytest.raises(CkptJobFailed, match="checkpoint 1 .* is a savepoint .* which the other arguments exclude"):
        finish(sensor, task.context())


@BOTH
def test_sensor_fails_for_an_ended_job_that_completes_no_further_checkpoints(
    job_manager: JobManager, task: Task, deferrable: bool
) -> None:
    job_manager.gateway.move(JOB, JobStatus.FINISHED)
    sensor = CheckpointCompletedSensor(task_id="t", job=JOB, deferrable=deferrable, **FAST)
    with pytest.raises(CkptJobFailed, match="is FINISHED and completes no more"):
        finish(sensor, task.context())


@pytest.mark.parametrize(
    ("sensor", "name"),
    [
        (JobStatusSensor(task_id="t", job=JOB, expected="DONE"), "expected"),
        (JobStatusSensor(task_id="t", job=" "), "job"),
        (CheckpointCompletedSensor(task_id="t", job=JOB, checkpoint_id=1, count=2), "count"),
        (CheckpointCompletedSensor(task_id="t", job=JOB, after="2026-01-01"), "after"),
        (CheckpointCompletedSensor(task_id="t", job=JOB, since_checkpoint_id=-1), "since_checkpoint_id"),
    ],
)
def test_a_bad_argument_is_named(job_manager: JobManager, task: Task, sensor: Any, name: str) -> None:
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        sensor.execute(task.context())
    assert job_manager.received == []


def test_sensor_whose_condition_already_holds_is_not_deferred(job_manager: JobManager, task: Task) -> None:
    sensor = JobStatusSensor(task_id="t", job=JOB, expected="RUNNING", poke_interval=0.01)
    assert sensor.execute(task.context())["status"] == "RUNNING"
    never = JobStatusSensor(task_id="t", job=JOB, defer_after=0.05, poke_interval=0.01)
    deferral(never, task.context())
