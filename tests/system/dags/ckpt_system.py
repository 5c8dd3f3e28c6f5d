"""DAGs of the system tests, each with one task that waits for the session."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG

from airflow_provider_ckpt.dags import ckpt_restore_drill  # noqa: F401
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor

JOB = "{{ params.job_id }}"
DIRECTORY = "{{ params.directory }}"
PARAMS = {"job_id": "", "directory": ""}
WAIT = {"defer_after": 0, "poll_interval": 0.5, "wait_timeout": 300}
SUBMIT = {
    "pipeline": str(Path(__file__).parents[2] / "support" / "pipelines"),
    "entry": "sequence:pipeline",
    "args": ["--output", f"{DIRECTORY}/out", "--faults", f"{DIRECTORY}/faults", "--rate", "500", "--batch", "64"],
    "parallelism": 2,
    "configuration": {
        "execution.checkpointing.dir": f"{DIRECTORY}/checkpoints",
        "execution.checkpointing.interval": "250ms",
        "restart-strategy.type": "none",
    },
    "wait_for_completion": True,
}
"""The ``sequence`` pipeline, which runs until it is stopped."""


class CrashingSavepointOperator(TakeSavepointOperator):
    """Dies without a word right after its first try has asked for the savepoint."""

    def _attend(self, context: Any, *args: Any) -> Any:
        if context["ti"].try_number == 1:
            os._exit(9)
        return super()._attend(context, *args)


with DAG("system_savepoint", schedule=None, params=PARAMS):
    TakeSavepointOperator(task_id="savepoint", job=JOB, target_directory=f"{DIRECTORY}/savepoints", **WAIT)

with DAG("system_crash", schedule=None, params=PARAMS):
    CrashingSavepointOperator(
        task_id="savepoint",
        job=JOB,
        target_directory=f"{DIRECTORY}/savepoints",
        retries=1,
        retry_delay=timedelta(seconds=1),
        **WAIT,
    )

with DAG("system_submit", schedule=None, params=PARAMS):
    SubmitJobOperator(task_id="submit", **SUBMIT, **WAIT)

with DAG("system_resume", schedule=None, params=PARAMS):
    SubmitJobOperator(
        task_id="submit",
        **SUBMIT,
        retries=1,
        retry_delay=timedelta(seconds=1),
        defer_after=0,
        poll_interval=0.5,
    )

with DAG("system_sensor", schedule=None, params=PARAMS):
    CheckpointCompletedSensor(task_id="checkpoint", job=JOB, count=2, defer_after=0, poke_interval=0.5, timeout=300)
