"""Starts a session as a detached ``spark-submit`` and stops it again. Imports no pyspark."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ckpt_runtime.client.private_files import write_private
from ckpt_runtime.client.session_command import (
    TOKEN_VARIABLE,
    configuration_text,
    session_command,
    session_environment,
)

POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
LOCAL_SLOTS = 2


class SessionStartError(RuntimeError):
    """The session did not come up; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A running session. ``pid`` is the leader of its process group; ``session_file`` is removed when it ends."""

    rest_url: str
    pid: int
    log_file: str
    session_file: str

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def start_session(
    master: str,
    slots: int | None,
    *,
    rest_port: int = 0,
    token: str | None = None,
    conf: dict[str, str] | None = None,
    spark_conf: dict[str, str] | None = None,
    log_file: Path,
    ready_timeout_s: float = 120.0,
    rest_host: str = "127.0.0.1",
    work_directory: Path | None = None,
) -> SessionInfo:
    """Launches the session and waits until its REST API answers.

    ``master`` is a Spark master URL; ``local`` becomes ``local[slots]``, since a barrier stage needs that many free
    task slots at once (they may outnumber the cores). On a standalone master ``slots`` is how many the application may
    take, by way of ``spark.cores.max``; None leaves all to it. Other masters have settings of their own for that. The
    token travels in the environment and the options in a file, never on a command line. Raises SessionCommandError, or
    SessionStartError after killing what was started.
    """
    log_file = log_file.absolute()
    log_file.parent.mkdir(parents=True, exist_ok=True)
    ready_file = log_file.with_suffix(".ready.json")
    ready_file.unlink(missing_ok=True)
    configuration_file = log_file.with_suffix(".options.json") if conf else None
    command = session_command(
        f"local[{slots or LOCAL_SLOTS}]" if master in ("local", "local[*]") else master,
        rest_host=rest_host,
        rest_port=rest_port,
        spark_conf={**_slot_settings(master, slots, spark_conf or {}), **(spark_conf or {})},
        configuration_file=None if configuration_file is None else str(configuration_file),
        work_directory=None if work_directory is None else str(work_directory),
        ready_file=str(ready_file),
    )
    inherited = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    environment = {**inherited, **session_environment(master, token)}
    if configuration_file is not None:
        write_private(configuration_file, configuration_text(conf or {}))
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
    try:
        return _wait_until_ready(process, ready_file, log_file, ready_timeout_s)
    except BaseException:
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        if configuration_file is not None:
            configuration_file.unlink(missing_ok=True)
        raise


def _slot_settings(master: str, slots: int | None, spark_conf: dict[str, str]) -> dict[str, str]:
    """A task takes ``spark.task.cpus`` cores; its value is Spark's to check."""
    if slots is None or not master.startswith("spark://"):
        return {}
    cpus = spark_conf.get("spark.task.cpus", "1")
    return {"spark.cores.max": str(slots * int(cpus))} if cpus.isdecimal() else {}


def stop_session(info: SessionInfo, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Ends a session and everything it started; False when it was gone already."""
    if not _alive(info.pid):
        return False
    _signal(_driver_pid(info), signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while _alive(info.pid) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal_group(info.pid, signal.SIGKILL)
    Path(info.session_file).unlink(missing_ok=True)
    return True


def _wait_until_ready(
    process: subprocess.Popen[bytes], ready_file: Path, log_file: Path, timeout_s: float
) -> SessionInfo:
    deadline = time.monotonic() + timeout_s
    while not ready_file.exists():
        if process.poll() is not None:
            raise SessionStartError(f"the session ended with code {process.returncode}:\n{_tail(log_file)}")
        if time.monotonic() > deadline:
            raise SessionStartError(f"the session was not ready within {timeout_s:g} s:\n{_tail(log_file)}")
        time.sleep(POLL_S)
    ready = json.loads(ready_file.read_text())
    return SessionInfo(ready["rest_url"], process.pid, str(log_file), str(ready_file))


def _tail(log_file: Path, lines: int = 20) -> str:
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-lines:])


def _alive(pid: int) -> bool:
    with suppress(ChildProcessError):
        waited, _ = os.waitpid(pid, os.WNOHANG)
        if waited == pid:
            return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return _state_of(pid) != "Z"


def _state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "?"


def _driver_pid(info: SessionInfo) -> int:
    """The Python driver, which ends in good order; spark-submit's own process would just drop it."""
    try:
        pid: int = json.loads(Path(info.session_file).read_text())["driver_pid"]
        return pid
    except (OSError, ValueError, KeyError):
        return info.pid


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
