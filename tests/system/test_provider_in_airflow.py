"""The provider inside a real Airflow, with real jobs: deferral, kill, crash, clear, and a triggerer that dies."""

from __future__ import annotations

import pytest

from ckpt_runtime.jobmaster.gateway import JobStatus
from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.jobs import SequenceJob
from tests.system.airflow_instance import until, wait_state
from tests.system.conftest import Session

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def held(job: SequenceJob) -> SequenceJob:
    """A job with a completed checkpoint whose user code lets no other one complete."""
    job.start(rate=500)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    job.hold("processor")
    return job


def trigger(airflow: LocalAirflow, dag_id: str, job: SequenceJob) -> DagRun:
    return airflow.trigger_dag(dag_id, {"job_id": job.job_id, "directory": str(job.directory)})


def savepoints(job: SequenceJob) -> list[str]:
    return [path.as_uri() for path in (job.directory / "savepoints").iterdir()]


@pytest.mark.row("air.3")
def test_a_savepoint_waits_in_the_triggerer_with_its_link_shown(
    airflow: LocalAirflow, session: Session, held: SequenceJob
) -> None:
    run = trigger(airflow, "system_savepoint", held)
    wait_state(airflow, run, "savepoint", "deferred")
    links = airflow.api.call("GET", f"{run.path}/taskInstances/savepoint/links")["extra_links"]
    assert links["Job"] == f"http://127.0.0.1:{session.port}/jobs/{held.job_id}"
    held.release("processor")
    assert airflow.wait_run(run, 120) == "success", airflow.failure_report(run)
    assert savepoints(held) == [airflow.api.xcom(run, "savepoint", "savepoint_path")]


@pytest.mark.row("air.3")
def test_a_worker_that_dies_after_asking_loses_nothing(airflow: LocalAirflow, job: SequenceJob) -> None:
    job.start(rate=500)
    job.running()
    run = trigger(airflow, "system_crash", job)
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    assert len(savepoints(job)) == 1
    (instance,) = airflow.api.task_instances(run)
    assert instance["try_number"] == 2


@pytest.mark.row("air.3")
def test_a_triggerer_that_dies_loses_nothing(airflow: LocalAirflow, held: SequenceJob) -> None:
    run = trigger(airflow, "system_savepoint", held)
    wait_state(airflow, run, "savepoint", "deferred")
    airflow.kill_component("triggerer")
    held.release("processor")
    airflow.start_component("triggerer")
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    assert len(savepoints(held)) == 1


@pytest.mark.row("air.3")
def test_marking_a_waiting_task_failed_cancels_its_job_and_says_so(
    airflow: LocalAirflow, session: Session, job: SequenceJob
) -> None:
    known = session.jobs()
    streams = session.requests["GET /events"]
    run = trigger(airflow, "system_submit", job)
    wait_state(airflow, run, "submit", "deferred")
    job.job_id = session.job_after(known)
    job.running()
    # Airflow has nobody to tell before the trigger runs.
    until(lambda: session.requests["GET /events"] > streams, "the trigger's stream of events")
    airflow.api.set_task_state(run, "submit", "failed")
    job.cluster.wait_for_status(job.job_id, JobStatus.CANCELED)
    words = f"job {job.job_id} is being cancelled"
    until(lambda: words in airflow.api.task_log(run, "submit"), "a word in the task's log", 30)


@pytest.mark.row("air.3")
def test_a_retry_goes_on_from_the_latest_checkpoint_and_a_cleared_success_is_done_again(
    airflow: LocalAirflow, session: Session, job: SequenceJob
) -> None:
    def restored() -> str | None:
        found = job.cluster.call(job.cluster.dispatcher.checkpoint_statistics(job.job_id)).latest_restored
        return None if found is None else found.external_path

    def next_job() -> str:
        job.job_id = session.job_after(known)
        known.add(job.job_id)
        return job.job_id

    known = session.jobs()
    run = trigger(airflow, "system_resume", job)
    first = next_job()
    wait_state(airflow, run, "submit", "deferred")
    job.running()
    job.has_output()
    job.inject("processor-raise")
    next_job()
    job.stopped()
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    path = restored()
    assert path is not None
    assert f"/{first}/chk-" in path
    airflow.api.clear_task(run, "submit")
    next_job()
    job.running()
    job.cluster.savepoint(job.job_id, job.directory / "again", stop=True)
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    assert restored() is None


@pytest.mark.row("air.3")
def test_clearing_a_waiting_task_does_not_double_the_operation(airflow: LocalAirflow, held: SequenceJob) -> None:
    run = trigger(airflow, "system_savepoint", held)
    wait_state(airflow, run, "savepoint", "deferred")
    airflow.api.clear_task(run, "savepoint")
    until(lambda: airflow.api.task_instances(run)[0]["try_number"] == 2, "the second try")
    wait_state(airflow, run, "savepoint", "deferred")
    held.release("processor")
    assert airflow.wait_run(run, 120) == "success", airflow.failure_report(run)
    assert len(savepoints(held)) == 1


@pytest.mark.row("air.2")
def test_a_sensor_sees_new_checkpoints(airflow: LocalAirflow, held: SequenceJob) -> None:
    before = held.cluster.call(held.cluster.dispatcher.checkpoint_statistics(held.job_id)).latest_completed
    assert before is not None
    run = trigger(airflow, "system_sensor", held)
    wait_state(airflow, run, "checkpoint", "deferred")
    held.release("processor")
    assert airflow.wait_run(run, 120) == "success", airflow.failure_report(run)
    assert airflow.api.xcom(run, "checkpoint", "checkpoint_id") >= before.id + 2
