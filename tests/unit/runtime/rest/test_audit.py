"""The audit log: one record per changing request, with its caller and its answer, and without secrets."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import ConfigurationError
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.audit import audit_log
from tests.unit.runtime.rest.conftest import JOB
from tests.unit.runtime.rest.fake_gateway import FakeGateway


def audited(gateway: FakeGateway, file: Path, *requests: tuple[str, str, Any]) -> list[dict[str, Any]]:
    """The records that these requests leave."""
    configuration = Configuration({"rest.audit.destination": "FILE", "rest.audit.file": str(file)})
    app = create_app(gateway, token="open sesame", audit=audit_log(configuration))
    headers = {"authorization": "Bearer open sesame", "user-agent": "a script"}

    async def send() -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            for method, path, body in requests:
                await client.request(method, path, json=body)
            await client.patch(f"/jobs/{JOB}?mode=cancel", headers={"authorization": "Bearer wrong"})

    asyncio.run(send())
    assert "sesame" not in file.read_text()
    begins, *records = map(json.loads, file.read_text().splitlines())
    assert begins["request"] == "the session begins"
    return records


def test_changes_are_recorded_with_caller_request_and_answer_and_reads_are_not(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    file = tmp_path / "audit.jsonl"
    gateway.allow_list = ("*",)
    interval = {"configuration": {"execution.checkpointing.interval": "7 s", "my.password": "hunter2"}}
    run = {"programArgsList": ["--key", "hunter2"], "jobId": "1" * 32}
    changed, unknown, started = audited(
        gateway,
        file,
        ("GET", f"/jobs/{JOB}", None),
        ("PATCH", f"/jobs/{JOB}/config?dry-run=true", interval),
        ("POST", "/jars/none/plan", {}),
        ("POST", "/web/login", {"token": "open sesame"}),
        ("PATCH", f"/v1/jobs/{JOB}/config", interval),
        ("PATCH", f"/jobs/{'0' * 32}?mode=cancel", None),
        ("POST", "/jars/none/run", run),
    )
    assert changed["by"] == {"address": "127.0.0.1", "agent": "a script", "requester": "", "token": True}
    assert (changed["request"], changed["status"]) == (f"PATCH /v1/jobs/{JOB}/config", 200)
    options = changed["body"]["configuration"]
    assert options == {"execution.checkpointing.interval": "7 s", "my.password": "******"}
    assert changed["answer"]["changes"]["execution.checkpointing.interval"]["after"] == "7 s"
    assert (unknown["request"], unknown["status"]) == (f"PATCH /jobs/{'0' * 32}?mode=cancel", 404)
    assert "0" * 32 in unknown["answer"]["errors"][0]
    assert (started["body"], started["status"]) == ({"jobId": "1" * 32}, 404)
    assert "hunter2" not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_an_unexpected_error_is_recorded_with_status_500(gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.unexpected = RuntimeError("a defect")
    body: dict[str, Any] = {"configuration": {}}
    (record,) = audited(gateway, tmp_path / "audit.jsonl", ("PATCH", f"/jobs/{JOB}/config", body))
    assert (record["status"], record["answer"]) == (500, None)


def test_credentials_in_paths_are_masked(gateway: FakeGateway, tmp_path: Path) -> None:
    body = {"savepoint-path": "s3://me:hunter2@bucket/savepoint-1"}
    audited(gateway, tmp_path / "audit.jsonl", ("POST", "/savepoint-disposal", body))
    text = (tmp_path / "audit.jsonl").read_text()
    assert "hunter2" not in text
    assert "@bucket/savepoint-1" in text


@pytest.mark.parametrize("file", [None, "relative.jsonl", "/proc/nowhere/audit.jsonl"])
def test_a_file_that_cannot_be_written_is_refused(file: str | None) -> None:
    given = {"rest.audit.destination": "FILE"} | ({} if file is None else {"rest.audit.file": file})
    with pytest.raises(ConfigurationError, match=r"^rest\.audit\.file: "):
        audit_log(Configuration(given))
    assert audit_log(Configuration({})) is None


def test_destination_log_writes_records_to_the_logger(caplog: pytest.LogCaptureFixture) -> None:
    write = audit_log(Configuration({"rest.audit.destination": "LOG"}))
    assert write is not None
    with caplog.at_level("INFO", "ckpt_runtime.audit"):
        write({"status": 200})
    assert caplog.messages == ['{"status": 200}']
