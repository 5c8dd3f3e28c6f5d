"""``@task.ckpt`` and the retry policy under a scheduler and a triggerer: versions of a DAG file, refusals, absences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ckpt import processes
from ckpt_runtime.rest import server as rest_server
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.scheduler.job_status import JobStatus
from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.jobs import SequenceJob
from tests.support.outputs import hidden, visible
from tests.support.spark_sessions import free_port
from tests.system.airflow_instance import WRITTEN_DAGS, until, wait_state
from tests.system.conftest import Session
from tests.system.dag_files import write_dag

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

VERSIONS = """
from airflow.sdk import DAG, task

with DAG("$dag_id", schedule=None, description="$description", params={"directory": ""}):

    @task.ckpt(
        job_name="numbers of a DAG file",
        files=["$dag_id-rules.py"],
        parallelism=2,
        configuration={
            "execution.checkpointing.dir": "{{ params.directory }}/checkpoints",
            "execution.checkpointing.interval": "500 ms",
            "restart-strategy.type": "none",
        },
        target_directory="{{ params.directory }}/savepoints",
        healthy_timeout="5 min",
        defer_after=0,
        retries=0,
    )
    def numbers(spark, output, version):
        from pathlib import Path

        from pyspark.sql import functions as F
        from pyspark.sql.types import LongType

        with_error = (Path(__file__).parent / "$dag_id-rules.py").read_text() == "BROKEN = True"

        def checked(value):
            if with_error and value % 10 == 3:
                raise ValueError("this version does not take a 3")
            return value

        rows = spark.readStream.format("rate").option("rowsPerSecond", 50).load()
        rows = rows.select(F.udf(checked, LongType())("value").alias("value"), F.lit(version).alias("version"))
        rows.writeStream.format("parquet").queryName("numbers").start(output)

    numbers("{{ params.directory }}/out", $version)
"""

FAILURES = """
from datetime import timedelta

from airflow.sdk import DAG, task

from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator
from airflow_provider_ckpt.retry import CkptRetryPolicy

RETRIES = {"retries": 50, "retry_delay": timedelta(seconds=1)}

with DAG("$dag_id", schedule=None, description="$description", params={"job_id": "", "directory": ""}):
    UpdateJobConfigOperator(
        task_id="operator",
        job="{{ params.job_id }}",
        configuration={"execution.checkpointing.interval": "soon"},
        **RETRIES,
    )

    @task(retry_policy=CkptRetryPolicy(), **RETRIES)
    def look(conn_id, directory):
        with CkptHook(conn_id).get_conn(retry_timeout=0) as client:
            return len(client.list_savepoints(directory))

    look.override(task_id="refused")("ckpt_default", "not/absolute")
    look.override(task_id="away")("$away", "{{ params.directory }}")
