"""The pages inside Airflow: what they may ask a job manager for, and what is passed on. Airflow's own part of it is in
``tests/system``.
"""

from __future__ import annotations

import asyncio
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ckpt.exceptions import CkptConnectionInvalid
from airflow_provider_ckpt.links import pages_path
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.network.tls import rest_context
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.support.certificates import Authority, rest_options
from tests.unit.provider.conftest import JOB, JobManager
from tests.unit.provider.test_hook import connect
from tests.unit.runtime.rest.fake_gateway import FakeGateway
from tests.unit.runtime.rest.served import served

VERTEX = "f74362dd18da632fe7d708268d6f8693"
REPOSITORY = Path(__file__).parents[3]


def ask(path: str, conn_id: str = "ckpt_default", **query: str) -> Any:
    from airflow_provider_ckpt.plugins.upstream import asked_of

    return asyncio.run(asked_of(conn_id, path, query))


def refusal(path: str = "overview", conn_id: str = "ckpt_default") -> tuple[int, str]:
    from airflow_provider_ckpt.plugins.upstream import UpstreamRefused

    with pytest.raises(UpstreamRefused) as caught:
        ask(path, conn_id)
    return caught.value.status, str(caught.value)


@pytest.mark.parametrize(
    "path",
    [
        "overview", "jobs/overview", "savepoints/known", f"jobs/{JOB}", f"jobs/{JOB}/health", f"jobs/{JOB}/config",
        f"jobs/{JOB}/exceptions", f"jobs/{JOB}/checkpoints", f"jobs/{JOB}/checkpoints/config",
        f"jobs/{JOB}/checkpoints/details/7", f"jobs/{JOB}/checkpoints/details/7/subtasks/{VERTEX}",
        f"jobs/{JOB}/vertices/{VERTEX}/backpressure",
    ],
)  # fmt: skip
def test_paths_of_the_pages_are_allowed(path: str) -> None:
    from airflow_provider_ckpt.plugins.upstream import is_allowed

    assert is_allowed(path)


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "jars", "jobmanager/config", "metrics", "openapi.json", "config", f"jobs/{JOB}/yarn-cancel",
        f"jobs/{JOB}/../../jars", "overview/", "overview\n", "overview?x", f"jobs/{JOB}x", "jobs/x", "//evil.example",
        "https://evil.example/overview", f"jobs/{JOB}/checkpoints/details/٧", "web/login", "taskmanagers",
    ],
)  # fmt: skip
def test_other_paths_are_refused(path: str) -> None:
    from airflow_provider_ckpt.plugins.upstream import is_allowed

    assert not is_allowed(path)


def test_answers_are_passed_on_and_so_are_refusals(job_manager: JobManager) -> None:
    answer = ask(f"jobs/{JOB}/checkpoints")
    assert answer.status == 200
    assert "history" in json.loads(answer.content)
    missing = ask(f"jobs/{'0' * 32}")
    assert (missing.status, json.loads(missing.content)) == (
        404,
        {"errors": [f"org.apache.flink.runtime.rest.NotFoundException: Job {'0' * 32} not found"]},
    )
    ask("overview", job=JOB, evil="x")
    assert job_manager.received[-1] == "GET /overview"


