"""The provider inside a real Airflow, with real jobs: deferral, kill, crash, clear, and a triggerer that dies."""

from __future__ import annotations

import shutil
from contextlib import suppress

import pytest

from ckpt_runtime.jobmaster.gateway import JobStatus
from demo.airflow_api import AirflowApiError, DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.jobs import PIPELINES, SequenceJob
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
    run = trigger(airflow, "system_submit", job)
    wait_state(airflow, run, "submit", "deferred")
    job.job_id = session.job_after(known)
    job.running()
    # Airflow has nobody to tell before the trigger runs.
    poll = f"GET /jobs/{job.job_id}"
    polls = session.requests[poll]
    until(lambda: session.requests[poll] > polls, "the trigger's first poll")
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


@pytest.mark.row("air.4")
def test_an_upgrade_with_an_approval_survives_the_end_of_the_triggerer(
    airflow: LocalAirflow, session: Session, job: SequenceJob
) -> None:
    version = job.directory / "version"
    shutil.copytree(PIPELINES, version)
    with (version / "sequence.py").open("a") as source:
        source.write("# another version\n")
    job.start(rate=500)
    job.running()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    known = session.jobs()
    savepoints_in = str(job.directory / "savepoints")
    given = {"job": job.job_id, "pipeline": str(version), "target_directory": savepoints_in, "healthy_checkpoints": 2}
    run = airflow.trigger_dag("ckpt_upgrade", given)
    wait_state(airflow, run, "approval", "awaiting_input")
    assert job.cluster.status(job.job_id) is JobStatus.FINISHED
    assert session.jobs() == known
    detail = f"{run.path}/taskInstances/approval/-1/hitlDetails"
    body = airflow.api.call("GET", detail)["body"]
    assert savepoints_in in body
    assert "matched: " in body
    # Its user code stands still, so that it is not healthy before the triggerer is gone.
    (job.faults / "processor-held").touch()

    def approved() -> bool:
        """Airflow fails a waiting task that is answered in its first five seconds; then it asks again."""
        states = airflow.task_states(run)
        if states.get("approval") == "awaiting_input":
            with suppress(AirflowApiError):  # it is answered already
                airflow.api.call("PATCH", detail, {"chosen_options": ["Start the new version"], "params_input": {}})
        return states.get("start_and_watch") == "deferred"

    until(approved, "the start of the new version", 200)
    job.job_id = session.job_after(known)
    airflow.kill_component("triggerer")
    job.release("processor")
    airflow.start_component("triggerer")
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    assert airflow.api.xcom(run, "start_and_watch", "outcome") == "UPGRADED"
    assert airflow.api.xcom(run, "start_and_watch", "job_id") == job.job_id
    assert session.jobs() - known == {job.job_id}
    job.stopped()
