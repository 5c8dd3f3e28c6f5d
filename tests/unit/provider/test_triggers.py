"""Triggers: rebuilt from JSON, honest when killed, silent when cleaned up."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest
from airflow.sdk.module_loading import import_string
from airflow.sdk.serde import deserialize, serialize
from airflow.triggers.base import BaseTrigger

from airflow_provider_ckpt.conditions.base import Condition
from airflow_provider_ckpt.conditions.checkpoint import CheckpointCondition, CheckpointGoal
from airflow_provider_ckpt.conditions.health import (
    DrillCondition,
    HealthCondition,
    SessionGoneCondition,
    SessionReadyCondition,
)
from airflow_provider_ckpt.conditions.job import (
    ConfigurationCondition,
    DisposalCondition,
    JobStatusCondition,
    Operation,
    OperationCondition,
    ReadyForSnapshotCondition,
    RescaleCondition,
)
from airflow_provider_ckpt.jobs import NameFreeCondition
from airflow_provider_ckpt.processes import SessionProcess
from airflow_provider_ckpt.triggers.wait import _CONDITIONS, CkptTrigger
from airflow_provider_ckpt.upgrades.executor import UpgradeCondition
from airflow_provider_ckpt.upgrades.record import DesiredUpgrade, Goal
from airflow_provider_ckpt.upgrades.steps import begin
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, until

ELSEWHERE = SessionProcess("s", "another.example", 1, 1, "/nowhere/s.log")


ID = "ab" * 16
CONDITIONS: list[Condition] = [
    CheckpointCondition(JOB, CheckpointGoal(since_id=3, count=2)),
    ConfigurationCondition(JOB, 3),
    DisposalCondition("/data/savepoint-1", ID),
    DrillCondition(JOB, 2),
    HealthCondition(JOB, ["HEALTHY"], times=2),
    JobStatusCondition(JOB, ["RUNNING"], all_tasks=True, cancel_on_kill=True),
    NameFreeCondition("orders"),
    OperationCondition(JOB, Operation.STOP, ID),
    ReadyForSnapshotCondition(JOB),
    RescaleCondition(JOB, {"a": 2, "b": (1, 3)}),
    SessionGoneCondition(),
    SessionReadyCondition(ELSEWHERE, terminate_on_kill=True),
    UpgradeCondition(begin(DesiredUpgrade(goal=Goal.UPGRADE, job=JOB, program="p"), "series"), "Cancel", 5),
]


def waiting(condition: Condition, deadline: float | None = None) -> CkptTrigger:
    return CkptTrigger(
        ckpt_conn_id="ckpt_default",
        condition=condition,
        deadline=time.time() + 60 if deadline is None else deadline,
        poll_interval=0.01,
        memo={"inherited": True},
    )


def first_event(trigger: BaseTrigger) -> dict[str, Any]:
    async def first() -> Any:
        return await anext(trigger.run())

    payload: dict[str, Any] = asyncio.run(first()).payload
    return payload


@pytest.mark.row("air.3")
@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: type(condition).__name__)
def test_trigger_of_every_condition_is_rebuilt_from_json_and_from_airflows_encoding(condition: Condition) -> None:
    path, kwargs = waiting(condition).serialize()
    for travelled in (json.loads(json.dumps(kwargs)), deserialize(serialize(kwargs))):
        assert import_string(path)(**travelled).serialize() == (path, kwargs)


def test_every_condition_of_a_trigger_is_tested() -> None:
    assert {type(condition) for condition in CONDITIONS} == set(_CONDITIONS.values())


def test_event_carries_all_arguments_of_the_trigger(job_manager: JobManager) -> None:
    trigger = waiting(JobStatusCondition(JOB, ["RUNNING"]))
    event = first_event(trigger)
    assert event["trigger"] == trigger.serialize()[1]
    assert event["status"] == "done"
    assert json.loads(json.dumps(event)) == event


def test_event_is_held_back_for_the_minimum_deferral(job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CKPT__MIN_DEFERRAL", "0.3")
    started = time.monotonic()
    assert first_event(waiting(JobStatusCondition(JOB, ["RUNNING"])))["status"] == "done"
    assert time.monotonic() - started >= 0.3


@pytest.mark.row("air.3")
def test_a_deadline_that_has_passed_still_takes_one_look(job_manager: JobManager) -> None:
    past = time.time() - 100
    assert first_event(waiting(JobStatusCondition(JOB, ["RUNNING"]), past))["status"] == "done"
    assert first_event(waiting(JobStatusCondition(JOB, ["FINISHED"]), past))["status"] == "timeout"


@pytest.mark.row("air.3")
def test_trigger_does_not_raise_while_the_job_manager_does_not_answer(job_manager: JobManager) -> None:
    job_manager.stop()
    event = first_event(waiting(JobStatusCondition(JOB, ["RUNNING"]), time.time() + 0.1))
    assert event["status"] == "timeout"
    assert "cannot be reached" in event["message"]


def test_an_answer_that_no_retry_can_cure_ends_the_wait(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = first_event(waiting(JobStatusCondition("not-an-id", ["RUNNING"])))
    assert event["status"] == "refused"


@pytest.mark.row("air.3")
@pytest.mark.parametrize("cancel", [True, False])
def test_killed_wait_cancels_the_job_if_configured_and_cleanup_never_does(
    job_manager: JobManager, cancel: bool
) -> None:
    trigger = waiting(JobStatusCondition(JOB, ["FINISHED"], cancel_on_kill=cancel))
    asyncio.run(trigger.cleanup())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING
    asyncio.run(trigger.on_kill())
    assert job_manager.gateway.jobs[JOB].status is (JobStatus.CANCELED if cancel else JobStatus.RUNNING)


@pytest.mark.row("air.3")
def test_killed_wait_cancels_the_job_although_the_triggerer_cancels_the_trigger_again_and_again(
    job_manager: JobManager,
) -> None:
    async def killed() -> None:
        work = asyncio.ensure_future(waiting(JobStatusCondition(JOB, ["FINISHED"], cancel_on_kill=True)).on_kill())
        while not work.done():
            await asyncio.wait([work], timeout=0.001)
            work.cancel("user-action")
        await work

    asyncio.run(killed())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.CANCELED


@pytest.mark.row("air.3")
@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (OperationCondition(JOB, Operation.SAVEPOINT, ID), "was not cancelled"),
        (JobStatusCondition(JOB, ["FINISHED"]), "was not cancelled"),
        (JobStatusCondition("0" * 32, ["FINISHED"], cancel_on_kill=True), "cancelling .* failed"),
        (SessionReadyCondition(ELSEWHERE), "keeps running"),
        (SessionReadyCondition(ELSEWHERE, terminate_on_kill=True), "another machine"),
        (NameFreeCondition("orders"), "no job was started"),
    ],
)
def test_killed_task_logs_whether_the_remote_operation_continues(
    job_manager: JobManager, condition: Condition, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    trigger = waiting(condition)
    said: list[str] = []
    log = type("Log", (), {name: lambda _, text, *args: said.append(text % args) for name in ("warning", "error")})()
    monkeypatch.setattr(type(trigger), "log", log)
    asyncio.run(trigger.on_kill())
    assert re.search(words, said[0])


@pytest.mark.parametrize("is_changed", [True, False])
def test_wait_continues_with_the_new_token_of_the_connection(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    async def wait() -> dict[str, Any]:
        trigger = waiting(JobStatusCondition(JOB, ["FINISHED"]), time.time() + 60)
        event = asyncio.ensure_future(anext(trigger.run()))
        await until(lambda: job_manager.count(f"GET /jobs/{JOB}") > 0)
        if is_changed:
            fields = json.loads(job_manager.connection) | {"password": "another"}
            monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(fields))
        job_manager.faults.append(Fault(f"GET /jobs/{JOB}$", 401))
        job_manager.gateway.move(JOB, JobStatus.FINISHED)
        found: dict[str, Any] = (await event).payload
        return found

    assert asyncio.run(wait())["status"] == ("done" if is_changed else "refused")


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ({"type": "NoCondition"}, "^condition: 'NoCondition' does not exist"),
        ({"type": "OperationCondition", "job_id": JOB, "operation": "disposal", "trigger_id": ID}, "disposal"),
    ],
)
def test_trigger_of_an_unknown_condition_is_refused(condition: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CkptTrigger(ckpt_conn_id="c", condition=condition, deadline=None, poll_interval=1)
