"""What every operator and sensor says to a job, a name, a connection or a token that does not fit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptConnectionInvalid, CkptRequestRejected
from airflow_provider_ckpt.operators.cancel import CancelJobOperator
from airflow_provider_ckpt.operators.checkpoint import TriggerCheckpointOperator
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator
from airflow_provider_ckpt.operators.rescale import RescaleJobOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor, SavepointCompletedSensor
from airflow_provider_ckpt.sensors.health import CheckpointHealthSensor
from airflow_provider_ckpt.sensors.job import JobStatusSensor
from tests.unit.provider.conftest import JOB, Fault, JobManager, Task, away, finish

OPERATOR = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 20}
SENSOR = {"defer_after": 0, "poke_interval": 0.01, "timeout": 20}
UNKNOWN = "2" * 32
OTHER = "1" * 32

TASKS = [
    (CancelJobOperator, OPERATOR),
    (TriggerCheckpointOperator, OPERATOR),
    (PatchCheckpointConfigOperator, OPERATOR | {"interval": 5}),
    (UpdateJobConfigOperator, OPERATOR | {"configuration": {"execution.checkpointing.interval": "7 s"}}),
    (RescaleJobOperator, OPERATOR | {"parallelism": 3}),
    (TakeSavepointOperator, OPERATOR | {"target_directory": "/data"}),
    (StopWithSavepointOperator, OPERATOR | {"target_directory": "/data"}),
    (JobStatusSensor, SENSOR | {"expected": "RUNNING"}),
    (CheckpointCompletedSensor, SENSOR),
    (SavepointCompletedSensor, SENSOR | {"since_checkpoint_id": 0}),
    (CheckpointHealthSensor, SENSOR | {"expected": ["HEALTHY", "DEGRADED", "UNHEALTHY"], "checkpoints": 0}),
]
every_task = pytest.mark.parametrize(("kind", "given"), TASKS, ids=[kind.__name__ for kind, _ in TASKS])


@every_task
def test_an_unknown_job_fails_without_a_change(
    job_manager: JobManager, task: Task, kind: Any, given: dict[str, Any]
) -> None:
    with pytest.raises(AirflowException, match=f"{UNKNOWN}.*not found|not found.*{UNKNOWN}|Could not find.*{UNKNOWN}"):
        finish(kind(task_id="t", job=UNKNOWN, **given), task.context())


@every_task
def test_ambiguous_or_unknown_name_changes_nothing(
    job_manager: JobManager, task: Task, kind: Any, given: dict[str, Any]
) -> None:
    job_manager.gateway.add_job(OTHER)
    for name, words in (("contract-job", "Give the id of one of them"), ("nope", "Check the connection and the name")):
        with pytest.raises(AirflowException, match=words):
            kind(task_id="t", job=name, **given).execute(task.context())
    assert {line.partition(" ")[0] for line in job_manager.received} == {"GET"}


@every_task
def test_a_connection_that_cannot_be_used_names_its_field(
    job_manager: JobManager, task: Task, kind: Any, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", json.dumps({"conn_type": "ckpt", "host": "a b"}))
    with pytest.raises(CkptConnectionInvalid, match="connection 'wrong', host: 'a b' is not acceptable"):
        kind(task_id="t", job="orders", ckpt_conn_id="wrong", **given).execute(task.context())


@every_task
def test_refused_token_names_the_connection_field_to_set(
    job_manager: JobManager, task: Task, kind: Any, given: dict[str, Any]
) -> None:
    job_manager.faults = [Fault("", 401, times=100)]
    with pytest.raises(CkptRequestRejected, match=r"Set the field Bearer token \(password\) of .*'ckpt_default'"):
        kind(task_id="t", job="contract-job", **given).execute(task.context())


@pytest.mark.row("air.3")
@every_task
def test_task_waits_for_a_session_that_does_not_answer_for_a_while(
    job_manager: JobManager, task: Task, kind: Any, given: dict[str, Any]
) -> None:
    if kind in (CheckpointCompletedSensor, SavepointCompletedSensor):
        given = given | ({"since_checkpoint_id": 0} if "timeout" in given else {"wait_timeout": 3})
        job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[JOB])
    if kind is SavepointCompletedSensor:
        given = given | {"include_savepoints": True}
        take = TakeSavepointOperator(task_id="t", job=JOB, target_directory="/data", **OPERATOR)
        finish(take, Task().context())
    with away(job_manager):
        assert finish(kind(task_id="t", job="contract-job", **given), task.context())["job_id"] == JOB


@pytest.mark.parametrize(
    ("kind", "given"), [(TakeSavepointOperator, OPERATOR | {"target_directory": "/data"}), (JobStatusSensor, SENSOR)]
)
@pytest.mark.parametrize(
    ("status", "says", "is_retried"),
    [
        (500, "The log of the session of the connection 'ckpt_default'", True),
        (302, "Check host, port and scheme of the connection 'ckpt_default', and any proxy", None),
        (403, "Check host, port and scheme of the connection 'ckpt_default', and any proxy", False),
    ],
)
def test_answer_of_another_server_or_a_failing_job_manager_names_the_connection(
    job_manager: JobManager, task: Task, kind: Any, given: Any, status: int, says: str, is_retried: Any
) -> None:
    job_manager.faults.append(Fault("/jobs/overview", status, times=99))
    with pytest.raises(AirflowException, match=says) as caught:
        finish(kind(task_id="t", job="orders", **given), task.context())
    assert is_retried is None or is_retried != isinstance(caught.value, AirflowFailException)


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    *((kind, given | {"deferrable": "{{ params.later }}"}, "deferrable") for kind, given in TASKS),
    (CancelJobOperator, OPERATOR | {"already_ended_ok": "no"}, "already_ended_ok"),
    (PatchCheckpointConfigOperator, OPERATOR | {"interval": 5, "reset": "{{ params.reset }}"}, "reset"),
    (JobStatusSensor, SENSOR | {"all_tasks": None}, "all_tasks"),
    (CheckpointCompletedSensor, SENSOR | {"include_savepoints": 1}, "include_savepoints"),
    (JobStatusSensor, SENSOR | {"poke_interval": 0}, "poke_interval"),
]


@pytest.mark.parametrize(("kind", "given", "name"), WRONG)
def test_template_for_an_untemplated_argument_is_refused_when_the_dag_is_parsed(
    kind: Any, given: dict[str, Any], name: str
) -> None:
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        kind(task_id="t", job=JOB, **given)


@pytest.mark.parametrize(
    ("kind", "given", "name"),
    [
        *((kind, {"defer_after": "5 parsecs"}, "defer_after") for kind, given in TASKS if "wait_timeout" in given),
        *((kind, {"poll_interval": "0"}, "poll_interval") for kind, given in TASKS if "wait_timeout" in given),
        (JobStatusSensor, {"expected": None}, "expected"),
        (JobStatusSensor, {"expected": []}, "expected"),
        (CheckpointHealthSensor, {"expected": 5}, "expected"),
        (CheckpointHealthSensor, {"failing": {"UNHEALTHY": True}}, "failing"),
    ],
)
def test_arguments_of_the_wait_are_checked_before_anything_is_sent(
    job_manager: JobManager, task: Task, kind: Any, given: dict[str, Any], name: str
) -> None:
    arguments = {known: fits for known, fits in TASKS if known is kind}[kind]
    with pytest.raises(CkptArgumentInvalid, match=f"^{name}: "):
        kind(task_id="t", job=JOB, **arguments | given).execute(task.context())
    assert job_manager.received == []


def test_verdicts_that_fail_a_sensor_may_be_left_out(job_manager: JobManager, task: Task) -> None:
    """Also by what a template makes of None."""
    for nothing in (None, "", "None", []):
        sensor = CheckpointHealthSensor(
            task_id="t", job=JOB, expected=["UNHEALTHY", "HEALTHY"], failing=nothing, checkpoints=0, **SENSOR
        )
        assert finish(sensor, task.context())["job_id"] == JOB
