"""Upgrades, savepoints and stops in a real Airflow whose worker and triggerer are killed in the middle of each step."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from demo.airflow_api import AirflowApiError, DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.jobs import SequenceJob, program_of
from tests.support.outputs import assert_sequence
from tests.system.airflow_instance import kill_task, until, wait_state
from tests.system.conftest import SLOWLY, Session, every_second

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.timeout(900)]

STOP, APPROVAL, START = "stop_with_savepoint", "approval", "start_and_watch"


class Killer:
    """Ends what runs a task of one run while a request of it hangs: the order of the points is that of the steps."""

    def __init__(self, airflow: LocalAirflow, session: Session) -> None:
        self._airflow = airflow
        self._session = session

    def at(self, request: str, kill: Callable[[], None], *, carried_out: bool = False) -> None:
        """As soon as the request came."""
        with self._session.hanging(request, carried_out=carried_out) as hanging:
            until(hanging.came.is_set, f"a request {request}")
            kill()

    def task(self, run: DagRun, task_id: str) -> Callable[[], None]:
        return lambda: kill_task(self._airflow, run, task_id)

    def triggerer(self) -> None:
        """Another one begins at once."""
        self._airflow.kill_component("triggerer")
        self._airflow.start_component("triggerer")


@pytest.fixture
def jobs(session: Session, tmp_path: Path) -> Iterator[list[SequenceJob]]:
    """Not yet started."""
    jobs = [SequenceJob(session.cluster, tmp_path / str(number)) for number in range(3)]
    yield jobs
    for job in jobs:
        job.release("processor")
        job.end()


@pytest.fixture
def killer(airflow: LocalAirflow, session: Session) -> Killer:
    return Killer(airflow, session)


def version_of(job: SequenceJob, before: str = "", after: str = "# another version\n") -> Path:
    """Another version of the job's program."""
    version = job.directory / "version"
    shutil.copytree(program_of("sequence"), version)
    file = version / "sequence.py"
    source = file.read_text()
    assert before in source
    file.write_text(source.replace(before, after, 1) if before else source + after)
    return version


def begin(job: SequenceJob) -> None:
    job.start(**SLOWLY, configuration=every_second())
    job.running()
    job.has_output()


def assert_one_at_a_time(session: Session, jobs: list[str]) -> None:
    """Each of the jobs was there only after the one before had ended."""
    lines = {line.job_id: line for line in session.cluster.call(session.cluster.dispatcher.list_jobs())}
    for before, after in pairwise(jobs):
        assert lines[before].status.is_globally_terminal
        assert lines[before].end_time_ms <= lines[after].start_time_ms


def savepoints(job: SequenceJob) -> list[str]:
    return [path.as_uri() for path in (job.directory / "savepoints").iterdir()]


def answer(airflow: LocalAirflow, run: DagRun, choice: str) -> None:
    """Until it is answered. A task that was answered as soon as it waits fails in Airflow, and asks again."""
    detail = f"{run.path}/taskInstances/{APPROVAL}/-1/hitlDetails"
    beats: set[str] = set()

    def answered() -> bool:
        state = airflow.task_states(run).get(APPROVAL)
        if state != "awaiting_input":
            beats.clear()
            return state == "success"
        beats.add(airflow.api.call("GET", "/monitor/health")["scheduler"]["latest_scheduler_heartbeat"])
        if len(beats) > 2:  # the scheduler has heard of the end of its process
            with suppress(AirflowApiError):  # it is answered already
                airflow.api.call("PATCH", detail, {"chosen_options": [choice], "params_input": {}})
        return False

    until(answered, "the answer", 200)


def end_exactly(job: SequenceJob, job_id: str) -> None:
    """Stops the version that runs. Every row came once, whatever was killed."""
    job.job_id = job_id
    job.stopped()


