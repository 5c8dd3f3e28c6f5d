"""DAGs of the system tests, with tasks that wait for the session."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG

from airflow_provider_ckpt.dags import ckpt_restore_drill  # noqa: F401
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.operators.suspend import ResumeJobOperator
from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor

JOB = "{{ params.job_id }}"
DIRECTORY = "{{ params.directory }}"
PARAMS = {"job_id": "", "directory": ""}
WAIT = {"defer_after": 0, "poll_interval": 0.5, "wait_timeout": 3600}
SUBMIT = {
    "pipeline": str(Path(__file__).parents[2] / "support" / "pipelines"),
    "entry": "sequence:pipeline",
    "args": ["--output", f"{DIRECTORY}/out", "--faults", f"{DIRECTORY}/faults", "--rate", "50", "--batch", "8"],
    "parallelism": 1,
    "configuration": {
        "execution.checkpointing.dir": f"{DIRECTORY}/checkpoints",
        "execution.checkpointing.interval": "1 s",
        "restart-strategy.type": "none",
    },
    "wait_for_completion": True,
}
"""The ``sequence`` pipeline, which runs until it is stopped; slowly, because it runs for as long as Airflow needs."""


with DAG("system_savepoint", schedule=None, params=PARAMS):
    TakeSavepointOperator(task_id="savepoint", job=JOB, target_directory=f"{DIRECTORY}/savepoints", **WAIT)

with DAG("system_operations", schedule=None, params=PARAMS | {"other_id": "", "other_directory": ""}):
    KEPT: dict[str, Any] = {"retries": 5, "retry_delay": timedelta(0)}
    TakeSavepointOperator(task_id="savepoint", job=JOB, target_directory=f"{DIRECTORY}/savepoints", **KEPT, **WAIT)
    StopWithSavepointOperator(
        task_id="stop",
        job="{{ params.other_id }}",
        target_directory="{{ params.other_directory }}/savepoints",
        **KEPT,
        **WAIT,
    )

with DAG("system_submit", schedule=None, params=PARAMS):
    SubmitJobOperator(task_id="submit", **SUBMIT, **WAIT)

with DAG("system_resume", schedule=None, params=PARAMS):
    SubmitJobOperator(
        task_id="submit", **SUBMIT, retries=1, retry_delay=timedelta(seconds=1), defer_after=0, poll_interval=0.5
    )

with DAG("system_rivals", schedule=None, params=PARAMS):
    ResumeJobOperator(task_id="resume", job=JOB, **WAIT)
    UpgradeJobOperator(task_id="upgrade", job=JOB, pipeline=f"{DIRECTORY}/version", **WAIT)

with DAG("system_sensor", schedule=None, params=PARAMS):
    CheckpointCompletedSensor(task_id="checkpoint", job=JOB, count=2, defer_after=0, poke_interval=0.5, timeout=3600)
