"""PATCH, GET and DELETE of the checkpoint configuration (FLIP-571)."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.configuration.checkpointing_options import PATCHABLE, CheckpointSetting
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.runtime.rest.conftest import JOB, Send
from tests.unit.runtime.rest.fake_gateway import FakeGateway

PATH = f"/jobs/{JOB}/checkpoints/configuration"
MALFORMED_BODIES = [
    b"", b"  ", b"{}", b"null", b"[]", b"1", b'"x"', b"{", b"{'checkpointInterval': 10}", b'{"checkpointInterval": }',
    b'{"checkpointInterval": 10} x', b'{"checkpointInterval": NaN}', b'{"checkpointInterval": Infinity}',
    b'{"checkpointInterval": -Infinity}', b'{"checkpointInterval": 1e400}', b'{"checkpointInterval": 1e3}',
    b'{"checkpointInterval": -1, "checkpointInterval": 10}', b'{"checkpointInterval": 10, "checkpointInterval": 10}',
    b'{"checkpointInterval": "\\ud800"}', b'{"\\udfff": 1}', b'{"checkpointInterval": "\xff"}', b"\xff\xfe",
    b"\xef\xbb\xbf{}", b"[" * 3000 + b"]" * 3000, b'{"a":' * 3000 + b"1" + b"}" * 3000, b"9" * 10_000,
    b'{"checkpointInterval": ' + b"9" * 5000 + b"}", b'{"checkpointInterval": 010}', b'{"checkpointInterval": +10}',
]  # fmt: skip
BAD_VALUES: list[Any] = [
    0, -1, -(2**63), 2**63, 10**30, 1.0, 1.5, True, False, None, "", "1000", "10 s", "10s", "1e3", [], [1], {},
    {"ms": 1}, "\x00",
]  # fmt: skip


@pytest.mark.row("571.1")
@pytest.mark.row("571.2")
def test_only_given_fields_change_and_get_shows_them(send: Send, gateway: FakeGateway) -> None:
    before = send("GET", f"/jobs/{JOB}/checkpoints/config").json()
    answer = send("PATCH", PATH, json={"checkpointTimeout": 900_000})
    assert answer.status_code == 200
    after = send("GET", f"/jobs/{JOB}/checkpoints/config").json()
    assert after == answer.json()
    assert after == {**before, "timeout": 900_000, "overrides": ["checkpointTimeout"]}
    assert gateway.jobs[JOB].overrides == CheckpointOverrides(timeout_ms=900_000)


@pytest.mark.row("571.8")
def test_every_field(send: Send, gateway: FakeGateway) -> None:
    body = {
        "checkpointInterval": 10, "checkpointTimeout": 20, "minPauseBetweenCheckpoints": 0,
        "maxConcurrentCheckpoints": 3, "tolerableCheckpointFailureNumber": 0, "alignedCheckpointTimeout": 0,
        "unalignedEnabled": True, "maxInflightDataBytes": 2**40,
    }  # fmt: skip
    assert send("PATCH", f"/v1{PATH}", json=body).status_code == 200
    assert gateway.jobs[JOB].overrides == CheckpointOverrides(
        interval_ms=10, timeout_ms=20, min_pause_ms=0, max_concurrent=3, tolerable_failed_checkpoints=0,
        aligned_timeout_ms=0, unaligned_enabled=True, max_inflight_data_bytes=2**40,
    )  # fmt: skip
    reset = send("DELETE", PATH)
    assert reset.status_code == 200
    assert reset.json()["overrides"] == []
    assert reset.json()["interval"] == 2000


@pytest.mark.row("571.1")
@pytest.mark.parametrize("body", MALFORMED_BODIES, ids=lambda body: repr(body[:40]))
def test_malformed_bodies_are_refused_and_change_nothing(send: Send, gateway: FakeGateway, body: bytes) -> None:
    response = send("PATCH", PATH, content=body)
    assert_refused(response, gateway)


@pytest.mark.row("571.1")
@pytest.mark.parametrize("name", ["checkpointInterval", "checkpointTimeout", "maxConcurrentCheckpoints"])
@pytest.mark.parametrize("value", BAD_VALUES, ids=repr)
def test_bad_values_are_refused_by_name(send: Send, gateway: FakeGateway, name: str, value: Any) -> None:
    response = send("PATCH", PATH, json={name: value})
    assert_refused(response, gateway)
    assert response.json()["errors"][0].startswith(f"{name}: ")


@pytest.mark.row("571.8")
@pytest.mark.parametrize("value", [0, 1, "true", None, 1.0, []], ids=repr)
def test_flags_are_booleans_only(send: Send, gateway: FakeGateway, value: Any) -> None:
    assert_refused(send("PATCH", PATH, json={"unalignedEnabled": value}), gateway)


@pytest.mark.row("571.8")
@pytest.mark.parametrize("name", ["alignedCheckpointTimeout", "maxInflightDataBytes"])
@pytest.mark.parametrize("value", [value for value in BAD_VALUES if value != 0 or value is False], ids=repr)
def test_bad_bounds_of_unaligned_checkpoints_are_refused_by_name(
    send: Send, gateway: FakeGateway, name: str, value: Any
) -> None:
    response = send("PATCH", PATH, json={"unalignedEnabled": True, name: value})
    assert_refused(response, gateway)
    assert response.json()["errors"][0].startswith(f"{name}: ")


@pytest.mark.parametrize("setting", PATCHABLE.values(), ids=PATCHABLE)
def test_the_limits_are_those_of_the_table(send: Send, gateway: FakeGateway, setting: CheckpointSetting) -> None:
    for value in setting.patch_range or (False, True):
        assert send("PATCH", PATH, json={setting.patched_as: value}).status_code == 200
        assert gateway.jobs[JOB].overrides.given == {setting.field: value}
    assert send("DELETE", PATH).status_code == 200
    for least, most in [setting.patch_range] if setting.patch_range else []:
        for value in (least - 1, most + 1):
            response = send("PATCH", PATH, json={setting.patched_as: value})
            assert_refused(response, gateway)
            said = f"{setting.patched_as}: {value} is not acceptable, it must be an integer from {least} to {most}"
            assert response.json()["errors"] == [said]


@pytest.mark.row("571.1")
def test_one_bad_field_refuses_the_whole_patch(send: Send, gateway: FakeGateway) -> None:
    body = {"checkpointInterval": 50, "checkpointTimeout": -1, "checkpoint-interval": 50, "x" * 5000: 1}
    response = send("PATCH", PATH, json=body)
    assert_refused(response, gateway)
    assert len(response.json()["errors"]) == 3
    assert len(response.text) < 3000


@pytest.mark.row("571.1")
def test_unknown_job_update_in_progress_and_ended_job(send: Send, gateway: FakeGateway) -> None:
    body = {"checkpointInterval": 50}
    assert send("PATCH", PATH.replace(JOB, "0" * 32), json=body).status_code == 404
    gateway.jobs[JOB].update_in_progress = True
    assert send("PATCH", PATH, json=body).status_code == 409
    assert send("DELETE", PATH).status_code == 409
    gateway.jobs[JOB].update_in_progress = False
    gateway.move(JOB, JobStatus.FINISHED)
    assert send("PATCH", PATH, json=body).status_code == 409
    assert send("GET", PATH).json()["interval"] == 2000


def assert_refused(response: Any, gateway: FakeGateway) -> None:
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["errors"]
    assert gateway.jobs[JOB].overrides == CheckpointOverrides()
