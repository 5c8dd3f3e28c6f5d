"""Alerts, notifiers, tasks that are mapped over jobs, and partitions of savepoints, in a running Airflow."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ckpt.operators.savepoint import partition_key
from ckpt_runtime.snapshots.catalogue import list_savepoints
from demo.airflow_api import DagRun
from demo.airflow_instance import LocalAirflow
from tests.support.jobs import SequenceJob, fast
from tests.system.airflow_instance import until, wait_state
from tests.system.conftest import Session
from tests.system.dag_files import write_dag

pytestmark = [pytest.mark.airflow, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

ALERT = """
from airflow.sdk import DAG, task

from airflow_provider_ckpt.assets import no_checkpoint_for, no_savepoint_for

TROUBLE = no_checkpoint_for("$job", "20 s", poll_interval=0.5) | no_savepoint_for("$job", "30 d", poll_interval=0.5)

with DAG("$dag_id", schedule=TROUBLE, description="$description"):

    @task
    def payloads(triggering_asset_events=None):
        return [event.extra["payload"] for events in triggering_asset_events.values() for event in events]

    payloads()
"""

NOTIFIER = """
from pathlib import Path

from airflow.sdk import DAG, task

from airflow_provider_ckpt.notifications.ckpt import CkptNotifier
from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator


def keep(name):
    return lambda context: Path("$directory", name).write_text(context["ckpt"]["message"])


with DAG(
    "$dag_id",
    schedule=None,
    description="$description",
    params={"job_id": ""},
    on_failure_callback=CkptNotifier(
        job="$job", message="DAG: {{ ckpt.job }}, {{ ckpt.state }}", notifiers=[keep("dag")]
    ),
):
    UpdateJobConfigOperator(
        task_id="refused",
        job="{{ params.job_id }}",
        configuration={"execution.checkpointing.interval": "soon"},
        on_failure_callback=CkptNotifier(
            message="Task: {{ ckpt.job_id }}, {{ ckpt.verdict }}, {{ ckpt.checkpoint.id }}, {{ ckpt.link }}",
            notifiers=[keep("task")],
        ),
    )
"""

MAPPED = """
from airflow.sdk import DAG, PartitionedAssetTimetable, task

from airflow_provider_ckpt.assets import create_asset
from airflow_provider_ckpt.operators.listing import ListJobsOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator

SAVED = create_asset(ckpt_conn_id="ckpt_default", job="mapped jobs")

with DAG("$dag_id", schedule=None, description="$description"):
    jobs = ListJobsOperator(task_id="jobs", name="mapped *")
    TakeSavepointOperator.partial(
        task_id="savepoint",
        target_directory="$directory",
        outlets=[SAVED],
        partition_outlets=True,
        defer_after=0,
        poll_interval=0.5,
        map_index_template="{{ task.job.name }}",
    ).expand(job=jobs.output)

with DAG("${dag_id}_of_a_day", schedule=PartitionedAssetTimetable(assets=SAVED)):

    @task
    def seen(dag_run=None):
        return dag_run.partition_key

    seen()