@pytest.mark.long
@pytest.mark.row("air.3")
def test_a_savepoint_and_a_stop_outlive_the_end_of_worker_and_triggerer(
    airflow: LocalAirflow, session: Session, jobs: list[SequenceJob], killer: Killer
) -> None:
    """Of one task its process is killed, and with the other's the worker that watches it."""
    saved, stopped = jobs[:2]
    operated = {"savepoint": saved, "stop": stopped}
    for job in operated.values():
        begin(job)
        job.cluster.wait_for_checkpoints(job.job_id, 1)
        job.hold("processor")
    given = {"job_id": saved.job_id, "directory": str(saved.directory)}
    given |= {"other_id": stopped.job_id, "other_directory": str(stopped.directory)}
    asked = (f"POST /jobs/{saved.job_id}/savepoints", f"POST /jobs/{stopped.job_id}/stop")
    with session.hanging("|".join(asked), carried_out=True):
        run = airflow.trigger_dag("system_operations", given)
        until(lambda: all(session.requests[line] for line in asked), "both requests")
        kill_task(airflow, run, "savepoint")
        kill_task(airflow, run, "stop", worker=True)

    def both_wait() -> bool:
        found = {instance["task_id"]: instance for instance in airflow.api.task_instances(run)}
        return all((found[task_id]["state"], found[task_id]["try_number"]) == ("deferred", 2) for task_id in operated)

    until(both_wait, "the second tries")
    streams = session.requests["GET /events"]
    killer.triggerer()
    until(lambda: session.requests["GET /events"] > streams, "the next triggerer's stream of events")
    for job in operated.values():
        job.release("processor")
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    for task_id, job in operated.items():
        assert savepoints(job) == [airflow.api.xcom(run, task_id, "savepoint_path")]
    assert [session.requests[line] for line in asked] == [1, 1]
    assert stopped.cluster.status(stopped.job_id) is JobStatus.FINISHED
    assert_sequence(stopped.out)
    end_exactly(saved, saved.job_id)


EVERY_STEP = pytest.param(True, marks=pytest.mark.long, id="every step")
"""Each kill takes as long as a worker or a triggerer needs to begin."""


@pytest.mark.row("air.4")
@pytest.mark.parametrize("thorough", [pytest.param(False, id="steps that change something"), EVERY_STEP])
def test_an_upgrade_outlives_the_end_of_worker_and_triggerer(
    airflow: LocalAirflow, session: Session, job: SequenceJob, killer: Killer, thorough: bool
) -> None:
    begin(job)
    old, known = job.job_id, session.jobs()
    run = airflow.trigger_dag("ckpt_upgrade", upgrade_of(job, version_of(job), healthy_checkpoints=2))
    stopping, starting = killer.task(run, STOP), killer.task(run, START)
    if thorough:  # the programs are held, the state is looked at, and the job is seen to be ready
        killer.at(r"PUT /jars/[^/]+/holds/.*", stopping, carried_out=True)
        killer.at(r"POST /jars/[^/]+/plan", stopping)
        killer.at(f"GET /jobs/{old}", killer.triggerer)
        killer.at(f"POST /jobs/{old}/stop", stopping)
    # The old version ends, with one savepoint.
    killer.at(f"POST /jobs/{old}/stop", stopping, carried_out=True)
    if thorough:
        killer.at(f"GET /jobs/{old}/savepoints/.*", killer.triggerer)
        killer.at(r"POST /jars/[^/]+/plan", stopping, carried_out=True)
    # Nothing runs while a person is asked.
    wait_state(airflow, run, APPROVAL, "awaiting_input")
    if thorough:
        killer.triggerer()
    assert session.jobs() == known
    assert job.cluster.status(old) is JobStatus.FINISHED
    body = airflow.api.call("GET", f"{run.path}/taskInstances/{APPROVAL}/-1/hitlDetails")["body"]
    assert savepoints(job)[0] in body
    assert "matched: " in body
    if thorough:
        assert_rivals_are_refused(airflow, run, job)
        assert session.jobs() == known
    answer(airflow, run, "Start the new version")
    # The new version starts once.
    if thorough:
        killer.at(r"POST /jars/[^/]+/run", starting)
    killer.at(r"POST /jars/[^/]+/run", starting, carried_out=True)
    job.job_id = session.job_after(known)
    if thorough:
        killer.at(f"GET /jobs/{job.job_id}", killer.triggerer)
        killer.at(r"DELETE /jars/[^/]+/holds/.*", starting, carried_out=True)
    assert airflow.wait_run(run, 240) == "success", airflow.failure_report(run)
    result = airflow.api.xcom(run, START)
    assert (result["outcome"], result["job_id"]) == ("UPGRADED", job.job_id)
    assert session.jobs() - known == {job.job_id}
    assert savepoints(job) == [result["savepoint_path"]]
    assert_one_at_a_time(session, [old, job.job_id])
    tries = {instance["task_id"]: instance["try_number"] for instance in airflow.api.task_instances(run)}
    assert (tries[STOP], tries[START]) == ((6, 4) if thorough else (2, 2))
    end_exactly(job, job.job_id)


