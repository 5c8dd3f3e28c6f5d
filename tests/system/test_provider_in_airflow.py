"""The provider inside a real Airflow: deferral, kill, crash, clear, and a triggerer that dies."""

from __future__ import annotations

import pytest

from ckpt_runtime.jobmaster.gateway import JobStatus
from demo.airflow_instance import LocalAirflow
from tests.system.airflow_instance import until, wait_state
from tests.unit.provider.conftest import JOB, JobManager
from tests.unit.runtime.rest.fake_gateway import FakeJob

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(600)]
NEVER = 10**9


def release(job_manager: JobManager) -> None:
    """Let every operation that is in progress end at its next poll."""
    job_manager.gateway.polls_until_done = 0
    for operation in job_manager.gateway.operations.values():
        operation.polls_left = 0


@pytest.mark.row("air.3")
def test_a_savepoint_waits_in_the_triggerer_with_its_link_shown(airflow: LocalAirflow, job_manager: JobManager) -> None:
    job_manager.gateway.polls_until_done = NEVER
    run = airflow.trigger_dag("system_savepoint")
    wait_state(airflow, run, "savepoint", "deferred")
    links = airflow.api.call("GET", f"{run.path}/taskInstances/savepoint/links")["extra_links"]
    assert links["Job"] == f"http://127.0.0.1:{job_manager.port}/jobs/{JOB}"
    release(job_manager)
    assert airflow.wait_run(run, 120) == "success", airflow.failure_report(run)
    path = f"file:/data/savepoint-{JOB[:6]}-000000000001"
    assert airflow.api.xcom(run, "savepoint", "savepoint_path") == path


@pytest.mark.row("air.3")
def test_a_worker_that_dies_after_asking_loses_nothing(airflow: LocalAirflow, job_manager: JobManager) -> None:
    run = airflow.trigger_dag("system_crash")
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    assert job_manager.gateway.triggered["savepoint"] == 1
    (instance,) = airflow.api.task_instances(run)
    assert instance["try_number"] == 2


@pytest.mark.row("air.3")
def test_a_triggerer_that_dies_loses_nothing(airflow: LocalAirflow, job_manager: JobManager) -> None:
    job_manager.gateway.polls_until_done = NEVER
    run = airflow.trigger_dag("system_savepoint")
    wait_state(airflow, run, "savepoint", "deferred")
    airflow.kill_component("triggerer")
    release(job_manager)
    airflow.start_component("triggerer")
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    assert job_manager.gateway.triggered["savepoint"] == 1


@pytest.mark.row("air.3")
def test_marking_a_waiting_task_failed_cancels_its_job_and_says_so(
    airflow: LocalAirflow, job_manager: JobManager
) -> None:
    run = airflow.trigger_dag("system_submit")
    wait_state(airflow, run, "submit", "deferred")
    (job,) = [job for job in job_manager.gateway.jobs.values() if job.job_id != JOB]
    assert job.status is JobStatus.RUNNING
    # Airflow has nobody to tell before the trigger runs.
    polls = job_manager.count(f"GET /jobs/{job.job_id}")
    until(lambda: job_manager.count(f"GET /jobs/{job.job_id}") > polls, "the trigger's first poll")
    airflow.api.set_task_state(run, "submit", "failed")
    until(lambda: job.status is JobStatus.CANCELED, "the job's cancellation", 60)
    words = f"job {job.job_id} is being cancelled"
    until(lambda: words in airflow.api.task_log(run, "submit"), "a word in the task's log", 30)


@pytest.mark.row("air.3")
def test_a_retry_goes_on_from_the_latest_checkpoint_and_a_cleared_success_is_done_again(
    airflow: LocalAirflow, job_manager: JobManager
) -> None:
    gateway = job_manager.gateway
    run = airflow.trigger_dag("system_resume")

    def job_after(known: set[str]) -> FakeJob:
        return until(lambda: next((job for job in gateway.jobs.values() if job.job_id not in known), None), "a job")

    first = job_after({JOB})
    wait_state(airflow, run, "submit", "deferred")
    gateway.complete_checkpoint(first)
    gateway.move(first.job_id, JobStatus.FAILED)
    second = job_after({JOB, first.job_id})
    assert second.request.savepoint_path == "file:/data/chk-1"
    gateway.move(second.job_id, JobStatus.FINISHED)
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    airflow.api.clear_task(run, "submit")
    third = job_after({JOB, first.job_id, second.job_id})
    assert third.request.savepoint_path is None
    gateway.move(third.job_id, JobStatus.FINISHED)
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)


@pytest.mark.row("air.3")
def test_clearing_a_waiting_task_does_not_double_the_operation(airflow: LocalAirflow, job_manager: JobManager) -> None:
    job_manager.gateway.polls_until_done = NEVER
    run = airflow.trigger_dag("system_savepoint")
    wait_state(airflow, run, "savepoint", "deferred")
    airflow.api.clear_task(run, "savepoint")
    until(lambda: airflow.api.task_instances(run)[0]["try_number"] == 2, "the second try")
    wait_state(airflow, run, "savepoint", "deferred")
    release(job_manager)
    assert airflow.wait_run(run, 120) == "success", airflow.failure_report(run)
    assert job_manager.gateway.triggered["savepoint"] == 1


@pytest.mark.row("air.2")
def test_a_sensor_sees_new_checkpoints(airflow: LocalAirflow, job_manager: JobManager) -> None:
    job = job_manager.gateway.jobs[JOB]
    job_manager.gateway.complete_checkpoint(job)
    run = airflow.trigger_dag("system_sensor")
    wait_state(airflow, run, "checkpoint", "deferred")
    job_manager.gateway.complete_checkpoint(job)
    job_manager.gateway.complete_checkpoint(job)
    assert airflow.wait_run(run, 120) == "success", airflow.failure_report(run)
    assert airflow.api.xcom(run, "checkpoint", "checkpoint_id") == 3
