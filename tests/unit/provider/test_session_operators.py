"""Starting and ending a session: a detached process that is found again after any process died."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import TaskDeferralError

from airflow_provider_ckpt import processes
from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptRequestRejected,
    CkptSessionFailed,
    CkptWaitTimeout,
)
from airflow_provider_ckpt.hooks.ckpt import Endpoint
from airflow_provider_ckpt.operators.session import StartSessionOperator, StopSessionOperator
from airflow_provider_ckpt.processes import SessionProcess, submission
from ckpt_runtime.client.session_command import SessionFiles
from tests.support.certificates import Authority, internal_options, rest_options
from tests.support.patience import patient
from tests.unit.provider.conftest import JobManager, Task, deferral, finish, fire

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
        if "refuses" in sys.argv:
            self.answer({"errors": ["A valid bearer token is required."]}, 401)
            return
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
server.server_close()
if "tidies" in sys.argv:
    import pathlib, time
    time.sleep(0.5)  # its REST API has gone
    pathlib.Path(sys.argv[-1]).touch()
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
    launch = processes.launch

    def recording(*args: Any) -> SessionProcess:
        started.append(launch(*args))
        return started[-1]

    monkeypatch.setattr(processes, "launch", recording)
    command = [sys.executable, "-c", SERVER, str(port)]
    yield {"task_id": "t", "command": command, "log_directory": str(tmp_path), **FAST}
    for process in started:
        process.signal(signal.SIGKILL)


@pytest.mark.row("air.2")
@pytest.mark.parametrize("deferrable", [True, False])
def test_a_session_is_started_detached_and_stopped(session: dict[str, Any], task: Task, deferrable: bool) -> None:
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
def test_a_retry_finds_the_process_that_an_earlier_try_started(session: dict[str, Any], task: Task) -> None:
    first = deferral(StartSessionOperator(**session), task.context())
    started = finish(StartSessionOperator(**session), task.context())
    assert started["pid"] == first.trigger.condition.process.pid


@pytest.mark.row("air.3")
def test_a_crash_between_starting_and_writing_down_the_pid_is_survived(session: dict[str, Any], task: Task) -> None:
    first = deferral(StartSessionOperator(**session), task.context())
    assert task.store is not None
    record = task.store["ckpt_session"]
    task.store["ckpt_session"] = {key: record[key] for key in ("session_id", "log_file")}
    started = finish(StartSessionOperator(**session), task.context())
    assert started["pid"] == first.trigger.condition.process.pid


def test_a_running_session_is_used_or_refused(job_manager: JobManager, task: Task) -> None:
    found = StartSessionOperator(task_id="t", **FAST).execute(task.context())
    assert found["reused"] is True
    assert found["pid"] is None
    with pytest.raises(CkptSessionFailed, match="already answers at .*"):
        StartSessionOperator(task_id="t", reuse_running=False, **FAST).execute(task.context())


@pytest.mark.parametrize("reused", [True, False])
def test_a_session_is_ready_when_it_leads(session: dict[str, Any], task: Task, reused: bool) -> None:
    session["env"] = {"LOOKS_BEFORE_IT_LEADS": "4"}
    if reused:
        first = deferral(StartSessionOperator(**session), task.context())
        wait_for_line(Path(first.trigger.condition.process.log_file), "serving")
        task = Task()
    operator = StartSessionOperator(**session)
    deferred = deferral(operator, task.context())
    event = fire(deferred)
    started = operator.resume_execution("execute_complete", {"event": event}, task.context())
    assert started["reused"] is reused
    import httpx

    assert httpx.get(f"{started['base_url']}/jobs/overview", timeout=60).status_code == 200


def test_session_that_never_leads_times_out(session: dict[str, Any], task: Task) -> None:
    session["command"].append("standby")
    first = deferral(StartSessionOperator(**session), task.context())
    wait_for_line(Path(first.trigger.condition.process.log_file), "serving")
    with pytest.raises(CkptWaitTimeout, match="to answer as the leader.*503"):
        finish(StartSessionOperator(**session | {"wait_timeout": 0.3}), Task().context())
    assert first.trigger.condition.process.is_alive, "it belongs to another task"


def wait_for_line(file: Path, line: str) -> None:
    until = time.monotonic() + patient(120)
    while not file.exists() or line not in file.read_text():
        assert time.monotonic() < until, f"no {line!r} in {file}"
        time.sleep(0.02)


def test_session_that_dies_while_starting_fails_at_once_with_its_log(session: dict[str, Any], task: Task) -> None:
    session["command"] = [sys.executable, "-c", "print('no barrier for you', flush=True)"]
    with pytest.raises(CkptSessionFailed, match="no barrier for you"):
        finish(StartSessionOperator(**session), task.context())
    assert task.store == {}


def test_the_deadline_ends_the_session_that_never_answered(session: dict[str, Any], task: Task) -> None:
    session |= {"command": [sys.executable, "-c", "import time; time.sleep(60)"], "wait_timeout": 0.3}
    with pytest.raises(CkptWaitTimeout, match="was ended"):
        finish(StartSessionOperator(**session), task.context())
    assert task.store is not None
    assert not SessionProcess.from_json(task.store["ckpt_session"]).is_alive


def test_a_task_that_is_marked_failed_ends_the_session_that_was_being_started(
    session: dict[str, Any], task: Task, airflow_says: Callable[[str | None], None]
) -> None:
    session["command"] = [sys.executable, "-c", "import time; time.sleep(60)"]
    operator, context = StartSessionOperator(**session), task.context()
    trigger = deferral(operator, context).trigger
    trigger.task_instance = context["ti"]
    airflow_says("restarting")  # cleared: the next try attaches to it
    operator.on_kill()
    asyncio.run(trigger.on_kill())
    assert trigger.condition.process.is_alive
    airflow_says("failed")
    operator.on_kill()
    assert not trigger.condition.process.is_alive


@pytest.mark.parametrize("deferrable", [True, False])
def test_session_that_is_already_ending_is_not_killed(
    session: dict[str, Any], task: Task, tmp_path: Path, deferrable: bool
) -> None:
    """Spark goes behind the REST API, and what the session shared with its workers."""
    session["command"] += ["tidies", str(tmp_path / "tidy")]
    started = finish(StartSessionOperator(**session), task.context())
    stop = StopSessionOperator(task_id="s", session=started, deferrable=deferrable, **FAST)
    assert finish(stop, task.context())["was_running"] is True
    assert not SessionProcess.from_json(started).is_alive
    assert (tmp_path / "tidy").exists()


def test_a_session_that_does_not_end_by_itself_is_ended(session: dict[str, Any], task: Task) -> None:
    session["command"].append("stubborn")
    started = finish(StartSessionOperator(**session), task.context())
    stop = StopSessionOperator(task_id="s", session=started, poll_interval=0.02, wait_timeout=0.2)
    with pytest.raises(CkptWaitTimeout, match="process was ended"):
        finish(stop, task.context())
    assert not SessionProcess.from_json(started).is_alive


@pytest.mark.row("air.13")
@pytest.mark.parametrize("deferrable", [True, False])
def test_a_start_that_the_session_refuses_leaves_no_session(
    session: dict[str, Any], task: Task, deferrable: bool
) -> None:
    """Airflow runs no teardown after a failed setup."""
    session["command"].append("refuses")
    with pytest.raises(CkptRequestRejected, match="A valid bearer token is required"):
        finish(StartSessionOperator(deferrable=deferrable, **session), task.context())
    assert task.store is not None
    assert not SessionProcess.from_json(task.store["ckpt_session"]).is_alive


@pytest.mark.row("air.13")
def test_a_start_whose_trigger_fails_leaves_no_session(session: dict[str, Any], task: Task) -> None:
    process = deferral(StartSessionOperator(**session), task.context()).trigger.condition.process
    assert process.is_alive
    resumed = StartSessionOperator(**session)
    with pytest.raises(TaskDeferralError):
        resumed.resume_execution("__fail__", {"error": "the trigger has failed"}, task.context())
    assert not process.is_alive


@pytest.mark.row("air.13")
def test_a_session_that_refuses_to_end_is_ended_by_its_process(session: dict[str, Any], task: Task) -> None:
    session["command"].append("refuses")
    process = deferral(StartSessionOperator(**session), task.context()).trigger.condition.process
    wait_for_line(Path(process.log_file), "serving")
    with pytest.raises(CkptRequestRejected, match="A valid bearer token is required"):
        finish(StopSessionOperator(task_id="s", **FAST), task.context())
    assert process.is_alive, "the task does not know it"
    stop = StopSessionOperator(task_id="s", session=process.to_json(), **FAST)
    assert finish(stop, task.context())["was_running"] is True
    assert not process.is_alive


@pytest.mark.parametrize("given", ["{'pid': 5}", 5, {"session_id": "s"}])
def test_invalid_session_argument_is_refused_before_anything_ends(
    job_manager: JobManager, task: Task, given: Any
) -> None:
    """Such as the text that a template makes of a result."""
    with pytest.raises(CkptArgumentInvalid, match="^session: "):
        StopSessionOperator(task_id="s", session=given).execute(task.context())
    assert job_manager.received == []


def test_a_process_with_a_reused_pid_does_not_count_as_the_session() -> None:
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
    command, environment, master = operator.command_line(endpoint, files)
    assert master == "local[4]"
    text = " ".join(command)
    assert Path(command[0]).name == "spark-submit"
    assert "--master local[4] --properties-file /logs/s.spark.conf --load-spark-defaults" in text
    tail = "--rest-host 127.0.0.1 --rest-port 8081 --properties-file /logs/s.spark.conf --log-file /logs/s.log"
    assert text.endswith(f"main.py {tail} --work-dir /data/work --configuration-file /logs/o")
    assert "geheim" not in text
    assert environment["CKPT_REST_TOKEN"] == "geheim"
    assert environment["EXTRA"] == "1"


def test_session_without_a_token_needs_explicit_configuration() -> None:
    endpoint = Endpoint("http://127.0.0.1:8081", "127.0.0.1", 8081)
    files = SessionFiles(properties="/p", log="/l")
    with pytest.raises(CkptArgumentInvalid, match="password of the connection"):
        StartSessionOperator(task_id="t").command_line(endpoint, files)
    operator = StartSessionOperator(task_id="t", configuration={"rest.authentication": "none"})
    _, environment, _ = operator.command_line(endpoint, files)
    assert "CKPT_REST_TOKEN" not in environment


def spark_connection(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_TEAM", json.dumps({"conn_type": "spark"} | fields))


def options_of(command: list[str]) -> list[tuple[str, str]]:
    """Each option with what follows it."""
    return [(key, command[at + 1]) for at, key in enumerate(command[:-1]) if key.startswith("--")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"host": "local[3]"}, {"--master": "local[3]"}),
        ({"host": "spark://master", "port": 7077}, {"--master": "spark://master:7077"}),
        ({"host": "yarn", "extra": {"queue": "streams", "deploy-mode": "client"}},
         {"--master": "yarn", "--queue": "streams", "--deploy-mode": "client"}),
        ({"host": "yarn", "extra": {"principal": "flights@REALM", "keytab": "a2V5dGFi"}},
         {"--principal": "flights@REALM"}),
        ({"host": "yarn", "extra": {"spark-binary": "spark3-submit"}}, {}),
    ],
)  # fmt: skip
def test_spark_connection_gives_the_command_of_the_submit_hook(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fields: dict[str, Any], expected: dict[str, str]
) -> None:
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spark_connection(monkeypatch, **fields)
    rest = ["--rest-port", "0"]
    found = submission("spark_team", {"spark.executor.memory": "geheim"}, "/p", "/app.py", rest)
    hook = SparkSubmitHook(
        conn_id="spark_team", properties_file="/p", application_args=rest, name="checkpointing stream engine"
    )
    own = hook._build_spark_submit_command("/app.py")
    assert found.command[1:] == ["--load-spark-defaults", *own[1:]]
    assert Path(found.command[0]).name == own[0]
    options = dict(options_of(found.command))
    assert expected.items() <= options.items()
    assert found.master == options["--master"]
    assert "geheim" not in " ".join(found.command), "Spark's settings are in a file"


def test_spark_application_keeps_the_name_from_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """``--name`` wins over the properties file, where the other settings are."""
    spark_connection(monkeypatch, host="local[3]")
    for conf, name in (({}, "checkpointing stream engine"), ({"spark.app.name": "flights"}, "flights")):
        assert dict(options_of(submission("spark_team", conf, "/p", "/app.py", []).command))["--name"] == name


def test_kubernetes_has_the_connections_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the settings of the task name one."""
    from airflow.providers.apache.spark.hooks import spark_submit

    monkeypatch.setattr(spark_submit, "kube_client", object(), raising=False)
    spark_connection(monkeypatch, host="k8s://https://cluster", port=6443, extra={"namespace": "streams"})
    chosen: list[tuple[dict[str, str], str]] = [({}, "streams"), ({"spark.kubernetes.namespace": "flights"}, "flights")]
    for conf, namespace in chosen:
        command = submission("spark_team", conf, "/p", "/app.py", []).command
        assert ("--master", "k8s://https://cluster:6443") in options_of(command)
        given = {part for part in command if part.startswith("spark.kubernetes.namespace=")}
        assert given == {f"spark.kubernetes.namespace={namespace}"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"host": "yarn", "extra": {"deploy-mode": "cluster"}}, "deploy-mode is cluster; it must be client"),
        ({"host": "yarn", "extra": {"spark-binary": "rm"}}, "spark-binary extra can be one of"),
        ({"host": "yarn", "extra": {"spark-home": "/opt"}}, "spark-home"),
    ],
)
def test_a_spark_connection_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], said: str
) -> None:
    spark_connection(monkeypatch, **fields)
    with pytest.raises(CkptArgumentInvalid, match=rf"spark_conn_id: 'spark_team' is not acceptable, .*{said}"):
        submission("spark_team", {}, "/p", "/app.py", [])


