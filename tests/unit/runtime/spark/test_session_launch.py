"""Starting and stopping a session, with a small script in the place of spark-submit; and a session's command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.client.process_id import ProcessId
from ckpt_runtime.configuration.option import ConfigurationError
from ckpt_runtime.spark import launch, session
from ckpt_runtime.spark.launch import SessionInfo, SessionStartError, start_session, stop_session
from ckpt_runtime.spark.session import TOKEN_VARIABLE, parse_arguments
from tests.support.processes import living
from tests.support.spark_sessions import wait_until

READY = """
import json, signal
def option(name): return sys.argv[sys.argv.index(name) + 1]
ready = sys.argv[sys.argv.index("--ready-file") + 1]
properties = option("--properties-file")
json.dump({
    "argv": sys.argv[1:], "token": os.environ.get("CKPT_REST_TOKEN"), "umask": os.environ.get("CKPT_UMASK"),
    "options": json.load(open(option("--configuration-file"))),
    "properties": open(properties).read(), "mode": os.stat(properties).st_mode & 0o777,
}, open(ready + ".seen", "w"))
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
started = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
me = {"pid": os.getpid(), "started": started}
document = {"rest_url": "http://127.0.0.1:8081", "leader": me, "driver": me, "log_file": "", "session_file": ready}
document["token"] = os.environ.get("CKPT_REST_TOKEN")
json.dump(document, open(ready + ".partial", "w"))
os.rename(ready + ".partial", ready)
while True:
    signal.pause()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "POLL_S", 0.005)


@pytest.fixture
def log_file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "session.log"


def use_spark_submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    script = tmp_path / "spark" / "bin" / "spark-submit"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!{sys.executable} -IS\nimport os, sys\n{body}\n")
    script.chmod(0o755)
    monkeypatch.setenv("SPARK_HOME", str(tmp_path / "spark"))


def seen(info: SessionInfo) -> dict[str, object]:
    document: dict[str, object] = json.loads(Path(info.session_file + ".seen").read_text())
    return document


def test_a_session_starts_says_where_it_is_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path
) -> None:
    use_spark_submit(tmp_path, monkeypatch, READY)
    monkeypatch.setenv(TOKEN_VARIABLE, "of the surroundings")
    info = start_session(
        "local", 3, log_file=log_file, token="t0ken", conf={"parallelism.default": "2", "my.db.password": "hush"},
        spark_conf={"spark.x": "y"}, rest_port=9, work_directory=tmp_path / "work",
    )  # fmt: skip
    try:
        assert info.rest_url == "http://127.0.0.1:8081"
        reported = seen(info)
        arguments = reported["argv"]
        assert isinstance(arguments, list)
        assert arguments[arguments.index("--master") + 1] == "local[3]"
        assert reported["properties"] == "spark.ui.enabled=false\nspark.x=y\n"
        assert reported["mode"] == 0o600
        assert not Path(arguments[arguments.index("--properties-file") + 1]).exists()
        assert reported["options"] == {"parallelism.default": "2", "my.db.password": "hush"}
        assert not Path(arguments[arguments.index("--configuration-file") + 1]).exists()
        assert "hush" not in str(arguments)
        assert arguments[arguments.index("--rest-port") + 1] == "9"
        assert arguments[arguments.index("--work-dir") + 1] == str(tmp_path / "work")
        assert reported["token"] == "t0ken"
        assert not any("t0ken" in str(argument) for argument in arguments)
        assert [path for path in log_file.parent.iterdir() if path.stat().st_mode & 0o077] == []
        assert log_file.parent.stat().st_mode & 0o777 == 0o700
    finally:
        assert stop_session(info)
    assert not Path(info.session_file).exists()
    assert not stop_session(info)


def test_a_session_makes_up_a_token_unless_it_is_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path
) -> None:
    use_spark_submit(tmp_path, monkeypatch, READY)
    tokens = set()
    for _ in range(2):
        info = start_session("local", 1, log_file=log_file)
        try:
            assert info.token
            tokens.add((info.token, seen(info)["token"]))
        finally:
            stop_session(info)
    assert len(tokens) == 2
    assert all(reported == given and len(given) >= 40 for reported, given in tokens)


def test_a_configured_token_is_the_sessions_and_leaves_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path
) -> None:
    use_spark_submit(tmp_path, monkeypatch, READY)
    info = start_session("local", 1, log_file=log_file, conf={"rest.token": "t0ken"})
    try:
        assert info.token == seen(info)["token"] == "t0ken"
        assert "t0ken" not in str(seen(info)["argv"])
    finally:
        stop_session(info)


