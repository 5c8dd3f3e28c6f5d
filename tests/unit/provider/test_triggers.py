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

from airflow_provider_ckpt.session_process import SessionProcess
from airflow_provider_ckpt.triggers.checkpoint import CkptCheckpointTrigger
from airflow_provider_ckpt.triggers.job import CkptJobTrigger
from airflow_provider_ckpt.triggers.operation import CkptOperationTrigger
from airflow_provider_ckpt.triggers.session import CkptSessionTrigger
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JOB, Fault, JobManager, until

ELSEWHERE = SessionProcess("s", "another.example", 1, 1, "/nowhere/s.log").to_json()


def base(**kwargs: Any) -> dict[str, Any]:
    wait = {"ckpt_conn_id": "ckpt_default", "deadline": time.time() + 5, "poll_interval": 0.01}
    return wait | {"memo": {"inherited": True}} | kwargs


def triggers() -> list[Any]:
    return [
        CkptOperationTrigger(**base(operation="stop", job_id=JOB, trigger_id="ab" * 16)),
        CkptJobTrigger(**base(job_id=JOB, expected=["RUNNING"], all_tasks=True, cancel_on_kill=True)),
        CkptCheckpointTrigger(**base(job_id=JOB, goal={"since_id": 3, "count": 2})),
        CkptSessionTrigger(**base(wait_for="ready", process=ELSEWHERE, terminate_on_kill=True)),
        CkptSessionTrigger(**base(wait_for="gone")),
    ]


def first_event(trigger: BaseTrigger) -> dict[str, Any]:
    async def first() -> Any:
        return await anext(trigger.run())

    payload: dict[str, Any] = asyncio.run(first()).payload
    return payload


@pytest.mark.row("air.3")
@pytest.mark.parametrize("trigger", triggers(), ids=lambda trigger: type(trigger).__name__)
def test_a_trigger_is_rebuilt_from_json_and_from_airflows_encoding(trigger: BaseTrigger) -> None:
    path, kwargs = trigger.serialize()
    for travelled in (json.loads(json.dumps(kwargs)), deserialize(serialize(kwargs))):
        assert import_string(path)(**travelled).serialize() == (path, kwargs)


def test_the_event_carries_everything_that_the_trigger_was_made_of(job_manager: JobManager) -> None:
    trigger = CkptJobTrigger(**base(job_id=JOB, expected=["RUNNING"]))
    event = first_event(trigger)
    assert event["trigger"] == trigger.serialize()[1]
    assert event["status"] == "done"
    assert json.loads(json.dumps(event)) == event


def test_an_event_that_airflow_would_misread_is_held_back(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CKPT__MIN_DEFERRAL", "0.3")
    started = time.monotonic()
    assert first_event(CkptJobTrigger(**base(job_id=JOB, expected=["RUNNING"])))["status"] == "done"
    assert time.monotonic() - started >= 0.3


@pytest.mark.row("air.3")
def test_a_deadline_that_has_passed_still_takes_one_look(job_manager: JobManager) -> None:
    past = {"deadline": time.time() - 100}
    assert first_event(CkptJobTrigger(**base(job_id=JOB, expected=["RUNNING"], **past)))["status"] == "done"
    assert first_event(CkptJobTrigger(**base(job_id=JOB, expected=["FINISHED"], **past)))["status"] == "timeout"


@pytest.mark.row("air.3")
def test_a_trigger_never_raises_for_a_job_manager_that_is_away(job_manager: JobManager) -> None:
    job_manager.stop()
    event = first_event(CkptJobTrigger(**base(job_id=JOB, expected=["RUNNING"], deadline=time.time() + 0.1)))
    assert event["status"] == "timeout"
    assert "cannot be reached" in event["message"]


def test_an_answer_that_no_retry_can_cure_ends_the_wait(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = first_event(CkptJobTrigger(**base(job_id="not-an-id", expected=["RUNNING"])))
    assert event["status"] == "refused"


@pytest.mark.row("air.3")
@pytest.mark.parametrize("cancel", [True, False])
def test_killing_a_waiting_task_cancels_the_job_if_wanted_and_cleaning_up_never_does(
    job_manager: JobManager, cancel: bool
) -> None:
    trigger = CkptJobTrigger(**base(job_id=JOB, expected=["FINISHED"], cancel_on_kill=cancel))
    asyncio.run(trigger.cleanup())
    assert job_manager.gateway.jobs[JOB].status is JobStatus.RUNNING
    asyncio.run(trigger.on_kill())
    assert job_manager.gateway.jobs[JOB].status is (JobStatus.CANCELED if cancel else JobStatus.RUNNING)


@pytest.mark.row("air.3")
@pytest.mark.parametrize(
    ("trigger", "words"),
    [
        (CkptOperationTrigger(**base(operation="savepoint", job_id=JOB, trigger_id="ab" * 16)), "was not cancelled"),
        (CkptJobTrigger(**base(job_id=JOB, expected=["FINISHED"])), "was not cancelled"),
        (CkptJobTrigger(**base(job_id="0" * 32, expected=["FINISHED"], cancel_on_kill=True)), "cancelling .* failed"),
        (CkptSessionTrigger(**base(wait_for="ready", process=ELSEWHERE)), "goes on"),
        (CkptSessionTrigger(**base(wait_for="ready", process=ELSEWHERE, terminate_on_kill=True)), "another machine"),
    ],
)
def test_a_killed_task_says_what_became_of_the_remote_side(
    job_manager: JobManager, trigger: BaseTrigger, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import re

    said: list[str] = []
    log = type("Log", (), {name: lambda _, text, *args: said.append(text % args) for name in ("warning", "error")})()
    monkeypatch.setattr(type(trigger), "log", log)
    asyncio.run(trigger.on_kill())
    assert re.search(words, said[0])


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_wait_goes_on_with_the_token_that_the_connection_has_got_meanwhile(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch, is_changed: bool
) -> None:
    async def wait() -> dict[str, Any]:
        trigger = CkptJobTrigger(**base(job_id=JOB, expected=["FINISHED"], deadline=time.time() + 60))
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


def test_a_bad_kind_of_wait_is_refused() -> None:
    with pytest.raises(ValueError, match="^wait_for: "):
        CkptSessionTrigger(**base(wait_for="nothing"))
    with pytest.raises(ValueError, match="disposal"):
        CkptOperationTrigger(**base(operation="disposal", job_id=JOB, trigger_id="ab" * 16))
