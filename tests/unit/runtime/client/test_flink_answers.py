"""What the client and the command line make of the answers that a real Flink gave (recorded in tests/data)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from ckpt_runtime.cli.exit_codes import ExitCode, code_of
from ckpt_runtime.cli.framework import Cli, Settings
from ckpt_runtime.cli.output import Output
from ckpt_runtime.cli.waiting import wait_for_operation
from ckpt_runtime.client import CkptApiError, CkptClient, Conflict, NotFound, NotServed, requests
from ckpt_runtime.client.checkpoint_models import CheckpointConfigPatch
from ckpt_runtime.client.stack_traces import telling_line

EXCHANGES = json.loads((Path(__file__).parents[3] / "data" / "flink_errors.json").read_text())
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
def test_a_server_without_the_patch_of_a_running_job_is_told(reset: bool) -> None:
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
def test_what_a_trace_comes_down_to(trace: str, line: str) -> None:
    assert telling_line(trace) == line


class TestOperationsOfJobsThatDoNotRun:
    """Flink takes them (202) and lets them fail; the exit code is as of a session, which answers 404 or 409 at once."""

    def wait(self, details: dict[str, Any]) -> None:
        failed = recorded("op: unknown job")

        def answer(request: httpx.Request) -> dict[str, Any]:
            return failed if "/savepoints/" in request.url.path else details

        cli = Cli(Settings(url="http://flink:8081"), Output(as_json=True))
        cli._client = answering(answer)
        try:
            wait_for_operation(cli, "savepoint", TRIGGER, UNKNOWN, 30.0, "taking a savepoint")
        finally:
            cli.close()

    def test_an_unknown_one(self) -> None:
        with pytest.raises(NotFound) as error:
            self.wait(recorded("unknown job: GET /jobs/:id"))
        assert code_of(error.value) is ExitCode.NOT_FOUND

    def test_one_that_has_ended(self) -> None:
        with pytest.raises(Conflict, match="is FINISHED") as error:
            self.wait(recorded("a finished job"))
        assert code_of(error.value) is ExitCode.CONFLICT