def assert_rivals_are_refused(airflow: LocalAirflow, run: DagRun, job: SequenceJob) -> None:
    """Another DAG neither resumes nor upgrades a job whose upgrade waits for an answer."""
    rivals = airflow.trigger_dag("system_rivals", {"job_id": job.job_id, "directory": str(job.directory)})
    assert airflow.wait_run(rivals, 120) == "failed"
    for task_id in ("resume", "upgrade"):
        log = last_log(airflow, rivals, task_id)
        assert "CkptUpgradeRefused" in log
        assert f"Job {job.job_id} is being upgraded by airflow: {run.dag_id}/{STOP} " in log


def upgrade_of(job: SequenceJob, version: Path, **given: Any) -> dict[str, Any]:
    """What the trigger form asks for."""
    known = {"job": job.job_id, "pipeline": str(version), "target_directory": str(job.directory / "savepoints")}
    return known | given


@pytest.mark.long
@pytest.mark.row("air.4")
def test_bad_versions_are_refused_or_rolled_back_although_processes_end(
    airflow: LocalAirflow, session: Session, jobs: list[SequenceJob], killer: Killer
) -> None:
    """One crashes, one never completes a checkpoint, and of one the state does not fit. No row is lost or repeated."""
    crashing, silent, misfit = jobs
    for job in jobs:
        begin(job)
        job.cluster.wait_for_checkpoints(job.job_id, 1)
    old = {job.job_id: job for job in jobs}
    bad = version_of(crashing, 'act(self._faults, "processor")', 'raise ValueError("a bad version")')
    without = {"configuration": {"restart-strategy.type": "none"}, "approval": False}
    rarely = {
        "configuration": {"execution.checkpointing.interval": "1 h"},
        "healthy_timeout": "10 s",
        "approval": False,
    }
    other = version_of(misfit, '.hint("uid", f"order{options.uids}")', '.hint("uid", "another")')
    runs = {
        id(job): airflow.trigger_dag("ckpt_upgrade", upgrade_of(job, version, **given))
        for job, version, given in (
            (crashing, bad, without),
            (silent, version_of(silent), rarely),
            (misfit, other, {"approval": False}),
        )
    }

    def record(job: SequenceJob) -> dict[str, Any] | None:
        """Of its upgrade, once the old version has ended."""
        if airflow.task_states(runs[id(job)]).get(STOP) != "success":
            return None
        found: dict[str, Any] = airflow.api.xcom(runs[id(job)], STOP, "upgrade")
        return found

    run = runs[id(crashing)]
    steps = until(lambda: record(crashing), "the end of the old version")
    killer.at(f"PUT /retired-job-ids/{steps['new_job']}", killer.task(run, START), carried_out=True)
    killer.at(r"POST /jars/[^/]+/run", killer.task(run, START))
    killer.at(r"POST /jars/[^/]+/run", killer.task(run, START), carried_out=True)
    killer.at(f"GET /jobs/{steps['restarted_job']}", killer.triggerer)
    for job in jobs:  # the DAG has one run at a time
        assert airflow.wait_run(runs[id(job)], 240) == "failed"

    assert airflow.task_states(runs[id(misfit)])[STOP] == "failed"
    assert "does not fit the new version" in airflow.failure_report(runs[id(misfit)])
    assert misfit.cluster.status(misfit.job_id) is JobStatus.RUNNING
    end_exactly(misfit, misfit.job_id)
    for job, why in ((crashing, "a bad version"), (silent, "RUNNING and has completed 0 of 1 checkpoints in time")):
        found = until(lambda job=job: record(job), "the record")  # type: ignore[misc]
        versions = [job.job_id, found["new_job"], found["restarted_job"]]
        assert_one_at_a_time(session, versions)
        log = last_log(airflow, runs[id(job)], START)
        assert "CkptUpgradeRolledBack" in log
        assert why in log
        assert savepoints(job) == [found["snapshot"]]
        end_exactly(job, found["restarted_job"])
    assert len(session.jobs() & set(old)) == 3


def last_log(airflow: LocalAirflow, run: DagRun, task_id: str) -> str:
    """Of its last try."""
    (number,) = {item["try_number"] for item in airflow.api.task_instances(run) if item["task_id"] == task_id}
    return airflow.api.task_log(run, task_id, number)