def test_request_that_cannot_be_sent_is_reported(job_manager: JobManager, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(conn_id="nosuch") == (404, "There is no connection 'nosuch'.")
    other = {"conn_type": "http", "host": "127.0.0.1", "port": job_manager.port, "password": "of another session"}
    monkeypatch.setenv("AIRFLOW_CONN_OTHER", json.dumps(other))
    assert refusal(conn_id="other") == (404, "The connection 'other' is not of the type ckpt.")
    monkeypatch.setenv("AIRFLOW_CONN_BROKEN", json.dumps({"conn_type": "ckpt", "host": "a b"}))
    assert refusal(conn_id="broken")[0] == 502
    assert job_manager.received == []
    job_manager.stop()
    status, message = refusal()
    assert status == 502
    assert message.startswith("The job manager of 'ckpt_default' does not answer: ")
    assert "refused" in message or "attempts failed" in message
    assert message.endswith("of the connection 'ckpt_default', and whether its session runs")


def test_missing_answer_is_reported_with_its_cause(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the field of the connection to look at."""
    context = rest_context(Configuration(rest_options(Authority(tmp_path).issue("server"))))
    with served(create_app(FakeGateway(), token=None), context) as url:
        fields = {"host": "127.0.0.1", "port": int(url.rpartition(":")[2]), "schema": "https"}
        connect(monkeypatch, **fields)
        assert "CERTIFICATE_VERIFY_FAILED" in refusal()[1]
        assert "in the field CA bundle of the connection 'ckpt_default'" in refusal()[1]
        (tmp_path / "empty.pem").write_text("no certificate")
        connect(monkeypatch, **fields, extra={"ca_file": str(tmp_path / "empty.pem")})
        assert refusal()[1].startswith("connection 'ckpt_default', ca_file: ")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        connect(monkeypatch, host="127.0.0.1", port=silent.getsockname()[1], extra={"timeout": 0.1})
        assert "does not answer: no answer within 0.1 s" in refusal()[1]


@pytest.fixture
def other_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Something else that answers at the address of a connection."""
    answer: dict[str, Any] = {"status": 200, "headers": {"Content-Type": "application/json"}, "body": b"{}"}
    seen = answer["seen"] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization")))
            self.send_response(answer["status"])
            for name, value in answer["headers"].items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer["body"])

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        connect(monkeypatch, host="127.0.0.1", port=server.server_address[1], password="a-secret")
        yield answer
        server.shutdown()
        thread.join()


def test_token_is_sent_to_the_job_manager_only(other_server: dict[str, Any]) -> None:
    assert ask("overview").content == b"{}"
    assert other_server["seen"] == [("/overview", "Bearer a-secret")]
    for status in (401, 403):
        other_server["status"] = status
        assert refusal() == (502, "The job manager refuses the token of the connection 'ckpt_default'.")
    other_server |= {"status": 302, "headers": {"Location": "/elsewhere", "Content-Type": "application/json"}}
    assert refusal()[1] == "The server at the address of 'ckpt_default' is not a job manager."
    assert {path for path, _ in other_server["seen"]} == {"/overview"}


def test_answers_of_other_servers_are_not_passed_on(
    other_server: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    other_server |= {"headers": {"Content-Type": "text/html"}, "body": b"<script>alert(1)</script>"}
    assert refusal()[0] == 502
    from airflow_provider_ckpt.plugins import upstream

    monkeypatch.setattr(upstream, "MAX_ANSWER_BYTES", 10)
    other_server |= {"headers": {"Content-Type": "application/json"}, "body": b"[" + b" " * 20 + b"]"}
    assert refusal() == (502, "The answer is larger than 10 bytes.")


@pytest.mark.parametrize(
    ("given", "read"),
    [
        (None, None), ("", None), ("https://ckpt.example.com/", "https://ckpt.example.com"),
        ("http://[::1]:8081", "http://[::1]:8081"), ("https://proxy.example/streams", "https://proxy.example/streams"),
    ],
)  # fmt: skip
def test_the_address_for_browsers_is_read(monkeypatch: pytest.MonkeyPatch, given: str | None, read: str | None) -> None:
    assert connect(monkeypatch, extra={"browser_address": given}).endpoint().browser_address == read


@pytest.mark.parametrize(
    "given",
    ["ckpt.example.com", "ftp://a", "https://", "javascript:alert(1)", "https://u:geheim@a", "https://a?x=1",
     "https://a#b", "https://a b", "https://a:x", 5],
)  # fmt: skip
def test_connection_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, given: object) -> None:
    with pytest.raises(CkptConnectionInvalid, match="browser_address") as caught:
        connect(monkeypatch, extra={"browser_address": given}).endpoint()
    assert "geheim" not in str(caught.value)


def test_pages_work_if_airflow_is_served_below_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages_path("a/b") == "/ckpt/a%2Fb/web/"
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://example.com/airflow/")
    assert pages_path() == "/airflow/ckpt/"
    assert pages_path("c") == "/airflow/ckpt/c/web/"


@pytest.mark.row("air.15")
def test_jobs_that_need_attention_are_failed_or_not_healthy(job_manager: JobManager) -> None:
    from airflow_provider_ckpt.plugins.views import _in_trouble

    names = {"1" * 32: "a failed one", "2" * 32: "a finished one"}
    for job_id, name in names.items():
        job_manager.gateway.add_job(job_id, name)
    job_manager.gateway.move("1" * 32, JobStatus.FAILED)
    job_manager.gateway.move("2" * 32, JobStatus.FINISHED)
    jobs, problem, looked_at = asyncio.run(_in_trouble("ckpt_default"))
    assert (problem, looked_at) == ("", 2)
    assert {job["name"]: job["verdict"] for job in jobs} == {"a failed one": None, "contract-job": "UNHEALTHY"}
    assert jobs[0]["link"].startswith("/ckpt/ckpt_default/web/#/jobs/")
    job_manager.stop()
    jobs, problem, looked_at = asyncio.run(_in_trouble("ckpt_default"))
    assert (jobs, looked_at) == ([], 0)
    assert "does not answer" in problem


@pytest.mark.row("air.15")
def test_the_list_of_connections_names_the_jobs_that_need_attention_and_why(job_manager: JobManager) -> None:
    from airflow_provider_ckpt.plugins.views import _connection_row, _in_trouble

    for number in range(6):
        job_manager.gateway.add_job(f"{number:032x}", f"<b>{number}</b>")
    job_manager.gateway.move("0" * 32, JobStatus.FAILED)
    row = _connection_row("a b", *asyncio.run(_in_trouble("ckpt_default")))
    assert '<a href="a%20b/web/" class="name">a b</a></td><td>7</td>' in row
    assert row.count("<div><a href='/ckpt/ckpt_default/web/#/jobs/") == 5
    assert "<div>and 2 more</div>" in row
    assert "&lt;b&gt;" in row
    assert "<b>" not in row
    job_manager.stop()
    row = _connection_row("a b", *asyncio.run(_in_trouble("ckpt_default")))
    assert "<td>–</td>" in row
    assert "does not answer" in row


@pytest.mark.row("air.15")
def test_a_job_is_replaced_by_a_later_job_of_its_name_but_not_by_a_restore_drill() -> None:
    from airflow_provider_ckpt.plugins.views import by_id

    lines = [
        {"jid": "1", "name": "drilled", "start-time": 1},
        {"jid": "2", "name": "started again", "start-time": 2, "drill": False},
        {"jid": "3", "name": "drilled", "start-time": 3, "drill": True},
        {"jid": "4", "name": "started again", "start-time": 4},
    ]
    assert [job_id for job_id, line in by_id(lines).items() if line["replaced"]] == ["2"]


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (0, "0 s"),
        (119_999, "119 s"),
        (120_000, "2 min"),
        (7_200_000, "2 h"),
        (172_799_000, "47 h"),
        (172_800_000, "2 d"),
    ],
)
def test_the_age_of_a_checkpoint_is_shown_in_the_largest_unit_that_has_two(ms: int, shown: str) -> None:
    from airflow_provider_ckpt.plugins.views import shown_duration

    assert shown_duration(ms) == shown


