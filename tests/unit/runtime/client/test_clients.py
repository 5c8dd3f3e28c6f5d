"""Both clients against a served application and answers of a real Flink: every call, typed answers, errors, waiting."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from ckpt_runtime.cli.framework import Cli, ExitCode, Settings, code_of
from ckpt_runtime.cli.output import CommandOutput
from ckpt_runtime.cli.snapshot_commands import StartedOperation
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.client.errors import (
    BadRequest,
    CkptApiError,
    Conflict,
    JobEnded,
    NotFound,
    NotServed,
    OperationFailed,
    Unauthorized,
    UnexpectedAnswer,
    Unreachable,
    WaitTimeout,
)
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.configuration.checkpointing_options import PATCHABLE
from ckpt_runtime.contract.configuration import CheckpointConfig, CheckpointConfigPatch
from ckpt_runtime.contract.jobs import IoMetrics, RunOptions, root_cause_line
from ckpt_runtime.contract.spelling import read
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


def test_passed_deadlines_and_unreachable_servers_are_named(client: Both, unused_port: int) -> None:
    with pytest.raises(WaitTimeout, match=r"CANCELED did not happen within 0.05 s"):
        client.wait_for_state(JOB, {"CANCELED"}, timeout_s=0.05, poll_interval_s=0.01)
    with (
        CkptClient(f"127.0.0.1:{unused_port}", retry_timeout_s=0.1) as unreachable,
        pytest.raises(Unreachable, match="127.0.0.1"),
    ):
        unreachable.list_jobs()


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


DATA = Path(__file__).parents[3] / "data"
EXCHANGES = json.loads((DATA / "flink_errors.json").read_text())
CONTRACT = json.loads((DATA / "flink_rest_contract.json").read_text())
HEX = "[0-9a-fA-F]{32}"
UNKNOWN = "0" * 32
TRIGGER = "ab" * 16


def recorded(name: str) -> dict[str, Any]:
    return next(exchange for exchange in EXCHANGES if exchange["name"] == name)


def answering(answer: Callable[[httpx.Request], dict[str, Any]]) -> CkptClient:
    def respond(request: httpx.Request) -> httpx.Response:
        exchange = answer(request)
        return httpx.Response(exchange["status"], json=exchange["response_body"])

    return CkptClient("http://flink:8081", transport=httpx.MockTransport(respond))


def asking(call: requests.Call[Any], name: str) -> Any:
    with answering(lambda _: recorded(name)) as client:
        return client.execute(call)


def test_an_unknown_job_is_not_found_although_flink_calls_that_an_internal_error() -> None:
    with pytest.raises(NotFound) as error:
        asking(requests.job_status(UNKNOWN), "unknown job: GET /status")
    assert str(error.value) == f"FlinkJobNotFoundException: Could not find Flink job ({UNKNOWN})"


@pytest.mark.parametrize("exchange", [e for e in EXCHANGES if e["status"] >= 400], ids=lambda e: e["name"])
def test_the_message_of_an_error_is_a_line_and_no_trace(exchange: dict[str, Any]) -> None:
    with answering(lambda _: exchange) as client, pytest.raises(CkptApiError) as error:
        client.execute(requests.job_details(UNKNOWN))
    message = str(error.value)
    assert message
    assert "\n" not in message
    assert "\tat " not in message
    assert "Exception on server side" not in message
    assert len(message) < 1200


@pytest.mark.parametrize("reset", [False, True])
def test_server_without_patches_of_running_jobs_is_reported(reset: bool) -> None:
    exchange = recorded("FLIP-571 PATCH checkpoints/configuration (not present?)")
    job_id = exchange["path"].split("/")[2]
    patch = CheckpointConfigPatch(interval_ms=1000)
    call = requests.reset_checkpoint_config(job_id) if reset else requests.patch_checkpoint_config(job_id, patch)
    with answering(lambda _: exchange) as client, pytest.raises(NotServed, match="it lacks FLIP-571") as error:
        client.execute(call)
    assert code_of(error.value) is ExitCode.SERVER_ERROR


@pytest.mark.parametrize(
    ("trace", "line"),
    [
        ("", ""),
        ("ValueError: no\nTraceback (most recent call last):\n  File ...\nValueError: no", "ValueError: no"),
        ("<Exception on server side:\njava.lang.Error: a\n\tat b\nEnd of exception on server side>", "Error: a"),
        ("java.lang.A: b\nCaused by: org.x.C: d\n\tat e\nCaused by: org.y.F$G: h: i\n\t... 3 more", "F$G: h: i"),
        ("org.example is away", "org.example is away"),
        ("java.util.concurrent.CompletionException: org.x.C: d\n\tat e", "C: d"),
    ],
)
def test_trace_is_reduced_to_its_root_cause(trace: str, line: str) -> None:
    assert root_cause_line(trace) == line


def calls_by_path() -> list[tuple[str, str, requests.Call[Any]]]:
    """Method and path of a recorded request, and the call that reads such an answer."""
    job, id_ = f"/jobs/{HEX}", UNKNOWN
    return [
        ("GET", "/overview", requests.cluster_overview()),
        ("GET", "/config", requests.dashboard_config()),
        ("POST", "/jars/upload", requests.upload_pipeline("a.py", b"")),
        ("POST", "/jars/[^/]+/run", requests.run_pipeline("p")),
        ("GET", "/jobs/overview", requests.list_jobs()),
        ("GET", job, requests.job_details(id_)),
        ("GET", f"{job}/status", requests.job_status(id_)),
        ("GET", f"{job}/plan", requests.job_plan(id_)),
        ("GET", f"{job}/config", requests.job_config(id_)),
        ("GET", rf"{job}/metrics\?get=.*", requests.job_metrics(id_, ())),
        ("GET", rf"{job}/exceptions(\?.*)?", requests.job_exceptions(id_)),
        ("GET", f"{job}/execution-result", requests.execution_result(id_)),
        ("PATCH", rf"{job}\?mode=cancel", requests.cancel_job(id_)),
        ("GET", f"{job}/vertices/{HEX}", requests.vertex_details(id_, id_)),
        ("GET", f"{job}/vertices/{HEX}/backpressure", requests.vertex_backpressure(id_, id_)),
        ("GET", rf"{job}/vertices/{HEX}/metrics\?get=.*", requests.vertex_metrics(id_, id_, ())),
        ("GET", f"{job}/checkpoints", requests.checkpoint_statistics(id_)),
        ("GET", rf"{job}/checkpoints/details/\d+", requests.checkpoint_details(id_, 1)),
        ("GET", rf"{job}/checkpoints/details/\d+/subtasks/{HEX}", requests.checkpoint_subtasks(id_, 1, id_)),
        ("GET", f"{job}/checkpoints/config", requests.checkpoint_config(id_)),
        ("POST", f"{job}/(checkpoints|savepoints|stop)", requests.trigger_checkpoint(id_)),
        ("GET", f"{job}/(checkpoints|savepoints)/{HEX}", requests.operation_status("savepoint", id_, id_)),
        ("POST", "/savepoint-disposal", requests.dispose_savepoint("s")),
        ("GET", f"/savepoint-disposal/{HEX}", requests.operation_status("savepoint-disposal", id_)),
    ]


READ = [
    (f"{number} {exchange['name']}", path, call, exchange["response_body"])
    for number, exchange in enumerate(CONTRACT)
    for method, path, call in calls_by_path()
    if exchange["status"] < 300 and exchange["method"] == method and re.fullmatch(path, exchange["path"])
]


def as_sent(document: Any) -> Any:
    """Without the notes on what was left out of long lists in the recording."""
    if isinstance(document, dict):
        return {name: as_sent(value) for name, value in document.items()}
    if not isinstance(document, list):
        return document
    noted = document and isinstance(document[0], dict)
    return [as_sent(item) for item in document if not (noted and isinstance(item, str))]


@pytest.mark.parametrize(("call", "document"), [row[2:] for row in READ], ids=[row[0] for row in READ])
def test_every_recorded_answer_is_read(call: requests.Call[Any], document: Any) -> None:
    call.parse(as_sent(document))


def test_paths_of_these_calls_have_a_recorded_answer() -> None:
    assert {path for _, path, _, _ in READ} == {path for _, path, _ in calls_by_path()}


def test_numbers_that_flink_sends_as_text() -> None:
    io = read({"accumulated-busy-time": "NaN", "read-bytes": 1}, IoMetrics)
    assert math.isnan(io.busy_ms)
    assert io.read_bytes == 1


OVERVIEW = next(exchange for exchange in CONTRACT if exchange["name"] == "cluster overview")["response_body"]


def over(document: dict[str, Any]) -> CkptClient:
    return answering(lambda _: {"status": 200, "response_body": document})


def test_fields_of_a_newer_server_are_ignored() -> None:
    with over({**OVERVIEW, "jobs-suspended": [1]}) as client:
        assert client.cluster_overview().slots_total == 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"slots-total": "eight"}, r"`int`, got `str` - at `\$.slots-total`"),
        ({"flink-version": 2}, r"`str`, got `int` - at `\$.flink-version`"),
        ({"jobs-failed": None}, r"`int`, got `null` - at `\$.jobs-failed`"),
    ],
)
def test_a_value_of_a_wrong_type_is_named(change: dict[str, Any], named: str) -> None:
    with over({**OVERVIEW, **change}) as client, pytest.raises(UnexpectedAnswer, match=named):
        client.cluster_overview()


class TestOperationsOfJobsThatDoNotRun:
    """Flink takes them (202) and lets them fail; the exit code is as of a session, which answers 404 or 409 at once."""

    def wait(self, details: dict[str, Any]) -> None:
        failed = recorded("op: unknown job")

        def answer(request: httpx.Request) -> dict[str, Any]:
            return failed if "/savepoints/" in request.url.path else details

        cli = Cli(Settings(url="http://flink:8081"), CommandOutput(as_json=True))
        cli._client = answering(answer)
        try:
            StartedOperation(cli, "savepoint", TRIGGER, UNKNOWN).wait("taking a savepoint", False, 30.0)
        finally:
            cli.close()

    def test_an_unknown_one(self) -> None:
        with pytest.raises(NotFound) as error:
            self.wait(recorded("unknown job: GET /jobs/:id"))
        assert code_of(error.value) is ExitCode.NOT_FOUND

    def test_operation_of_a_job_that_has_ended_is_refused(self) -> None:
        with pytest.raises(Conflict, match="is FINISHED") as error:
            self.wait(recorded("a finished job"))
        assert code_of(error.value) is ExitCode.CONFLICT
