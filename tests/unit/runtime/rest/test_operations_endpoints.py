"""Asynchronous operations: triggering, polling, idempotent trigger ids, both spellings of fields."""

from __future__ import annotations

import pytest

from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.runtime.rest.conftest import JOB, Send
from tests.unit.runtime.rest.fake_gateway import FakeGateway

TRIGGER = "AB" * 16


def poll(send: Send, path: str, trigger: str) -> dict[str, object]:
    for _ in range(10):
        answer: dict[str, object] = send("GET", f"/jobs/{JOB}/{path}/{trigger}").json()
        if answer["operation"] is not None:
            return answer
    raise AssertionError("the operation did not end")


def test_a_checkpoint(send: Send) -> None:
    trigger = send("POST", f"/v1/jobs/{JOB}/checkpoints").json()["request-id"]
    first = send("GET", f"/jobs/{JOB}/checkpoints/{trigger}").json()
    assert first == {"status": {"id": "IN_PROGRESS"}, "operation": None}
    assert poll(send, "checkpoints", trigger) == {"status": {"id": "COMPLETED"}, "operation": {"checkpointId": 1}}
    details = send("GET", f"/jobs/{JOB}/checkpoints/details/1").json()
    assert details["external_path"] == "file:/data/chk-1"
    assert len(details["tasks"]) == 3


def test_a_repeated_stop_is_answered_after_the_job_has_ended(send: Send, gateway: FakeGateway) -> None:
    body = {"triggerId": TRIGGER, "targetDirectory": "/s"}
    send("POST", f"/jobs/{JOB}/stop", json=body)
    location = poll(send, "savepoints", TRIGGER)["operation"]
    assert gateway.jobs[JOB].status is JobStatus.FINISHED
    assert send("POST", f"/jobs/{JOB}/stop", json=body).status_code == 202
    assert poll(send, "savepoints", TRIGGER)["operation"] == location
    assert send("POST", f"/jobs/{JOB}/stop", json={"targetDirectory": "/s"}).status_code == 409


@pytest.mark.row("203.1")
@pytest.mark.parametrize("path", ["savepoints", "stop"])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "NATIVE"),
        ({"formatType": "CANONICAL"}, "CANONICAL"),
        ({"formatType": "canonical"}, "CANONICAL"),
        ({"type": "canonical"}, "CANONICAL"),
        ({"type": "Native"}, "NATIVE"),
        ({"type": "native", "formatType": "NATIVE"}, "NATIVE"),
        ({"formatType": None, "type": None}, "NATIVE"),
    ],
)
@pytest.mark.parametrize("directory", ["target-directory", "targetDirectory"])
def test_formats_and_spellings(send: Send, path: str, fields: dict[str, str], expected: str, directory: str) -> None:
    trigger = send("POST", f"/jobs/{JOB}/{path}", json={directory: "s3://b/c", **fields}).json()["request-id"]
    poll(send, "savepoints", trigger)
    latest = send("GET", f"/jobs/{JOB}/checkpoints").json()["latest"]["savepoint"]
    assert latest["savepointFormat"] == expected
    assert latest["checkpoint_type"] == ("SAVEPOINT" if path == "savepoints" else "SYNC_SAVEPOINT")


def test_the_configured_directory_is_the_default(send: Send, gateway: FakeGateway) -> None:
    refused = send("POST", f"/jobs/{JOB}/stop", json={})
    assert refused.status_code == 400
    assert "[targetDirectory] must be provided" in refused.json()["errors"][0]
    gateway.jobs[JOB].savepoint_directory = "file:///s"
    assert send("POST", f"/jobs/{JOB}/stop").status_code == 202


def test_failures_are_spelled_as_flink_does(send: Send, gateway: FakeGateway) -> None:
    gateway.savepoint_failure = FailureCause("ckpt.Failed", "no room", "ckpt.Failed: no room")
    checkpoint = send("POST", f"/jobs/{JOB}/checkpoints").json()["request-id"]
    savepoint = send("POST", f"/jobs/{JOB}/savepoints", json={"target-directory": "/s"}).json()["request-id"]
    assert set(poll(send, "checkpoints", checkpoint)["operation"]) == {"failureCause"}  # type: ignore[call-overload]
    operation = poll(send, "savepoints", savepoint)["operation"]
    assert set(operation) == {"failure-cause"}  # type: ignore[call-overload]
    assert set(operation["failure-cause"]) == {"class", "stack-trace", "serialized-throwable"}  # type: ignore[index]


def test_an_operation_belongs_to_its_job_and_kind(send: Send, gateway: FakeGateway) -> None:
    gateway.add_job("1" * 32)
    send("POST", f"/jobs/{JOB}/checkpoints", json={"triggerId": TRIGGER})
    assert send("GET", f"/jobs/{'1' * 32}/checkpoints/{TRIGGER}").status_code == 404
    assert send("GET", f"/jobs/{JOB}/savepoints/{TRIGGER}").status_code == 404
    assert send("GET", f"/savepoint-disposal/{TRIGGER}").status_code == 404


def test_disposal(send: Send, gateway: FakeGateway) -> None:
    body = {"savepoint-path": "file:/s/savepoint-1", "triggerId": TRIGGER}
    assert send("POST", "/savepoint-disposal", json=body).status_code == 200
    answers = [send("GET", f"/savepoint-disposal/{TRIGGER}").json() for _ in range(2)]
    assert answers == [
        {"status": {"id": "IN_PROGRESS"}, "operation": None},
        {"status": {"id": "COMPLETED"}, "operation": {}},
    ]
    assert gateway.disposed == ["file:/s/savepoint-1"]


def test_cancel(send: Send, gateway: FakeGateway) -> None:
    assert send("PATCH", f"/jobs/{JOB}?mode=cancel", content=b"{}").status_code == 202
    assert gateway.jobs[JOB].status is JobStatus.CANCELED
    assert send("GET", f"/jobs/{JOB}/execution-result").json()["job-execution-result"]["application-status"] == (
        "CANCELED"
    )
