"""Retries, URLs, TLS settings, tokens; against a scripted transport where the network would have to fail."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import TypeVar

import httpx
import pytest

from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCkptClient, CkptClient
from ckpt_runtime.client.errors import CkptApiError
from ckpt_runtime.client.transport import InvalidToken, InvalidUrl, client_options, normalise_url
from ckpt_runtime.contract.jobs import root_message

JOB = "ab" * 16
T = TypeVar("T")


class Script:
    """Answers in order; an exception is raised instead of an answer."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def client_over(script: Callable[[httpx.Request], httpx.Response], **options: object) -> CkptClient:
    return CkptClient("host:1", transport=httpx.MockTransport(script), **{"retry_timeout_s": 60, **options})


def test_request_with_a_lost_answer_is_repeated_with_the_same_trigger_id() -> None:
    script = Script(httpx.ReadTimeout("late"), httpx.Response(503), httpx.Response(202, json={"request-id": "t"}))
    with client_over(script) as client:
        assert client.trigger_checkpoint(JOB) == "t"
    bodies = [json.loads(request.content) for request in script.requests]
    assert bodies[0] == bodies[1] == bodies[2]
    assert len(bodies[0]["triggerId"]) == 32


def test_runs_and_uploads_are_repeated_as_they_were() -> None:
    script = Script(httpx.ConnectError("refused"), httpx.Response(200, json={"jobid": JOB}))
    with client_over(script) as client:
        client.run_pipeline("p")
    assert len({request.content for request in script.requests}) == 1
    script = Script(httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200, json={"filename": "p/id"}))
    with client_over(script) as client:
        assert client.upload_pipeline("a.py", b"x") == "id"
    assert all(b"a.py" in request.content for request in script.requests)
    assert len(script.requests) == 3


class Jobs:
    """A Flink that refuses an id that it knows. ``loses`` says after which runs the answer is lost."""

    def __init__(self, loses: Exception, *, arrives: bool) -> None:
        self.loses: Exception | None = loses
        self.arrives = arrives
        self.known: set[str] = set()
        self.runs = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            job = request.url.path.rsplit("/", 1)[-1]
            return httpx.Response(200, json={"jid": job}) if job in self.known else httpx.Response(404)
        self.runs += 1
        job, lost = json.loads(request.content)["jobId"], self.loses
        if job in self.known:
            return httpx.Response(400, json={"errors": ["Job has already been submitted."]})
        if lost is None or self.arrives:
            self.known.add(job)
        if lost is not None:
            self.loses = None
            raise lost
        return httpx.Response(200, json={"jobid": job})


@pytest.mark.parametrize("lost", [httpx.ReadTimeout("late"), httpx.RemoteProtocolError("closed")])
def test_a_run_whose_answer_was_lost_is_looked_up_before_it_is_repeated(lost: Exception) -> None:
    flink = Jobs(lost, arrives=True)
    with client_over(flink) as client:
        assert client.run_pipeline("p", job_id=JOB) == JOB
    assert flink.runs == 1


@pytest.mark.parametrize("lost", [httpx.ReadTimeout("late"), httpx.ConnectError("refused")])
def test_a_run_that_never_arrived_is_repeated(lost: Exception) -> None:
    flink = Jobs(lost, arrives=False)
    with client_over(flink) as client:
        assert client.run_pipeline("p", job_id=JOB) == JOB
    assert flink.runs == 2


def test_a_run_that_is_refused_because_the_first_one_was_still_on_its_way_has_succeeded() -> None:
    script = Script(
        httpx.ReadTimeout("late"),
        httpx.Response(404),
        httpx.Response(409, json={"errors": ["duplicate"]}),
        httpx.Response(200, json={"jid": JOB}),
    )
    with client_over(script) as client:
        assert client.run_pipeline("p", job_id=JOB) == JOB


def test_a_run_that_is_refused_at_once_is_refused() -> None:
    script = Script(httpx.Response(409, json={"errors": ["duplicate"]}))
    with client_over(script) as client, pytest.raises(CkptApiError, match="duplicate"):
        client.run_pipeline("p", job_id=JOB)


@pytest.mark.parametrize("status", [400, 401, 404, 409, 500])
def test_final_error_is_not_retried(status: int) -> None:
    script = Script(httpx.Response(status, json={"errors": ["no"]}))
    with client_over(script) as client, pytest.raises(CkptApiError, match="no") as error:
        client.list_jobs()
    assert error.value.status == status
    assert len(script.requests) == 1


@pytest.mark.parametrize(("patience", "sent"), [(0.0, 1), (0.001, 2)])
def test_patience_is_bounded_and_the_last_error_is_raised(patience: float, sent: int) -> None:
    script = Script(*(httpx.Response(503, json={"errors": [str(number)]}) for number in range(1, 9)))
    with client_over(script, retry_timeout_s=patience) as client, pytest.raises(CkptApiError) as error:
        client.list_jobs()
    assert len(script.requests) == int(str(error.value)) >= sent