def test_a_driver_that_outlived_its_jvm_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path
) -> None:
    use_spark_submit(tmp_path, monkeypatch, READY)
    info = start_session("local", 1, log_file=log_file)
    gone = subprocess.Popen([sys.executable, "-ISc", ""])
    leader = ProcessId.of(gone.pid)
    gone.wait()
    assert stop_session(replace(info, leader=leader))
    assert not info.driver.is_alive


def test_a_pid_without_its_start_time_identifies_no_process(tmp_path: Path) -> None:
    """The pid of this very test, had it been the session's before."""
    me = ProcessId(os.getpid(), ProcessId.of(os.getpid()).started - 1)  # type: ignore[operator]
    assert not stop_session(SessionInfo("", me, me, "", str(tmp_path / "absent.json")))


def test_a_failed_start_shows_its_own_log_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path) -> None:
    log_file.parent.mkdir(parents=True)
    log_file.write_text("of an earlier session\n")
    use_spark_submit(tmp_path, monkeypatch, "print('no barrier for you')\nsys.exit(3)")
    with pytest.raises(SessionStartError, match="no barrier for you") as failed:
        start_session("local", 1, log_file=log_file)
    assert "earlier" not in str(failed.value)
    assert "earlier" in log_file.read_text()
    assert sorted(path.name for path in log_file.parent.iterdir()) == [log_file.name]


def test_a_log_that_is_a_hard_link_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path
) -> None:
    use_spark_submit(tmp_path, monkeypatch, READY)
    log_file.parent.mkdir(parents=True)
    log_file.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError):
        start_session("local", 1, log_file=log_file)
    assert not (tmp_path / "precious").exists()


def test_an_open_session_has_no_token_and_inherits_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path
) -> None:
    use_spark_submit(tmp_path, monkeypatch, READY)
    monkeypatch.setenv(TOKEN_VARIABLE, "of the surroundings")
    info = start_session("spark://host:7077", 3, log_file=log_file, authenticated=False)
    try:
        reported = seen(info)
        assert reported["token"] is None
        assert reported["options"] == {"rest.authentication": "NONE"}
        assert "spark://host:7077" in str(reported["argv"])
    finally:
        stop_session(info)


@pytest.mark.parametrize(
    ("master", "slots", "given", "expected"),
    [
        ("spark://host:7077", 3, {}, ["spark.cores.max=3"]),
        ("spark://host:7077", 3, {"spark.task.cpus": "2"}, ["spark.cores.max=6"]),
        ("spark://host:7077", 3, {"spark.cores.max": "8"}, ["spark.cores.max=8"]),
        ("spark://host:7077", None, {}, []),
        ("yarn", 3, {}, []),
        ("local", None, {}, []),
    ],
)
def test_slots_limit_the_cores_taken_from_a_standalone_master(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path,
    master: str, slots: int | None, given: dict[str, str], expected: list[str],
) -> None:  # fmt: skip
    use_spark_submit(tmp_path, monkeypatch, READY)
    info = start_session(master, slots, log_file=log_file, spark_conf=given)
    try:
        reported = seen(info)
        arguments = reported["argv"]
        assert isinstance(arguments, list)
        assert [line for line in str(reported["properties"]).splitlines() if "spark.cores.max" in line] == expected
        assert arguments[arguments.index("--master") + 1] == ("local[2]" if master == "local" else master)
    finally:
        stop_session(info)


def test_a_start_that_fails_shows_the_end_of_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path
) -> None:
    use_spark_submit(tmp_path, monkeypatch, "for n in range(50): print('line', n)\nsys.exit(3)")
    with pytest.raises(SessionStartError, match="code 3") as failed:
        start_session("local", 1, log_file=log_file)
    assert "line 49" in str(failed.value)
    assert "line 10" not in str(failed.value)


