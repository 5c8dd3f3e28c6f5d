"""What the client and the command line make of the answers that a real Flink gave (recorded in tests/data)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_runtime.cli.framework import Cli, ExitCode, Settings, code_of
from ckpt_runtime.cli.output import CommandOutput
from ckpt_runtime.cli.snapshot_commands import StartedOperation
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptApiError, Conflict, NotFound, NotServed, UnexpectedAnswer
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.jobs import IoMetrics, root_cause_line
from ckpt_runtime.contract.spelling import read

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