"""


@pytest.fixture
def named(session: Session, tmp_path: Path) -> Iterator[Any]:
    """Starts jobs with names, and ends them."""
    started: list[SequenceJob] = []

    def start(name: str) -> SequenceJob:
        job = SequenceJob(session.cluster, tmp_path / name.replace(" ", "-"))
        job.start(rate=500, configuration=fast(pipeline__name=name))
        started.append(job)
        job.running()
        job.cluster.wait_for_checkpoints(job.job_id, 1)
        return job

    yield start
    for job in started:
        job.release("processor")
        job.end()


def runs_of(airflow: LocalAirflow, dag_id: str) -> list[DagRun]:
    found = airflow.api.call("GET", f"/dags/{dag_id}/dagRuns")["dag_runs"]
    return [DagRun(dag_id, run["dag_run_id"]) for run in found if run["state"] == "success"]


@pytest.mark.row("air.16")
def test_each_absence_of_checkpoints_starts_the_dag_once(airflow: LocalAirflow, session: Session, named: Any) -> None:
    job = named("watched for checkpoints")
    write_dag(airflow, "system_alert", ALERT, job="watched for checkpoints")
    looks = session.requests[f"GET /jobs/{job.job_id}/checkpoints"]
    airflow.api.unpause("system_alert")
    airflow.api.parse_again("system_alert")
    until(lambda: session.requests[f"GET /jobs/{job.job_id}/checkpoints"] > looks + 1, "looks of the alert")
    for number in (1, 2):
        job.hold("processor")
        until(lambda number=number: len(runs_of(airflow, "system_alert")) == number, "a run for the alert")  # type: ignore[misc]
        known = session.cluster.completed_checkpoints(job.job_id)
        job.release("processor")
        job.cluster.wait_for_checkpoints(job.job_id, known + 2)
    payloads = [payload for run in runs_of(airflow, "system_alert") for payload in airflow.api.xcom(run, "payloads")]
    assert {(payload["alert"], payload["job"], payload["job_id"]) for payload in payloads} == {
        ("no-checkpoint", "watched for checkpoints", job.job_id)
    }
    assert len({payload["since_ms"] for payload in payloads}) == len(payloads) == 2
    assert all(
        payload["health"]["verdict"] and "No checkpoint has completed" in payload["message"] for payload in payloads
    )


@pytest.mark.row("air.17")
def test_callbacks_of_a_task_and_of_a_dag_say_how_the_job_is(airflow: LocalAirflow, named: Any, tmp_path: Path) -> None:
    job = named("job of a notifier")
    write_dag(airflow, "system_notifier", NOTIFIER, job="job of a notifier", directory=tmp_path)
    run = airflow.trigger_dag("system_notifier", {"job_id": job.job_id})
    assert airflow.wait_run(run, 390) == "failed"
    said = until(lambda: text_of(tmp_path / "task"), "the message of the task")
    assert said.startswith(f"Task: {job.job_id}, ")
    assert said.endswith(f"{airflow.base_url}/ckpt/ckpt_default/web/#/jobs/{job.job_id}/health")
    assert until(lambda: text_of(tmp_path / "dag"), "the message of the DAG") == "DAG: job of a notifier, RUNNING"


def text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


@pytest.mark.row("air.18")
def test_a_mapped_task_has_one_instance_for_each_job_and_each_savepoint_is_a_partition(
    airflow: LocalAirflow, named: Any, tmp_path: Path
) -> None:
    """A job that lets no savepoint complete holds up its own instance, and not that of another job."""
    held, free = named("mapped 1"), named("mapped 2")
    held.hold("processor")
    write_dag(airflow, "system_mapped", MAPPED, directory=tmp_path / "savepoints")
    until(lambda: airflow.api.has_dag("system_mapped_of_a_day"), "the DAG of partitions")
    airflow.api.unpause("system_mapped_of_a_day")
    before = datetime.now(UTC)
    run = airflow.trigger_dag("system_mapped", {})
    wait_state(airflow, run, "savepoint[1]", "success")
    assert airflow.task_states(run)["savepoint[0]"] not in ("success", "failed")
    held.release("processor")
    assert airflow.wait_run(run, 390) == "success", airflow.failure_report(run)
    shown = {item["rendered_map_index"] for item in airflow.api.task_instances(run) if item["task_id"] == "savepoint"}
    assert shown == {"mapped 1", "mapped 2"}
    found = {entry.entry.job_id for entry in list_savepoints(str(tmp_path / "savepoints")) if entry.entry is not None}
    assert found == {held.job_id, free.job_id}
    days = (before, datetime.now(UTC))
    until(lambda: len(runs_of(airflow, "system_mapped_of_a_day")) == 2, "a run for each partition")
    keys = {json.dumps(airflow.api.xcom(run, "seen")) for run in runs_of(airflow, "system_mapped_of_a_day")}
    assert {key.strip('"').partition("|")[0] for key in keys} == {"mapped 1", "mapped 2"}
    assert keys <= {json.dumps(partition_key(name, at)) for name in ("mapped 1", "mapped 2") for at in days}