def test_session_that_is_not_ready_in_time_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_file: Path
) -> None:
    use_spark_submit(tmp_path, monkeypatch, "import signal\nprint(os.getpid(), flush=True)\nsignal.pause()")
    with pytest.raises(SessionStartError, match="not ready within"):
        start_session("local", 1, log_file=log_file, ready_timeout_s=0.5)
    written = log_file.read_text().split()
    if written:
        with pytest.raises(ProcessLookupError):
            os.kill(int(written[0]), 0)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_start_that_is_interrupted_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    """The JVM and the driver below it both are asked to end before they are killed."""
    lines = "\n".join(
        [
            f"import signal; DIRECTORY = {str(tmp_path)!r}",
            "driver = os.fork()",
            "def end(*_): open(os.path.join(DIRECTORY, str(os.getpid())), 'w').close(); os._exit(0)",
            "signal.signal(signal.SIGTERM, end)",
            "print(os.getppid() if driver == 0 else '-', os.getpid(), flush=True)",
            "while True: signal.pause()",
        ]
    )
    use_spark_submit(tmp_path, monkeypatch, lines)
    log = tmp_path / "session.log"
    command = [sys.executable, "-m", "ckpt_runtime.cli", "session", "start", "--log-file", str(log)]
    environment = os.environ | {"CKPT_SESSION_FILE": str(tmp_path / "session.json")}
    starting = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: log.exists() and log.read_text().count("\n") == 2, "both processes to run")
    started = [int(line.split()[1]) for line in log.read_text().splitlines()]
    starting.send_signal(number)
    _, refusal = starting.communicate(timeout=30)
    assert starting.returncode == code
    assert "interrupted before the session was ready" in refusal
    assert all((tmp_path / str(pid)).exists() for pid in started)
    assert not living(started)
    assert not (tmp_path / "session.json").exists()


def test_stop_of_an_ended_session_reports_its_end(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-ISc", ""])
    gone = ProcessId.of(process.pid)
    process.wait()
    info = SessionInfo("", gone, gone, "", str(tmp_path / "absent.json"))
    assert not stop_session(info)


class TestArguments:
    def test_the_command_line_wins_over_options(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
        monkeypatch.chdir(tmp_path)
        given = ["--rest-port", "0", "--work-dir", "work", "--ready-file", "r", "-D", "rest.port=9000"]
        options = parse_arguments(given)
        assert (options.rest_port, options.rest_host) == (0, "127.0.0.1")
        assert options.work_directory == tmp_path / "work"
        assert options.ready_file == Path("r")
        assert options.token is None

    def test_options_serve_where_nothing_is_given(self, tmp_path: Path) -> None:
        options = parse_arguments(["--work-dir", str(tmp_path), "-D", "rest.port=9000"])
        assert options.rest_port == 9000

    def test_the_token_leaves_the_environment(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(TOKEN_VARIABLE, "t")
        assert parse_arguments(["--work-dir", str(tmp_path)]).token == "t"
        assert TOKEN_VARIABLE not in os.environ

    def test_a_token_that_no_client_could_send_is_refused(self, tmp_path: Path) -> None:
        command = [sys.executable, "-m", "ckpt_runtime.spark.session_main", "--work-dir", str(tmp_path)]
        environment = os.environ | {TOKEN_VARIABLE: "two\nlines"}
        refused = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)
        assert refused.returncode == 1
        reason = "CKPT_REST_TOKEN, rest.token-file or rest.token: a token is not empty, consists of ASCII"
        assert f"the session does not start: {reason}" in refused.stderr

    @pytest.mark.parametrize(
        "properties", [["no-equals-sign"], ["rest.port=many"], ["heartbeat.intervall=1 s"], ["=x"]]
    )
    def test_bad_options_are_refused(self, tmp_path: Path, properties: list[str]) -> None:
        arguments = [argument for given in properties for argument in ("-D", given)]
        with pytest.raises(ConfigurationError):
            parse_arguments(["--work-dir", str(tmp_path), *arguments])

    @pytest.mark.parametrize("arguments", [["--rest-port", "x"], ["--unknown"], ["stray"]])
    def test_a_malformed_command_line_is_refused(self, arguments: list[str]) -> None:
        with pytest.raises(SystemExit):
            parse_arguments(arguments)


def test_options_come_from_a_file_that_is_read_once(tmp_path: Path) -> None:
    file = tmp_path / "options.json"
    file.write_text('{"parallelism.default": "2", "env.log.max": "3"}')
    options = parse_arguments(["--configuration-file", str(file), "-D", "env.log.max=4", "--work-dir", str(tmp_path)])
    assert options.configuration.to_dict() == {"parallelism.default": "2", "env.log.max": "4"}
    assert not file.exists()


def test_retained_checkpoints_in_a_temporary_work_directory_stay(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name / "uploads").mkdir(parents=True)
        (tmp_path / name / "uploads" / "program").touch()
        (tmp_path / name / "checkpoints").mkdir()
    (tmp_path / "second" / "checkpoints" / "job").mkdir()
    for name in ("first", "second"):
        session._keep_snapshots(tmp_path / name)
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == [
        "second", "second/checkpoints", "second/checkpoints/job",
    ]  # fmt: skip