@pytest.mark.row("air.15")
def test_jobs_of_any_number_of_tasks_are_ranked_with_one_request(job_manager: JobManager) -> None:
    from airflow_provider_ckpt.plugins.views import TaskJob, _rank, _states_of

    ids = [f"{number:032x}" for number in range(100, 150)]
    for job_id in ids:
        job_manager.gateway.add_job(job_id, f"job {job_id[-3:]}")
    job_manager.gateway.move(ids[30], JobStatus.FAILED)
    job_manager.gateway.move(ids[3], JobStatus.FINISHED)
    jobs = [TaskJob("ckpt_default", job_id, "submit", "run") for job_id in [*ids, "f" * 32]]
    states = asyncio.run(_states_of(jobs))
    ranked = sorted(zip(jobs, states, strict=True), key=lambda pair: _rank(pair[1]))
    assert [state["state"] for _, state in ranked[:49]].count("FAILED") == 1
    assert [job.job_id for job, _ in ranked[49:]] == ["f" * 32, ids[3]]
    assert states[-1] == {"state": "UNKNOWN", "reasons": ["The job manager does not know this job."]}
    assert job_manager.received.count("GET /jobs/overview") == 1
    assert f"GET /jobs/{ids[0]}" not in job_manager.received


def test_plugin_imports_little_in_processes_that_only_load_it(alone: Callable[[str], str]) -> None:
    said = alone("""
import sys
from airflow_provider_ckpt.plugins.pages import CkptPlugin
own = [name for name in sys.modules if name.startswith("airflow_provider_ckpt.plugins.")]
print(CkptPlugin.fastapi_apps[0]["url_prefix"], own)
""")
    assert said.splitlines()[-1] == "/ckpt ['airflow_provider_ckpt.plugins.pages']"