def test_an_unknown_spark_connection_is_not_yarn() -> None:
    with pytest.raises(CkptArgumentInvalid, match="spark_conn_id: 'nosuch' is not acceptable"):
        submission("nosuch", {}, "/p", "/app.py", [])
    operator = StartSessionOperator(task_id="t", master="local[2]", spark_conn_id="spark_team")
    endpoint = Endpoint("http://127.0.0.1:8081", "127.0.0.1", 8081, token="geheim")
    with pytest.raises(CkptArgumentInvalid, match="it must not be set, because spark_conn_id names one"):
        operator.command_line(endpoint, SessionFiles(properties="/p", log="/l"))


def test_sparks_provider_is_imported_only_when_it_is_used(alone: Callable[[str], str]) -> None:
    said = alone("""
import sys, airflow_provider_ckpt.operators.session
print("airflow.providers.apache.spark.hooks.spark_submit" in sys.modules)
""")
    assert said == "False\n"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_session_really_starts_where_a_spark_connection_leads(
    session: dict[str, Any], task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And is found where its leader is, when the connection of the job manager names a directory. All in TLS."""
    spark_connection(monkeypatch, host="local[2]")
    authority = Authority(tmp_path)
    configuration = {
        "rest.address": "localhost",
        **rest_options(authority.issue("rest")),
        **internal_options(authority.issue("internal"), authority),
    }
    extra = {"ha_dir": str(tmp_path / "ha"), "ca_file": str(authority.path)}
    document = {"conn_type": "ckpt", "password": "geheim", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_CKPT_DEFAULT", json.dumps(document))
    arguments = {key: value for key, value in session.items() if key != "command"}
    arguments |= {"wait_timeout": 180, "spark_conn_id": "spark_team", "work_directory": str(tmp_path / "work")}
    started = finish(StartSessionOperator(configuration=configuration, **arguments), task.context())
    leader = json.loads((tmp_path / "ha" / "default" / "leader.json").read_text())
    assert started["base_url"] == leader["rest"]
    assert leader["rest"].startswith("https://localhost:"), "the advertised address"
    command = Path(f"/proc/{started['pid']}/cmdline").read_bytes().split(b"\0")
    assert b"local[2]" in command
    stop = StopSessionOperator(task_id="s", session=started, **FAST | {"wait_timeout": 60})
    assert finish(stop, task.context())["was_running"] is True
