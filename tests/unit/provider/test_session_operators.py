"""Starting and ending a session: a detached process that is found again, whoever died in between."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ckpt import session_process
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptSessionFailed, CkptWaitTimeout
from airflow_provider_ckpt.hooks.connection import Endpoint
from airflow_provider_ckpt.operators.session import StartSessionOperator, StopSessionOperator
from airflow_provider_ckpt.session_process import SessionProcess
from ckpt_runtime.client.session_command import SessionFiles
from tests.unit.provider.conftest import Finish, JobManager, Task, deferral, fire

FAST = {"defer_after": 0, "poll_interval": 0.02, "wait_timeout": 20}
SERVER = """
import http.server, json, os, sys, threading
def leads():
    global looks
    looks += 1
    return "standby" not in sys.argv and looks > int(os.environ.get("LOOKS_BEFORE_IT_LEADS", "0"))
looks = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, document, status=200):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        if self.path == "/jobs/overview":
            self.answer({"jobs": []}, 200 if leads() else 503)
            return
        self.answer({"slots-total": 2, "slots-available": 2, "taskmanagers": 1, "jobs-running": 0, "jobs-finished": 0,
                     "jobs-cancelled": 0, "jobs-failed": 0, "flink-version": os.environ.get("CKPT_REST_TOKEN", "none")})
    def do_DELETE(self):
        self.answer({})
        if "stubborn" not in sys.argv:
            threading.Thread(target=server.shutdown).start()
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("serving", flush=True)
server.serve_forever()
"""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Arguments for a small stand-in of a session; whatever was started ends with the test."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    document = {"conn_type": "ckpt", "host": "127.0.0.1", "port": port, "password": "geheim"}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))
    started: list[SessionProcess] = []
    launch = session_process.launch

    def recording(*args: Any) -> SessionProcess:
        started.append(launch(*args))
        return started[-1]

    monkeypatch.setattr(session_process, "launch", recording)
    command = [sys.executable, "-c", SERVER, str(port)]
    yield {"task_id": "t", "command": command, "log_directory": str(tmp_path), **FAST}
    for process in started:
        process.signal(signal.SIGKILL)


@pytest.mark.row("air.2")
@pytest.mark.parametrize("deferrable", [True, False])
def test_a_session_is_started_detached_and_stopped(
    session: dict[str, Any], task: Task, finish: Finish, deferrable: bool
) -> None:
    started = finish(StartSessionOperator(deferrable=deferrable, **session), task.context())
    assert started["slots_total"] == 2
    assert started["version"] == "geheim", "the token travels in the environment"
    assert os.getsid(started["pid"]) == started["pid"] != os.getsid(0)
    assert "geheim" not in Path(f"/proc/{started['pid']}/cmdline").read_text()
    stop = StopSessionOperator(task_id="s", session=started, deferrable=deferrable, **FAST)
    assert finish(stop, task.context())["was_running"] is True
    assert not SessionProcess.from_json(started).is_alive
    assert finish(stop, task.context())["was_running"] is False


@pytest.mark.row("air.3")
def test_a_retry_finds_the_process_that_an_earlier_try_started(
    session: dict[str, Any], task: Task, finish: Finish
) -> None:
    first = deferral(StartSessionOperator(**session), task.context())
    started = finish(StartSessionOperator(**session), task.context())
    assert started["pid"] == first.trigger.process.pid


@pytest.mark.row("air.3")
def test_a_crash_between_starting_and_writing_down_the_pid_is_survived(
    session: dict[str, Any], task: Task, finish: Finish
) -> None:
    first = deferral(StartSessionOperator(**session), task.context())
    assert task.store is not None
    record = task.store["ckpt_session"]
    task.store["ckpt_session"] = {key: record[key] for key in ("session_id", "log_file")}
    started = finish(StartSessionOperator(**session), task.context())
    assert started["pid"] == first.trigger.process.pid


def test_a_running_session_is_used_or_refused(job_manager: JobManager, task: Task) -> None:
    found = StartSessionOperator(task_id="t", **FAST).execute(task.context())
    assert found["reused"] is True
    assert found["pid"] is None
    with pytest.raises(CkptSessionFailed, match="answers at .* already"):
        StartSessionOperator(task_id="t", reuse_running=False, **FAST).execute(task.context())


@pytest.mark.parametrize("reused", [True, False])
def test_a_session_is_ready_when_it_leads(session: dict[str, Any], task: Task, finish: Finish, reused: bool) -> None:
    session["env"] = {"LOOKS_BEFORE_IT_LEADS": "4"}
    if reused:
        first = deferral(StartSessionOperator(**session), task.context())
        wait_for_line(Path(first.trigger.process.log_file), "serving")
        task = Task()
    operator = StartSessionOperator(**session)
    deferred = deferral(operator, task.context())
    event = fire(deferred)
    started = operator.resume_execution("execute_complete", {"event": event}, task.context())
    assert started["reused"] is reused
    import httpx

    assert httpx.get(f"{started['base_url']}/jobs/overview").status_code == 200


def test_a_session_that_never_leads_is_no_success(session: dict[str, Any], task: Task, finish: Finish) -> None:
    session["command"].append("standby")
    first = deferral(StartSessionOperator(**session), task.context())
    wait_for_line(Path(first.trigger.process.log_file), "serving")
    with pytest.raises(CkptWaitTimeout, match="to answer and to lead.*503"):
        finish(StartSessionOperator(**session | {"wait_timeout": 0.3}), Task().context())
    assert first.trigger.process.is_alive, "it belongs to another task"


def wait_for_line(file: Path, line: str) -> None:
    until = time.monotonic() + 120
    while not file.exists() or line not in file.read_text():
        assert time.monotonic() < until, f"no {line!r} in {file}"
        time.sleep(0.02)


def test_a_session_that_dies_while_starting_is_told_at_once_with_its_log(
    session: dict[str, Any], task: Task, finish: Finish
) -> None:
    session["command"] = [sys.executable, "-c", "print('no barrier for you', flush=True)"]
    with pytest.raises(CkptSessionFailed, match="no barrier for you"):
        finish(StartSessionOperator(**session), task.context())
    assert task.store == {}


def test_the_deadline_ends_the_session_that_never_answered(session: dict[str, Any], task: Task, finish: Finish) -> None:
    session |= {"command": [sys.executable, "-c", "import time; time.sleep(60)"], "wait_timeout": 0.3}
    with pytest.raises(CkptWaitTimeout, match="was ended"):
        finish(StartSessionOperator(**session), task.context())
    assert task.store is not None
    assert not SessionProcess.from_json(task.store["ckpt_session"]).is_alive


def test_killing_the_task_ends_the_session_that_was_being_started(session: dict[str, Any], task: Task) -> None:
    session["command"] = [sys.executable, "-c", "import time; time.sleep(60)"]
    operator = StartSessionOperator(**session)
    process = deferral(operator, task.context()).trigger.process
    operator.on_kill()
    assert not process.is_alive


def test_a_session_that_does_not_end_by_itself_is_ended(session: dict[str, Any], task: Task, finish: Finish) -> None:
    session["command"].append("stubborn")
    started = finish(StartSessionOperator(**session), task.context())
    stop = StopSessionOperator(task_id="s", session=started, poll_interval=0.02, wait_timeout=0.2)
    with pytest.raises(CkptWaitTimeout, match="process was ended"):
        finish(stop, task.context())
    assert not SessionProcess.from_json(started).is_alive


def test_a_process_with_a_reused_pid_is_not_mistaken_for_the_session() -> None:
    here = SessionProcess("s", socket.gethostname(), os.getpid(), 1, "/nowhere")
    assert not here.is_alive
    here.signal(signal.SIGKILL)
    assert not SessionProcess("s", "another.example", os.getpid(), 1, "/nowhere").is_here


def test_the_command_line_of_a_spark_session() -> None:
    operator = StartSessionOperator(
        task_id="t",
        master="local[4]",
        spark_conf={"spark.driver.memory": "1g"},
        configuration={"slots.idle-timeout": "5 s"},
        work_directory="/data/work",
        env={"EXTRA": 1},  # type: ignore[dict-item]
    )
    endpoint = Endpoint("http://127.0.0.1:8081", "127.0.0.1", 8081, token="geheim")
    files = SessionFiles(properties="/logs/s.spark.conf", log="/logs/s.log", work="/data/work", configuration="/logs/o")
    command, environment = operator.command_line(endpoint, files)
    text = " ".join(command)
    assert Path(command[0]).name == "spark-submit"
    assert "--master local[4] --properties-file /logs/s.spark.conf --load-spark-defaults" in text
    tail = "--rest-host 127.0.0.1 --rest-port 8081 --properties-file /logs/s.spark.conf --log-file /logs/s.log"
    assert text.endswith(f"main.py {tail} --work-dir /data/work --configuration-file /logs/o")
    assert "geheim" not in text
    assert environment["CKPT_REST_TOKEN"] == "geheim"
    assert environment["EXTRA"] == "1"


def test_a_session_without_a_token_has_to_be_asked_for() -> None:
    endpoint = Endpoint("http://127.0.0.1:8081", "127.0.0.1", 8081)
    files = SessionFiles(properties="/p", log="/l")
    with pytest.raises(CkptArgumentInvalid, match="password of the connection"):
        StartSessionOperator(task_id="t").command_line(endpoint, files)
    operator = StartSessionOperator(task_id="t", configuration={"rest.authentication": "none"})
    _, environment = operator.command_line(endpoint, files)
    assert "CKPT_REST_TOKEN" not in environment