def test_timeout_of_repetitions_can_be_set_for_one_call() -> None:
    script = Script(httpx.Response(503), httpx.Response(200, json={"jobs": []}))
    with client_over(script, retry_timeout_s=60) as client:
        with pytest.raises(CkptApiError, match="503"):
            client.execute(requests.list_jobs(), retry_timeout_s=0)
        assert client.execute(requests.list_jobs()) == ()


def test_token_path_and_query() -> None:
    script = Script(httpx.Response(200, json=[]))
    with client_over(script, token="secret") as client:
        client.job_metrics("a/../b", ("x", "y z"))
    (request,) = script.requests
    assert request.headers["authorization"] == "Bearer secret"
    assert request.url.raw_path == b"/jobs/a%2F..%2Fb/metrics?get=x%2Cy+z"


@pytest.mark.parametrize(
    "token", ["geheim\n", "geheim\r\nX: y", "geheim ", "schlüssel-geheim", "geheim\x00", "\udcff", ""]
)
@pytest.mark.parametrize("client", [CkptClient, AsyncCkptClient])
def test_a_token_that_no_header_takes_is_refused_before_any_request_and_not_shown(
    token: str, client: type[CkptClient | AsyncCkptClient]
) -> None:
    with pytest.raises(InvalidToken, match="^token: ") as refused:
        client("http://127.0.0.1:9", token=token)
    assert "geheim" not in "".join(traceback.format_exception(refused.value))
    assert refused.value.__context__ is None


def test_text_that_is_not_utf8_can_be_sent() -> None:
    script = Script(httpx.Response(202, json={"request-id": "t"}))
    with client_over(script) as client:
        client.trigger_savepoint(JOB, "/dir\udcff")
    assert b"\\udcff" in script.requests[0].content


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("host:80", "http://host:80"), ("https://h/x/", "https://h/x"), (" http://[::1]:8 ", "http://[::1]:8"),
        ("127.0.0.1:8081", "http://127.0.0.1:8081"),
    ],
)  # fmt: skip
def test_addresses_are_completed_to_urls(given: str, url: str) -> None:
    assert normalise_url(given) == url


@pytest.mark.parametrize(
    "bad", ["", "http://", "ftp://x", "http://h?x=1", "http://h#x", "h:99999", "h:0", "http://[", "h:x"]
)
def test_invalid_url_is_refused(bad: str) -> None:
    with pytest.raises(InvalidUrl, match="host:port"):
        CkptClient(bad)


@pytest.mark.parametrize("bad", ["http://u:secret@h", "u:secret@h:1", "http://u:secret@h:x", "u:secret@"])
def test_url_with_a_password_is_refused_without_showing_it(bad: str) -> None:
    with pytest.raises(InvalidUrl, match="without a user or password; the token is given separately") as raised:
        CkptClient(bad)
    assert "secret" not in str(raised.value)


def test_tls_contexts_are_made_once_and_loopback_uses_no_proxy() -> None:
    first = client_options("https://h", None, True, 1.0)
    assert first["verify"] is client_options("https://h", None, True, 1.0)["verify"]
    assert first["verify"].verify_mode is ssl.CERT_REQUIRED
    assert client_options("https://h", None, False, 1.0)["verify"].verify_mode is ssl.CERT_NONE
    own = ssl.create_default_context()
    assert client_options("https://h", None, own, 1.0)["verify"] is own
    assert first["trust_env"]
    assert not client_options("http://127.0.0.1:1", None, True, 1.0)["trust_env"]


def test_wait_continues_while_the_server_does_not_answer() -> None:
    script = Script(httpx.Response(503), httpx.ConnectError("refused"), httpx.Response(200, json={"status": "RUNNING"}))
    with client_over(script, retry_timeout_s=0) as client:
        assert client.wait_for_state(JOB, {"RUNNING"}, timeout_s=None) == "RUNNING"


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ("a.B: x\n\tat y", "x"), ("a.B: x\nCaused by: c.D: y: z\n", "y: z"), ("no class here: x", "no class here: x"),
        ("", "E"), ("ValueError", "ValueError"),
    ],
)  # fmt: skip
def test_the_message_in_a_stack_trace(trace: str, message: str) -> None:
    assert root_message("E", trace) == message


def test_package_loads_no_heavy_library() -> None:
    code = (
        "import sys; import ckpt_runtime.client, ckpt_runtime.client.errors, ckpt_runtime.contract.jobs;"
        "assert 'httpx' not in sys.modules;"
        "from ckpt_runtime.client.clients import CkptClient;"
        "heavy = {'pyspark', 'pyarrow', 'numpy', 'pandas', 'fastapi', 'pydantic', 'numba'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
