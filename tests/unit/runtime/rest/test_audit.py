"""The audit log: every change, who asked for it, what was there before and after it, and no secret."""

from __future__ import annotations

import asyncio
import inspect
import json
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.errors import ConfigurationError
from ckpt_runtime.jobmaster.gateway import DispatcherGateway
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.rest.audit import CHANGES, AuditedGateway, audit_log
from tests.unit.runtime.rest.conftest import JOB
from tests.unit.runtime.rest.fake_gateway import FakeGateway

READS = {
    *("cluster_overview", "slot_agents", "dashboard_config", "cluster_configuration", "event_log", "list_pipelines"),
    *("plan_pipeline", "list_jobs", "job_status", "job_details", "job_config", "job_metrics", "vertex_metrics"),
    *("vertex_backpressure", "exception_history", "execution_result", "checkpoint_statistics", "checkpoint_config"),
    *(
        "resource_requirements",
        "default_savepoint_directory",
        "operation_status",
        "list_savepoints",
        "known_savepoints",
        "thread_dump",
        "sampled_stacks",
        "recent_log",
        "latest_savepoint",
        "retired_job_ids",
    ),
}


def audited(gateway: FakeGateway, file: Path, *requests: tuple[str, str, Any]) -> list[dict[str, Any]]:
    """The records that these requests leave."""
    configuration = Configuration({"rest.audit.destination": "FILE", "rest.audit.file": str(file)})
    app = create_app(AuditedGateway.over(gateway, audit_log(configuration)), token="open sesame")
    headers = {"authorization": "Bearer open sesame", "user-agent": "somebody"}

    async def send() -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
            for method, path, body in requests:
                await client.request(method, path, json=body)

    asyncio.run(send())
    assert "sesame" not in file.read_text()
    begins, *records = map(json.loads, file.read_text().splitlines())
    assert begins["outcome"] == "the session begins"
    return records


def test_every_method_of_the_gateway_is_known() -> None:
    methods = {name for name, _ in inspect.getmembers(DispatcherGateway, inspect.isfunction) if name[0] != "_"}
    assert methods == READS | CHANGES.keys()


def test_a_change_is_recorded_with_what_was_there_before_and_after(gateway: FakeGateway, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    gateway.allow_list = ("*",)
    interval = {"configuration": {"execution.checkpointing.interval": "7 s", "my.password": "hunter2"}}
    asked, done, patched, over = audited(
        gateway,
        file,
        ("GET", f"/jobs/{JOB}", None),
        ("PATCH", f"/jobs/{JOB}/config?dry-run=true", interval),
        ("PATCH", f"/v1/jobs/{JOB}/config", interval),
        ("PATCH", f"/jobs/{JOB}/checkpoints/configuration", {"checkpointTimeout": 900_000}),
    )
    assert asked["outcome"] == "asked"
    assert (done["id"], done["change"], done["outcome"]) == (asked["id"], "change_job_config", "done")
    assert done["by"] == {
        "address": "127.0.0.1",
        "agent": "somebody",
        "token": True,
        "request": f"PATCH /v1/jobs/{JOB}/config",
    }
    assert (done["before"]["version"], done["after"]["version"]) == (1, 2)
    assert done["after"]["configuration"]["execution.checkpointing.interval"] == "7 s"
    assert "hunter2" not in file.read_text()
    assert patched["before"]["settings"]["timeout_ms"] != over["after"]["settings"]["timeout_ms"] == 900_000
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_what_is_refused_is_recorded_too(gateway: FakeGateway, tmp_path: Path) -> None:
    unknown = "0" * 32
    records = audited(gateway, tmp_path / "audit.jsonl", ("PATCH", f"/jobs/{unknown}?mode=cancel", None))
    assert [record["outcome"] for record in records] == ["asked", "refused"]
    assert unknown in records[1]["error"]
    assert "unknown" in records[1]["before"]


def test_credentials_in_paths_are_masked(gateway: FakeGateway, tmp_path: Path) -> None:
    body = {"savepoint-path": "s3://me:hunter2@bucket/savepoint-1"}
    audited(gateway, tmp_path / "audit.jsonl", ("POST", "/savepoint-disposal", body))
    text = (tmp_path / "audit.jsonl").read_text()
    assert "hunter2" not in text
    assert "s3://***@bucket/savepoint-1" in text


@pytest.mark.parametrize("file", [None, "relative.jsonl", "/proc/nowhere/audit.jsonl"])
def test_a_file_that_cannot_be_one_is_refused(gateway: FakeGateway, file: str | None) -> None:
    given = {"rest.audit.destination": "FILE"} | ({} if file is None else {"rest.audit.file": file})
    with pytest.raises(ConfigurationError, match=r"^rest\.audit\.file: "):
        audit_log(Configuration(given))
    assert AuditedGateway.over(gateway, audit_log(Configuration({}))) is gateway


def test_the_logger_takes_records_too(caplog: pytest.LogCaptureFixture) -> None:
    write = audit_log(Configuration({"rest.audit.destination": "LOG"}))
    assert write is not None
    with caplog.at_level("INFO", "ckpt_runtime.audit"):
        write({"outcome": "asked"})
    assert caplog.messages == ['{"outcome": "asked"}']
