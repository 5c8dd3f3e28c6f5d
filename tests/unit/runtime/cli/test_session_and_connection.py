"""Which job manager is talked to, the session file, and the process as a whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.cli import session_commands
from ckpt_runtime.cli.framework import read_session, session_path, write_session
from ckpt_runtime.cli.main import main
from ckpt_runtime.client.process_id import ProcessId
from ckpt_runtime.jobmaster.leadership import LeaseSignature
from ckpt_runtime.rest.app import create_app
from ckpt_runtime.spark.launch import SessionInfo, SessionStartError
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.version import VERSION
from tests.unit.runtime.rest.fake_gateway import FakeGateway
from tests.unit.runtime.rest.served import served

Capture = pytest.CaptureFixture[str]

ME = ProcessId.of(os.getpid())
MY_PID = ME.pid
SOUND = {
    "rest_url": "", "leader": {"pid": 5, "started": 1}, "driver": {"pid": 6, "started": 1}, "log_file": "",
    "session_file": "",
}  # fmt: skip
GONE = ProcessId(MY_PID, 1)


@pytest.fixture(autouse=True)
def session_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("CKPT_REST_URL", "CKPT_REST_TOKEN", "CKPT_HA_DIR", "CKPT_CLUSTER_ID"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "state" / "session.json"
    monkeypatch.setenv("CKPT_SESSION_FILE", str(path))
    return path


@pytest.fixture(scope="module")
def secured() -> Iterator[str]:
    with served(create_app(FakeGateway(), token="secret")) as url:
        yield url


def record(
    url: str, token: str | None = None, *, leader: ProcessId = ME, driver: ProcessId = ME, log: str = "/log"
) -> SessionInfo:
    return SessionInfo(url, leader, driver, log, "/ready", token)


def test_absent_job_managers_and_listeners_are_named(capsys: Capture) -> None:
    assert main(["list"]) == 2
    assert "--url" in capsys.readouterr().err
    assert main(["session", "stop"]) == 4
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert main(["list", "--url", f"127.0.0.1:{taken.getsockname()[1]}"]) == 3
    assert "cannot be reached" in capsys.readouterr().err


def test_token_of_a_session_is_sent_to_its_address_alone(secured: str, session_file: Path) -> None:
    write_session(session_file, record(secured, "secret"))
    assert session_file.stat().st_mode & 0o777 == 0o600
    assert main(["list"]) == 0
    assert main(["--url", secured, "list"]) == 0
    write_session(session_file, record("http://127.0.0.1:1", "secret"))
    assert main(["list", "--url", secured]) == 6
    assert main(["list", "--url", secured, "--token", "secret"]) == 0
    assert main(["--token", "wrong", "list", "--url", secured]) == 6


@pytest.mark.parametrize("url", ["ftp://x", "http://a b:x", "http://u:p@h"])
def test_urls_that_cannot_be_one(url: str) -> None:
    assert main(["list", "--url", url]) == 2


def test_a_ca_file_that_is_missing(capsys: Capture) -> None:
    assert main(["list", "--url", "https://127.0.0.1:1", "--ca-file", "/nosuch"]) == 2
    assert "--ca-file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"rest_url": "x"}',
        json.dumps(SOUND | {"rest_url": 1}),
        json.dumps(SOUND | {"driver": {"pid": 1, "started": 1}}),
        json.dumps(SOUND | {"leader": {"pid": 5, "started": "1"}}),
        json.dumps(SOUND | {"leader": {"pid": 5}}),
    ],
)
def test_damaged_session_files_are_refused(session_file: Path, content: str) -> None:
    session_file.parent.mkdir()
    session_file.write_text(content)
    session_file.chmod(0o600)
    assert main(["list"]) == 2
    assert main(["session", "stop"]) == 2


def test_a_session_file_that_others_can_write_is_refused(secured: str, session_file: Path) -> None:
    write_session(session_file, record(secured, "secret"))
    session_file.chmod(0o666)
    assert main(["list"]) == 2


def test_status_shows_the_session_without_its_token(secured: str, session_file: Path, capsys: Capture) -> None:
    write_session(session_file, record(secured, "secret"))
    assert main(["session", "status"]) == 0
    assert "6 free of 8" in capsys.readouterr().out
    assert main(["session", "status", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rest_url"], document["pid"], document["overview"]["slots_total"]) == (secured, MY_PID, 8)
    assert "secret" not in str(document)


class FakeLaunch:
    """Stands for the functions of ``ckpt_runtime.spark.launch``, whose own tests start processes."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.started: dict[str, Any] = {}
        self.stopped: list[SessionInfo] = []
        self.fails = False

    def start_session(self, master: str, slots: int | None, **options: Any) -> SessionInfo:
        if self.fails:
            raise SessionStartError("the session ended with code 1")
        self.started = {"master": master, "slots": slots, **options}
        token = (options["token"] or "secret") if options["authenticated"] else None
        return SessionInfo(self.url, ME, ME, str(options["log_file"]), "/ready", token)

    def stop_session(self, info: SessionInfo) -> bool:
        self.stopped.append(info)
        return info.leader.is_alive


