"""Catch-up, backfills and versioned bundles of DAGs, and drills whose processes are killed, in a running Airflow."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import airflow_provider_ckpt.dags as delivered
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.catalogue import list_savepoints
from demo.airflow_api import AirflowApiError, DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.outputs import visible
from tests.system.airflow_instance import kill_task, make_airflow, until
from tests.system.conftest import Session
from tests.system.dag_files import write_dag

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

INTERVALS = 4
NUMBERS = """
from datetime import datetime, timedelta

from airflow.sdk import DAG, task

with DAG(
    "$dag_id",
    description="$description",
    schedule="@daily",
    start_date=datetime(2024, 1, 1),
    end_date=datetime(2024, 1, 4, 12),
    catchup=$catchup,
    max_active_runs=4,
):

    @task.ckpt(
        job_name="$dag_id",
        configuration={
            "execution.checkpointing.dir": "$directory/checkpoints",
            "execution.checkpointing.interval": "500 ms",
        },
        target_directory="$directory/savepoints",
        healthy_timeout="5 min",
        defer_after=0,
        retries=20,
        retry_delay=timedelta(seconds=2),
    )
    def numbers(spark, output, version):
        from pyspark.sql import functions as F

        rows = spark.readStream.format("rate").option("rowsPerSecond", 50).load()
        rows = rows.select("value", F.lit(version).alias("version"))
        rows.writeStream.format("parquet").queryName("numbers").start(output)

    numbers("$directory/out", $version)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Git repository for DAG files, with one commit."""
    path = tmp_path_factory.mktemp("repository")
    git(path, "init", "--initial-branch=main")
    (path / "README").write_text("DAGs")
    commit(path)
    return path


@pytest.fixture(scope="module")
def airflow(session: Session, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalAirflow]:
    """One that reads the repository too, if the provider of Git is installed."""
    bundle = {
        "name": "repository",
        "classpath": "airflow.providers.git.bundles.git.GitDagBundle",
        "kwargs": {"tracking_ref": "main", "repo_url": str(repository), "refresh_interval": 5},
    }
    connection = json.dumps({"conn_type": "ckpt", "host": "127.0.0.1", "port": session.port})
    with make_airflow(
        tmp_path_factory.mktemp("airflow"),
        {"ckpt_default": connection},
        more_bundles=[bundle] if find_spec("git") is not None else [],
        more_environment={"CKPT_SAVEPOINT_SCHEDULE": "@daily"},
    ) as instance:
        instance.wait_healthy(300)
        yield instance


def git(repository: Path, *command: str) -> str:
    """What a command of Git prints."""
    identity = ("-c", "user.name=tests", "-c", "user.email=tests@localhost")
    done = subprocess.run(["git", *identity, *command], cwd=repository, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(repository: Path) -> str:
    """The id of a commit of all files."""
    git(repository, "add", "--all")
    git(repository, "commit", "--message", "A version")
    return git(repository, "rev-parse", "HEAD")


def backfill(airflow: LocalAirflow, dag_id: str, conf: dict[str, Any], *, again: bool = False) -> None:
    """Of the first days of 2024, all at once; ``again`` for intervals that have runs already."""
    body = {
        "dag_id": dag_id,
        "from_date": "2024-01-01T00:00:00Z",
        "to_date": f"2024-01-0{INTERVALS}T00:00:00Z",
        "max_active_runs": INTERVALS,
        "dag_run_conf": conf,
        "reprocess_behavior": "completed" if again else "none",
    }
    airflow.api.call("POST", "/backfills", body)


def runs_of(airflow: LocalAirflow, dag_id: str, kind: str) -> dict[str, str]:
    """The state of each run of the kind by its id."""
    found = airflow.api.call("GET", f"/dags/{dag_id}/dagRuns")["dag_runs"]
    return {run["dag_run_id"]: run["state"] for run in found if run["run_type"] == kind}


def all_end(airflow: LocalAirflow, dag_id: str, kind: str) -> list[DagRun]:
    """Waits until there is a run of each interval, and all have succeeded."""

    def have_ended() -> bool:
        states = runs_of(airflow, dag_id, kind)
        return len(states) == INTERVALS and set(states.values()) <= {"success", "failed"}

    until(have_ended, f"the end of the {kind} runs of {dag_id}", 600)
    states = runs_of(airflow, dag_id, kind)
    reports = [airflow.failure_report(DagRun(dag_id, run)) for run, state in states.items() if state == "failed"]
    assert not reports, "\n".join(reports)
    return [DagRun(dag_id, run) for run in states]


def result(airflow: LocalAirflow, run: DagRun) -> dict[str, Any]:
    found: dict[str, Any] = airflow.api.xcom(run, "numbers")
    return found


def jobs_of(session: Session, name: str) -> list[Any]:
    """The oldest first."""
    lines = session.cluster.call(session.cluster.dispatcher.list_jobs())
    return sorted((line for line in lines if line.name == name), key=lambda line: line.start_time_ms)


@pytest.fixture
def named(session: Session, request: pytest.FixtureRequest) -> Iterator[str]:
    """A name for a DAG and its jobs, of which none is left in the end."""
    name = f"system_{request.node.originalname.partition('_of_')[0].removeprefix('test_')}"[:50]
    yield name
    dispatcher = session.cluster.dispatcher
    for line in jobs_of(session, name):
        if not line.status.is_globally_terminal:
            session.cluster.call(dispatcher.cancel_job(line.job_id))


def end_exactly(session: Session, job_id: str, directory: Path) -> list[int]:
    """The versions of the rows, whose numbers have come once each."""
    session.cluster.savepoint(job_id, directory / "savepoints", stop=True)
    session.cluster.wait_for_status(job_id, JobStatus.FINISHED)
    rows = visible(directory / "out").sort_values("value")
    assert list(rows.value) == list(range(len(rows)))
    return list(rows.version)


@pytest.mark.row("air.12", "air.4")
def test_catch_up_and_a_backfill_of_a_pipeline_in_a_dag_file_are_one_job_and_one_upgrade(
    airflow: LocalAirflow, session: Session, named: str, tmp_path: Path
) -> None:
    """All intervals run at once: the first task starts or upgrades the job, and the others attach to it."""
    name = named
    write_dag(airflow, name, NUMBERS, catchup=True, directory=tmp_path, version=1)
    airflow.api.unpause(name)
    first = [result(airflow, run) for run in all_end(airflow, name, "scheduled")]
    (job,) = jobs_of(session, name)
    assert {found["job_id"] for found in first} == {job.job_id}
    until(lambda: len(visible(tmp_path / "out")) > 20, "rows of the first version")

    write_dag(airflow, name, NUMBERS, catchup=True, directory=tmp_path, version=2)
    backfill(airflow, name, {}, again=True)
    second = [result(airflow, run) for run in all_end(airflow, name, "backfill")]
    old, new = jobs_of(session, name)
    assert (old.job_id, {found["job_id"] for found in second}) == (job.job_id, {new.job_id})
    assert sorted(found["change"] for found in second) == ["UNCHANGED"] * (INTERVALS - 1) + ["UPGRADED"]
    assert old.end_time_ms <= new.start_time_ms
    assert len(list((tmp_path / "savepoints").iterdir())) == 1
    until(lambda: (visible(tmp_path / "out").version == 2).sum() > 20, "rows of the second version")
    versions = end_exactly(session, new.job_id, tmp_path)
    assert versions == sorted(versions)


@pytest.mark.row("air.6")
def test_backfills_of_the_delivered_dags_are_refused_or_take_no_savepoint(
    airflow: LocalAirflow, job: SequenceJob
) -> None:
    job.start(rate=500, configuration=fast(pipeline__name="backfilled"))
    job.running()
    for name in set(delivered.names()) - {"ckpt_scheduled_savepoints"}:
        until(lambda name=name: airflow.api.has_dag(name), name)  # type: ignore[misc]
        with pytest.raises(AirflowApiError, match="non-periodic schedule"):
            backfill(airflow, name, {})
    name = "ckpt_scheduled_savepoints"
    until(lambda: airflow.api.has_dag(name), name)
    airflow.api.unpause(name)
    directory = job.directory / "savepoints"
    backfill(airflow, name, {"jobs": ["backfilled"], "directory": str(directory)})
    for run in all_end(airflow, name, "backfill"):
        assert airflow.api.xcom(run, "results", "jobs") == {}
    assert not directory.exists()
    run = airflow.trigger_dag(name, {"jobs": ["backfilled"], "directory": str(directory)})
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    assert len(list((directory / "backfilled").iterdir())) == 1
    job.stopped()


@pytest.mark.skipif(find_spec("git") is None, reason="apache-airflow-providers-git is not installed")
@pytest.mark.row("air.12")
def test_the_version_of_a_git_bundle_is_in_the_labels_of_the_job_and_in_the_record_of_the_upgrade(
    airflow: LocalAirflow, session: Session, repository: Path, named: str, tmp_path: Path
) -> None:
    name = named
    versions, results = [], []
    for version in (1, 2):
        content = NUMBERS.replace("$dag_id", name).replace("$description", f"version {version}")
        content = content.replace("$catchup", "False").replace("$directory", str(tmp_path))
        (repository / f"{name}.py").write_text(content.replace("$version", str(version)))
        versions.append(commit(repository))

        def is_read(version: str = versions[-1]) -> bool:
            if not airflow.api.has_dag(name):
                return False
            return bool(airflow.api.call("GET", f"/dags/{name}/details")["bundle_version"] == version)

        until(is_read, f"version {version} of the DAG")
        run = airflow.trigger_dag(name)
        assert airflow.wait_run(run, 600) == "success", airflow.failure_report(run)
        results.append(result(airflow, run))
        labels = session.cluster.of_job(results[-1]["job_id"], lambda job: job.config_info())
        assert "'airflow.bundle':'repository'" in str(labels)
        assert f"'airflow.bundle-version':'{versions[-1]}'" in str(labels)
    assert [found["change"] for found in results] == ["STARTED", "UPGRADED"]
    record = str(airflow.api.call("GET", f"{run.path}/taskInstances/numbers/state-store"))
    assert f"'airflow.bundle-version':'{versions[1]}'" in record
    end_exactly(session, results[1]["job_id"], tmp_path)


@pytest.mark.row("air.10")
def test_a_drill_whose_task_worker_and_triggerer_are_killed_leaves_nothing_and_is_noted_once(
    airflow: LocalAirflow, session: Session, job: SequenceJob
) -> None:
    job.start(rate=500)
    job.running()
    job.has_output()
    savepoint = job.cluster.savepoint(job.job_id, job.directory / "savepoints")
    known = session.jobs()
    given = {
        "savepoint": savepoint,
        "pipeline": str(program_of("sequence")),
        "entry": "sequence:pipeline",
        "args": ["--output", str(job.out), "--faults", str(job.directory)],
        "parallelism": 2,
        "configuration": {"execution.checkpointing.dir": str(job.directory / "drilled")},
        "checkpoints": 2,
        "checkpoint_interval": "1 s",
    }
    with session.hanging(r"POST /jars/[^/]+/drill", carried_out=True) as hanging:
        run = airflow.trigger_dag("ckpt_restore_drill", given)
        until(hanging.came.is_set, "the start of the drill")
        kill_task(airflow, run, "drill", worker=True)
    first = session.job_after(known)
    with session.hanging(r"POST /jars/[^/]+/drill", carried_out=True) as hanging:
        until(hanging.came.is_set, "the start of the second drill")
        kill_task(airflow, run, "drill")
    assert job.cluster.status(first) is JobStatus.CANCELED
    until(lambda: len(session.jobs() - known) == 3, "the third drill")
    airflow.kill_component("triggerer")
    airflow.start_component("triggerer")
    assert airflow.wait_run(run, 600) == "success", airflow.failure_report(run)
    drills = session.jobs() - known
    assert {job.cluster.status(each) for each in drills} == {JobStatus.CANCELED}
    (found,) = list_savepoints(str(job.directory / "savepoints"))
    assert found.entry is not None
    assert [mark.passed for mark in found.entry.drills] == [True]
    assert not [path for path in (job.directory / "drilled").rglob("*") if path.is_file()]
    job.stopped()
