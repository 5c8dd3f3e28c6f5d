"""Waits and requests in a worker whose session changes its token: they continue with the one of the connection."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from airflow_provider_ckpt.exceptions import CkptRequestRejected
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.sensors.job import JobStatusSensor
from ckpt_runtime.client.errors import Unauthorized
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task

OPERATOR: dict[str, Any] = {"task_id": "t", "deferrable": False, "poll_interval": 0.01, "wait_timeout": 60}
SENSOR: dict[str, Any] = {"task_id": "t", "job": JOB, "poke_interval": 0.01, "timeout": 60}
TASKS: dict[str, Callable[[], Any]] = {
    "savepoint": lambda: TakeSavepointOperator(job=JOB, target_directory="/data", **OPERATOR),
    "poked": lambda: JobStatusSensor(expected="FINISHED", deferrable=False, **SENSOR),
    "before deferring": lambda: JobStatusSensor(expected="FINISHED", deferrable=True, defer_after=60, **SENSOR),
    "submit": lambda: SubmitJobOperator(
        job_name="contract-job", if_running="reuse", pipeline_id="p", wait_for_completion=True, **OPERATOR
    ),
}


PATCH: dict[str, Any] = {"task_id": "t", "job": "contract-job", "interval": 5, "poll_interval": 0.01}


def test_request_repeated_over_a_restart_uses_the_new_token_of_the_connection(
    job_manager: JobManager, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connection_has(token: str, **more: Any) -> None:
        fields = json.loads(job_manager.connection) | {"password": token, **more}
        monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(fields))

    job_manager.ask_for("one")
    connection_has("one")
    away = Fault("", 503, times=10**6)
    job_manager.faults = [away]
    with ThreadPoolExecutor() as threads:
        running = threads.submit(lambda: PatchCheckpointConfigOperator(**PATCH).execute(task.context()))
        seen(job_manager, 2)
        job_manager.ask_for("another")
        connection_has("another")
        away.times = 0
        assert running.result(60)["interval_ms"] == 5000
    # A connection that leads elsewhere by now says nothing of this session.
    connection_has("one")
    with CkptHook().get_conn(retry_timeout=0) as client:
        connection_has("another", host="localhost")
        with pytest.raises(Unauthorized):
            client.list_jobs()
        connection_has("another")
        assert client.list_jobs()


def seen(job_manager: JobManager, more: int) -> None:
    """Waits until so many more requests have come."""
    wanted, end = len(job_manager.received) + more, time.monotonic() + 60
    while len(job_manager.received) < wanted:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("first", ["connection", "session", "session alone"])
@pytest.mark.parametrize("name", TASKS)
def test_wait_in_a_worker_continues_with_the_new_token_of_the_connection(
    job_manager: JobManager, task: Task, monkeypatch: pytest.MonkeyPatch, name: str, first: str
) -> None:
    def connection_has(token: str) -> None:
        fields = json.loads(job_manager.connection) | {"password": token}
        monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(fields))

    job_manager.gateway.polls_until_done = 150
    job_manager.ask_for("one")
    connection_has("one")
    with ThreadPoolExecutor() as threads:
        running = threads.submit(lambda: TASKS[name]().execute(task.context()))
        seen(job_manager, 20)
        if first != "session alone":
            connection_has("another")
        if first == "connection":
            seen(job_manager, 20)
        job_manager.ask_for("another")
        if first == "session alone":
            with pytest.raises(CkptRequestRejected, match="Bearer token"):
                running.result(60)
            return
        seen(job_manager, 20)
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        assert running.result(60)["job_id"] == JOB