@pytest.fixture
def launch(secured: str, monkeypatch: pytest.MonkeyPatch) -> FakeLaunch:
    fake = FakeLaunch(secured)
    monkeypatch.setattr(session_commands, "start_session", fake.start_session)
    monkeypatch.setattr(session_commands, "stop_session", fake.stop_session)
    return fake


def test_start_then_use_then_stop(launch: FakeLaunch, session_file: Path, capsys: Capture) -> None:
    start = ["session", "start", "--master", "local[4]", "--slots", "4", "-D", "a.b=c"]
    assert main([*start, "--conf", "spark.x=y", "--log-file", "/tmp/log", "--ready-timeout", "5 s"]) == 0
    assert not launch.started.pop("is_given_up")()
    assert launch.started == {
        "master": "local[4]", "slots": 4, "rest_port": 0, "token": None, "authenticated": True, "conf": {"a.b": "c"},
        "spark_conf": {"spark.x": "y"}, "log_file": Path("/tmp/log"), "ready_timeout_s": 5.0, "rest_host": "127.0.0.1",
        "work_directory": session_file.with_name("session.work"),
    }  # fmt: skip
    assert "secret" not in capsys.readouterr().out
    assert read_session(session_path()) == record(launch.url, "secret", log="/tmp/log")
    assert main(["list"]) == 0
    assert main(start) == 5
    assert main(["session", "stop"]) == 0
    assert [info.pid for info in launch.stopped] == [MY_PID]
    assert not session_file.exists()