"""


def deploy(airflow: LocalAirflow, directory: Path, version: int) -> DagRun:
    """Write this version of the DAG file, and begin a run."""
    write_dag(airflow, "system_numbers", VERSIONS, version=version)
    return airflow.trigger_dag("system_numbers", {"directory": str(directory)})


def result(airflow: LocalAirflow, run: DagRun) -> dict[str, Any]:
    found: dict[str, Any] = airflow.api.xcom(run, "numbers")
    return found


def tries(airflow: LocalAirflow, run: DagRun) -> dict[str, int]:
    return {instance["task_id"]: instance["try_number"] for instance in airflow.api.task_instances(run)}


@pytest.mark.row("air.12")
def test_versions_of_a_dag_file_are_upgrades_and_a_bad_one_is_rolled_back(
    airflow: LocalAirflow, session: Session, tmp_path: Path
) -> None:
    """The job of a PySpark program, whose output has each number once, from the version that ran at that time."""
    rules = airflow.home / WRITTEN_DAGS / "system_numbers-rules.py"
    rules.write_text("BROKEN = False")
    known = session.jobs()
    run = deploy(airflow, tmp_path, 1)
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    first = result(airflow, run)
    assert (first["change"], {first["job_id"]}) == ("STARTED", session.jobs() - known)
    labels = session.cluster.of_job(first["job_id"], lambda job: job.config_info())
    assert "'airflow.bundle':'written'" in str(labels)
    assert f"'airflow.run-id':'{run.run_id}'" in str(labels)
    until(lambda: len(written(tmp_path)) > 20, "rows of the first version")

    run = airflow.trigger_dag("system_numbers", {"directory": str(tmp_path)})
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    assert (result(airflow, run)["change"], result(airflow, run)["job_id"]) == ("UNCHANGED", first["job_id"])

    run = deploy(airflow, tmp_path, 2)
    wait_state(airflow, run, "numbers", "deferred", "success")
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    second = result(airflow, run)
    assert second["change"] == "UPGRADED"
    assert f"{tmp_path}/savepoints/" in second["started_from"]
    until(lambda: (written(tmp_path).version == 2).sum() > 20, "rows of the second version")

    rules.write_text("BROKEN = True")  # the function is as before, a file that travels with it is not
    run = airflow.trigger_dag("system_numbers", {"directory": str(tmp_path)})
    assert airflow.wait_run(run, 390) == "failed"
    report = airflow.failure_report(run, 200)
    assert "CkptUpgradeRolledBack" in report
    assert "this version does not take a 3" in report
    run = airflow.trigger_dag("system_numbers", {"directory": str(tmp_path)})
    assert airflow.wait_run(run, 390) == "failed"
    assert "and rolled back" in airflow.failure_report(run, 200)

    rules.write_text("BROKEN = False")
    run = deploy(airflow, tmp_path, 2)
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    last = result(airflow, run)
    assert last["change"] == "UNCHANGED"
    assert last["job_id"] not in (first["job_id"], second["job_id"])
    session.cluster.savepoint(last["job_id"], tmp_path / "savepoints", stop=True)
    session.cluster.wait_for_status(last["job_id"], JobStatus.FINISHED)
    rows = written(tmp_path).sort_values("value")
    assert list(rows.value) == list(range(len(rows)))
    assert list(rows.version) == sorted(rows.version)
    assert set(rows.version) == {1, 2}
    assert hidden(tmp_path / "out") == []


def written(directory: Path) -> Any:
    """The rows that can be read so far; with the columns also when there are none."""
    found = visible(directory / "out")
    return found if len(found) else found.reindex(columns=["value", "version"])


@pytest.mark.row("air.14")
def test_refused_request_fails_at_once_and_an_unreachable_session_is_retried(
    airflow: LocalAirflow, session: Session, job: SequenceJob
) -> None:
    job.start(rate=500)
    job.running()
    port = free_port()
    connection = {"connection_id": "away", "conn_type": "ckpt", "host": "127.0.0.1", "port": port}
    airflow.api.call("POST", "/connections", connection)
    write_dag(airflow, "system_failures", FAILURES, away="away")
    run = airflow.trigger_dag("system_failures", {"job_id": job.job_id, "directory": str(job.directory)})
    wait_state(airflow, run, "operator", "failed")
    wait_state(airflow, run, "refused", "failed")
    until(lambda: tries(airflow, run)["away"] > 1, "a second try of the task whose session is away")
    server, _ = session.cluster.call(
        rest_server.start(create_app(session.cluster.dispatcher, token=None), "127.0.0.1", port)
    )
    try:
        wait_state(airflow, run, "away", "success")
    finally:
        session.cluster.call(rest_server.stop(server))
    ended = tries(airflow, run)
    assert (ended["operator"], ended["refused"]) == (1, 1)
    assert airflow.api.xcom(run, "away") == 0
    assert "the job manager has refused the request" in decisions(airflow, run, "refused")
    assert "the session is away" in decisions(airflow, run, "away")
    job.stopped()


@pytest.mark.spark
@pytest.mark.row("air.13")
def test_a_session_around_work_that_fails_is_ended_by_its_teardown(airflow: LocalAirflow, tmp_path: Path) -> None:
    """With the deferrals of a start in Spark, as a scheduler and a triggerer make them."""
    connection = {"connection_id": "ckpt_session", "conn_type": "ckpt", "host": "127.0.0.1", "port": free_port()}
    airflow.api.call("POST", "/connections", connection | {"password": "secret"})
    source = Path(__file__).with_name("dags_to_test") / "ckpt_session_around_work.py"
    (airflow.home / WRITTEN_DAGS / source.name).write_text(source.read_text())
    run = airflow.trigger_dag("session_around_work", {"directory": str(tmp_path)})
    assert airflow.wait_run(run, 600) == "failed"
    assert airflow.task_states(run) == {"start": "success", "work": "failed", "stop": "success"}
    [log] = (tmp_path / "logs").glob("*.log")
    assert processes.find(log.stem, str(log)) is None


def decisions(airflow: LocalAirflow, run: DagRun, task_id: str) -> str:
    """What the log of the first try has of the retry policy, with all fields of its entries."""
    entries = airflow.api.call("GET", f"{run.path}/taskInstances/{task_id}/logs/1")["content"]
    return str([entry for entry in entries if "Retry policy decision" in str(entry)])
