"""Both clients against a served application: every call, typed answers, errors, waiting."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.client.errors import (
    BadRequest,
    Conflict,
    JobEnded,
    NotFound,
    OperationFailed,
    Unauthorized,
    UnexpectedAnswer,
    Unreachable,
    WaitTimeout,
)
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.configuration.checkpointing_options import PATCHABLE
from ckpt_runtime.contract.configuration import CheckpointConfig, CheckpointConfigPatch
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.runtime.rest.fake_gateway import VERTICES, FakeGateway

JOB = "fa461ac280c9aa36bde4a060aa97618c"
BUILDERS = {
    name: function
    for name, function in inspect.getmembers(requests, inspect.isfunction)
    if not name.startswith("_") and "Call[" in str(inspect.signature(function).return_annotation)
}


class Both:
    """Calls the method of one of the clients, by the same name and arguments."""

    def __init__(self, url: str, blocking: bool) -> None:
        self.url = url
        self.blocking = blocking

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.blocking:
                with CkptClient(self.url) as client:
                    return getattr(client, name)(*arguments, **named)

            async def run() -> Any:
                async with AsyncCkptClient(self.url) as client:
                    return await getattr(client, name)(*arguments, **named)

            return asyncio.run(run())

        return call


@pytest.fixture(params=[True, False], ids=["blocking", "asynchronous"])
def client(request: pytest.FixtureRequest, url: str, gateway: FakeGateway) -> Both:
    gateway.add_job(JOB)
    return Both(url, request.param)


def test_both_clients_have_every_call_with_its_signature() -> None:
    assert len(BUILDERS) >= 40
    for name, build in BUILDERS.items():
        for kind in (CkptClient, AsyncCkptClient):
            method = getattr(kind, name)
            assert inspect.signature(method) == inspect.signature(build)
            assert method.__doc__


def test_both_clients_read_every_answer(client: Both, gateway: FakeGateway) -> None:
    job = gateway.jobs[JOB]
    _, path = gateway.complete_checkpoint(job)
    pending = gateway.start_checkpoint(job)
    assert client.cluster_overview().slots_total == 8
    assert client.dashboard_config()["flink-version"] == "2.3.0"
    assert client.cluster_configuration() == {"rest.port": "0"}
    (line,) = client.list_jobs()
    assert (line.job_id, line.state, line.tasks["running"]) == (JOB, "RUNNING", 6)
    details = client.job_details(JOB)
    assert [vertex.id for vertex in details.vertices] == list(VERTICES)
    assert details.vertices[0].io.read_records == 2 * 15_371
    assert client.job_status(JOB) == "RUNNING"
    assert len(client.job_plan(JOB)["nodes"]) == 3
    assert client.job_config(JOB).version == 1
    assert client.job_config(JOB).changes == ()
    assert client.job_metrics(JOB, ("uptime", "nosuch")) == {"uptime": "18652"}
    assert client.vertex_metrics(JOB, VERTICES[1], ("0.numRecordsIn",)) == {"0.numRecordsIn": "16012"}
    assert len(client.vertex_details(JOB, VERTICES[1]).subtasks) == 2
    assert client.vertex_backpressure(JOB, VERTICES[1]).level == "high"
    statistics = client.checkpoint_statistics(JOB)
    assert statistics.latest_completed is not None
    assert statistics.latest_completed.external_path == path
    assert [item.status for item in statistics.history] == ["IN_PROGRESS", "COMPLETED"]
    assert statistics.history[0].deadline_ms == gateway.now + 600_000
    assert len(client.checkpoint_details(JOB, pending).tasks) == 3
    assert len(client.checkpoint_subtasks(JOB, 1, VERTICES[0])["subtasks"]) == 2
    assert client.job_exceptions(JOB).entries == ()
    assert client.execution_result(JOB).status is None


def test_a_pipeline_from_upload_to_end(client: Both, gateway: FakeGateway, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("x = 1")
    pipeline = client.upload_pipeline(*pack_pipeline(tmp_path / "job.py"))
    assert [item.id for item in client.list_pipelines()] == [pipeline]
    options = RunOptions("job:main", ("a",), 3, {"k": "v"}, "s3://b/s", True, "CLAIM")
    job = client.run_pipeline(pipeline, options, job_id="ab" * 16)
    assert job == "ab" * 16
    assert gateway.jobs[job].request.configuration == {"k": "v"}
    assert client.run_pipeline(pipeline) in gateway.jobs
    client.cancel_job(job)
    assert client.wait_for_state(job, {"CANCELED"}, timeout_s=180) == "CANCELED"
    assert client.execution_result(job).status == "CANCELED"
    client.delete_pipeline(pipeline)
    client.shutdown_cluster()
    assert gateway.shut_down


@pytest.mark.row("571.1")
def test_checkpoint_configuration_is_patched_read_and_reset(client: Both) -> None:
    patch = CheckpointConfigPatch(interval_ms=5000, unaligned=True)
    assert client.patch_checkpoint_config(JOB, patch).interval_ms == 5000
    config = client.checkpoint_config(JOB)
    assert config.overrides == ("checkpointInterval", "unalignedEnabled")
    assert client.reset_checkpoint_config(JOB).overrides == ()


@pytest.mark.row("203.14")
def test_rescale_waits_for_the_new_parallelism_and_reports_a_refusal(client: Both, gateway: FakeGateway) -> None:
    present = client.resource_requirements(JOB)
    assert set(present.values()) == {2}
    client.rescale(JOB, {**present, VERTICES[1]: (1, 4)}, timeout_s=180)
    assert client.resource_requirements(JOB) == {**present, VERTICES[1]: 4}
    gateway.rescale_failure = "The job keeps its parallelism: no slots"
    with pytest.raises(Conflict, match="no slots"):
        client.rescale(JOB, present)


def test_settings_are_those_of_the_engine() -> None:
    patched = {field.name: field.encode_name for field in msgspec.structs.fields(CheckpointConfigPatch)}
    assert list(patched.values()) == list(PATCHABLE)
    shown = {field.name for field in msgspec.structs.fields(CheckpointConfig)}
    # The interval is a property, because the wire has a number for "off".
    assert patched.keys() - shown == {"interval_ms"}
    patch = CheckpointConfigPatch(**dict.fromkeys(patched, 1))  # type: ignore[arg-type]
    assert patch.to_json() == dict.fromkeys(PATCHABLE, 1)


def test_operations_are_triggered_polled_and_waited_for(client: Both, gateway: FakeGateway) -> None:
    trigger = client.trigger_checkpoint(JOB, full=True)
    assert not client.operation_status("checkpoint", trigger, JOB).done
    assert client.wait_for_operation("checkpoint", trigger, JOB, timeout_s=180).checkpoint_id == 1
    trigger = client.trigger_savepoint(JOB, "/s", savepoint_format="CANONICAL", trigger_id="ab" * 16)
    assert trigger == "ab" * 16
    location = client.wait_for_operation("savepoint", trigger, JOB, timeout_s=180).location
    trigger = client.dispose_savepoint(location)
    assert client.wait_for_operation("savepoint-disposal", trigger, timeout_s=180).done
    trigger = client.dispose_savepoint(location)
    with pytest.raises(OperationFailed, match="gone"):
        client.wait_for_operation("savepoint-disposal", trigger, timeout_s=180)
    trigger = client.stop_with_savepoint(JOB, "/s", drain=True)
    client.wait_for_operation("savepoint", trigger, JOB, timeout_s=180)
    assert client.wait_for_state(JOB, {"FINISHED"}, timeout_s=180) == "FINISHED"


def test_each_status_has_its_error(client: Both, gateway: FakeGateway) -> None:
    with pytest.raises(NotFound, match="not found") as error:
        client.job_details("0" * 32)
    assert error.value.status == 404
    with pytest.raises(BadRequest, match="savepoint-dir"):
        client.trigger_savepoint(JOB)
    with pytest.raises(BadRequest):
        client.job_status("not-hex")
    gateway.move(JOB, JobStatus.FINISHED)
    with pytest.raises(Conflict, match="FINISHED"):
        client.cancel_job(JOB)
    with pytest.raises(JobEnded, match="FINISHED"):
        client.wait_for_state(JOB, {"RUNNING"}, timeout_s=180)


def test_result_of_a_failed_job_has_its_failure(client: Both, gateway: FakeGateway) -> None:
    cause = FailureCause("ckpt.TaskFailed", "boom", "ckpt.TaskFailed: task\nCaused by: ValueError: boom")
    gateway.jobs[JOB].exceptions = [ExceptionEntry(cause, gateway.now, "count (1/2)", "h:1", "a")]
    gateway.move(JOB, JobStatus.FAILED)
    failure = client.execution_result(JOB).failure
    assert (failure.exception, failure.message) == ("ckpt.TaskFailed", "boom")
    assert client.job_exceptions(JOB).entries[0].task_name == "count (1/2)"


def test_a_wait_has_a_deadline(client: Both) -> None:
    with pytest.raises(WaitTimeout, match=r"CANCELED did not happen within 0.05 s"):
        client.wait_for_state(JOB, {"CANCELED"}, timeout_s=0.05, poll_interval_s=0.01)


def test_unreachable_server_is_reported(unused_port: int) -> None:
    with (
        CkptClient(f"127.0.0.1:{unused_port}", retry_timeout_s=0.1) as client,
        pytest.raises(Unreachable, match="127.0.0.1"),
    ):
        client.list_jobs()


@pytest.fixture
def unused_port() -> Iterator[int]:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_answer_of_another_server_is_unexpected() -> None:
    import httpx

    for status, content in [(200, b"<html>"), (200, b"[]"), (200, b"{}"), (200, b"null")]:
        transport = httpx.MockTransport(lambda _, s=status, c=content: httpx.Response(s, content=c))
        with CkptClient("x:1", transport=transport) as client, pytest.raises(UnexpectedAnswer):
            client.list_jobs()
    transport = httpx.MockTransport(lambda _: httpx.Response(403, content=b"proxy says no"))
    with CkptClient("x:1", transport=transport) as client, pytest.raises(Unauthorized, match="proxy says no"):
        client.list_jobs()