def test_files_of_a_session_are_in_the_directory_of_its_session_file(
    launch: FakeLaunch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    logs = set()
    for name in ("session.json", "other.json", "third"):
        monkeypatch.setenv("CKPT_SESSION_FILE", str(tmp_path / name))
        assert main(["session", "start"]) == 0
        logs.add((launch.started["log_file"], launch.started["work_directory"]))
    assert logs == {(tmp_path / f"{name}.log", tmp_path / f"{name}.work") for name in ("session", "other", "third")}


def test_driver_whose_jvm_has_ended_still_is_the_session(launch: FakeLaunch, session_file: Path) -> None:
    write_session(session_file, record(launch.url, leader=GONE))
    assert main(["session", "start"]) == 5
    write_session(session_file, record(launch.url, leader=GONE, driver=GONE))
    assert main(["session", "start"]) == 0


def test_token_is_required_and_a_secret_of_sparks_is_refused_on_the_command_line(
    launch: FakeLaunch, capsys: Capture
) -> None:
    assert main(["session", "start", "--conf", "spark.authenticate.secret=hidden"]) == 2
    said = capsys.readouterr().err
    assert "spark-defaults.conf" in said
    assert "hidden" not in said
    assert launch.started == {}
    assert main(["session", "start", "--no-token", "--rest-host", "0.0.0.0"]) == 2
    assert main(["session", "start", "--no-token", "--token", "secret"]) == 2
    assert launch.started == {}
    assert main(["session", "start", "--no-token"]) == 0
    assert launch.started["authenticated"] is False


@pytest.mark.parametrize(
    ("definition", "hint"),
    [
        ("executon.checkpointing.interval=10 s", "did you mean execution.checkpointing.interval?"),
        ("execution.checkpointing.intervall=10 s", "did you mean execution.checkpointing.interval"),
        ("rest-port=8081", "did you mean rest.port?"),
        ("rest.port=many", "'many' is not acceptable"),
        ("spark.cores.max=4", "as --conf or in spark_conf, because it is an option of Spark"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_before_anything_starts(
    launch: FakeLaunch, capsys: Capture, definition: str, hint: str
) -> None:
    assert main(["session", "start", "-D", definition]) == 2
    assert launch.started == {}
    refusal = capsys.readouterr().err
    assert hint in refusal
    assert definition.partition("=")[0] in refusal


@pytest.mark.parametrize("option", [["--log-file", "x"], ["--ready-timeout", "1 min"]])
def test_options_of_a_detached_start_are_refused_in_the_foreground(
    launch: FakeLaunch, capsys: Capture, option: list[str]
) -> None:
    assert main(["session", "start", "--foreground", *option]) == 2
    assert f"{option[0]}: it cannot be given together with --foreground" in capsys.readouterr().err


def test_the_version_is_printed_without_a_job_manager(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"ckpt {VERSION}\n"


def test_a_session_that_does_not_start(launch: FakeLaunch, session_file: Path) -> None:
    launch.fails = True
    assert main(["session", "start"]) == 1
    assert not session_file.exists()


def test_another_session_is_ended_over_rest(url: str, gateway: FakeGateway) -> None:
    assert main(["session", "stop", "--url", url]) == 0
    assert gateway.shut_down


def test_output_whose_reader_has_closed_it_gives_no_traceback(url: str) -> None:
    code = "import sys; from ckpt_runtime.cli.main import main; sys.exit(main(['list', '-a']))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CKPT_REST_URL": url}
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, env=environment, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def lead(directory: Path, url: str, token: str, cluster: str = "default") -> None:
    HaStore(str(directory), cluster).leader.signed_by(LeaseSignature(token, cluster)).claim(url, "app", "1", after=0)


def test_the_leader_is_found_in_its_directory(
    secured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lead(tmp_path / "ha", secured, "secret")
    lead(tmp_path / "ha", secured, "secret", "trains")
    assert main(["list", "--ha-dir", str(tmp_path / "ha"), "--token", "secret"]) == 0
    monkeypatch.setenv("CKPT_REST_TOKEN", "secret")
    monkeypatch.setenv("CKPT_HA_DIR", str(tmp_path / "ha"))
    assert main(["list"]) == 0
    monkeypatch.setenv("CKPT_CLUSTER_ID", "trains")
    assert main(["--json", "session", "status"]) == 0
    assert secured in capsys.readouterr().out


def test_options_on_the_command_line_override_the_environment(
    secured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    lead(tmp_path / "ha", secured, "secret")
    monkeypatch.setenv("CKPT_REST_TOKEN", "secret")
    monkeypatch.setenv("CKPT_REST_URL", "127.0.0.1:1")
    for arguments in (["--ha-dir", str(tmp_path / "ha"), "list"], ["list", "--ha-dir", str(tmp_path / "ha")]):
        assert main(arguments) == 0
    monkeypatch.setenv("CKPT_HA_DIR", "/nowhere")
    assert main(["list", "--url", secured]) == 0
    assert main(["list"]) == 2
    assert "only one of them can be given" in capsys.readouterr().err
    assert main(["list", "--url", secured, "--ha-dir", str(tmp_path / "ha")]) == 2


def test_token_of_the_session_file_is_sent_to_a_leader_with_the_same_token(
    secured: str, session_file: Path, tmp_path: Path, capsys: Capture
) -> None:
    lead(tmp_path / "ha", secured, "secret")
    write_session(session_file, record("http://127.0.0.1:1", "secret"))
    assert main(["list", "--ha-dir", str(tmp_path / "ha")]) == 0
    write_session(session_file, record("http://127.0.0.1:1", "of another session"))
    assert main(["list", "--ha-dir", str(tmp_path / "ha")]) == 6
    assert "does not prove its leader's address" in capsys.readouterr().err
    assert main(["list", "--ha-dir", "relative"]) == 2
