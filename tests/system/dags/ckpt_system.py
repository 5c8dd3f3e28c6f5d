"""DAGs of the system tests, each with one task that waits for the job manager."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG

from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor

JOB = "{{ params.job_id }}"
PARAMS = {"job_id": "fa461ac280c9aa36bde4a060aa97618c"}
WAIT = {"defer_after": 0, "poll_interval": 0.5, "wait_timeout": 300}


class CrashingSavepointOperator(TakeSavepointOperator):
    """Dies without a word right after its first try has asked for the savepoint."""

    def _attend(self, context: Any, *args: Any) -> Any:
        if context["ti"].try_number == 1:
            os._exit(9)
        return super()._attend(context, *args)


with DAG("system_savepoint", schedule=None, params=PARAMS):
    TakeSavepointOperator(task_id="savepoint", job_id=JOB, target_directory="/data", **WAIT)

with DAG("system_crash", schedule=None, params=PARAMS):
    CrashingSavepointOperator(
        task_id="savepoint",
        job_id=JOB,
        target_directory="/data",
        retries=1,
        retry_delay=timedelta(seconds=1),
        **WAIT,
    )

with DAG("system_submit", schedule=None):
    SubmitJobOperator(task_id="submit", pipeline=__file__, wait_for_completion=True, **WAIT)

with DAG("system_resume", schedule=None):
    SubmitJobOperator(
        task_id="submit",
        pipeline=__file__,
        wait_for_completion=True,
        retries=1,
        retry_delay=timedelta(seconds=1),
        defer_after=0,
        poll_interval=0.5,
    )

with DAG("system_sensor", schedule=None, params=PARAMS):
    CheckpointCompletedSensor(task_id="checkpoint", job_id=JOB, count=2, defer_after=0, poke_interval=0.5, timeout=300)
