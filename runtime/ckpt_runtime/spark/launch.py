"""Starts a session, detached or in place of this process, and stops it again. Does not import pyspark."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn, TypedDict, Unpack

import msgspec

from ckpt_runtime.client.private_files import PRIVATE_UMASK, append_private, write_private
from ckpt_runtime.client.process_id import ProcessId
from ckpt_runtime.client.session_command import (
    NO_AUTHENTICATION,
    TOKEN_VARIABLE,
    SessionFiles,
    configuration_text,
    driver_command,
    properties_text,
    session_command,
    session_environment,
)

POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
KILL_AFTER_S = 10.0
LOCAL_SLOTS = 2
TERMINATION = (signal.SIGTERM, signal.SIGINT)
LOOPBACK = "127.0.0.1"

_TOKEN_OPTION = "rest.token"
_TOKEN_FILE_OPTION = "rest.token-file"


class SessionStartError(RuntimeError):
    """The session did not start; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A running session. Its driver writes it to ``session_file`` when it leads, and removes the file when it ends.

    ``driver`` is the driver's Python process. ``leader`` leads the process group: it is spark-submit, or the driver
    itself in the foreground. ``log_file`` is empty if the output does not go to a known file. ``token`` is None for a
    session without authentication.
    """

    rest_url: str
    leader: ProcessId
    driver: ProcessId
    log_file: str
    session_file: str
    token: str | None = None

    @property
    def pid(self) -> int:
        """The pid of ``leader``, which is the id of the process group."""
        return self.leader.pid

    @property
    def is_alive(self) -> bool:
        """Whether one of its processes still runs: the driver may outlive Spark's JVM for a moment."""
        return self.leader.is_alive or self.driver.is_alive


class SessionSettings(TypedDict, total=False):
    """The settings of a session to be started, besides its Spark master and its slots.

    If no token is given here or in ``conf``, one is generated, unless ``authenticated`` is False.
    """

    rest_host: str
    rest_port: int
    token: str | None
    authenticated: bool
    conf: dict[str, str]
    spark_conf: dict[str, str]
    work_directory: Path | None


def start_session(
    master: str,
    slots: int | None,
    *,
    log_file: Path,
    ready_timeout_s: float = 120.0,
    is_given_up: Callable[[], bool] = lambda: False,
    **settings: Unpack[SessionSettings],
) -> SessionInfo:
    """Launch the session and wait until it leads. Its other files are created beside ``log_file``, all private.

    ``master`` is a Spark master URL; ``local`` becomes ``local[slots]``, so that there are that many task slots (they
    may outnumber the cores). On a standalone master, ``slots`` limits the application's slots by ``spark.cores.max``;
    None sets no limit. Other masters have settings of their own for that.

    The token is passed in the environment and all options in files, because every user can read a command line. Raises
    SessionCommandError, or SessionStartError if the session does not start or ``is_given_up`` returns True; in that
    case everything that was started has been ended.
    """
    log_file = log_file.absolute()
    ready_file = log_file.with_suffix(".ready.json")
    ready_file.unlink(missing_ok=True)
    files = _files(log_file, settings, log=str(log_file), ready=str(ready_file))
    master = _spark_master(master, slots)
    command = session_command(
        master, rest_host=settings.get("rest_host", LOOPBACK), rest_port=settings.get("rest_port", 0), files=files
    )
    with _prepared(master, slots, files, settings) as environment, append_private(log_file) as log:
        # Earlier sessions have written to the log as well, and their last lines could be mistaken for this session's.
        begin = log.tell()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=PRIVATE_UMASK,
            env=environment,
        )
        try:
            return _wait_until_ready(process, ready_file, _Log(log_file, begin), ready_timeout_s, is_given_up)
        except BaseException:
            _end_group(process)
            ready_file.unlink(missing_ok=True)
            raise


def become_session(
    master: str, slots: int | None, *, session_file: Path, **settings: Unpack[SessionSettings]
) -> NoReturn:
    """Replace this process by the session's driver, which receives the signals and determines the exit code.

    ``master`` and ``slots`` are those of :func:`start_session`. Raises SessionCommandError and OSError.
    """
    files = _files(session_file, settings, log=None, ready=str(session_file))
    master = _spark_master(master, slots)
    command, variables = driver_command(
        master, rest_host=settings.get("rest_host", LOOPBACK), rest_port=settings.get("rest_port", 0), files=files
    )
    session_file.unlink(missing_ok=True)
    # Signals that arrive during this stay pending for the driver, which unblocks them as soon as it has handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, TERMINATION)
    try:
        with _prepared(master, slots, files, settings) as environment:
            os.umask(PRIVATE_UMASK)
            os.execve(command[0], command, environment | variables)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, TERMINATION)


def _spark_master(master: str, slots: int | None) -> str:
    return f"local[{slots or LOCAL_SLOTS}]" if master in ("local", "local[*]") else master


def _files(base: Path, settings: SessionSettings, *, log: str | None, ready: str) -> SessionFiles:
    work = settings.get("work_directory")
    return SessionFiles(
        properties=str(base.with_suffix(".spark.conf")),
        log=log,
        ready=ready,
        work=None if work is None else str(work),
        configuration=str(base.with_suffix(".options.json")),
    )


@contextmanager
def _prepared(
    master: str, slots: int | None, files: SessionFiles, settings: SessionSettings
) -> Iterator[dict[str, str]]:
    """Write the options to the session's files and yield its environment; the files are removed afterwards."""
    conf, spark_conf = dict(settings.get("conf", {})), settings.get("spark_conf", {})
    token = settings.get("token")
    if settings.get("authenticated", True):
        token = token or _configured_token(conf) or secrets.token_urlsafe(32)
        conf.pop(_TOKEN_OPTION, None)
    else:
        conf |= NO_AUTHENTICATION
    properties_file, configuration_file = Path(files.properties), Path(files.configuration or "")
    inherited = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    try:
        write_private(
            properties_file, properties_text(master, {**_slot_settings(master, slots, spark_conf), **spark_conf})
        )
        write_private(configuration_file, configuration_text(conf))
        yield {**inherited, **session_environment(master, token)}
    finally:
        properties_file.unlink(missing_ok=True)
        configuration_file.unlink(missing_ok=True)


def _configured_token(conf: dict[str, str]) -> str | None:
    file = conf.get(_TOKEN_FILE_OPTION)
    return conf.get(_TOKEN_OPTION) if file is None else Path(file).read_text().strip()


def _slot_settings(master: str, slots: int | None, spark_conf: dict[str, str]) -> dict[str, str]:
    """The settings that limit the slots. A task takes ``spark.task.cpus`` cores; Spark validates that value."""
    if slots is None or not master.startswith("spark://"):
        return {}
    cpus = spark_conf.get("spark.task.cpus", "1")
    return {"spark.cores.max": str(slots * int(cpus))} if cpus.isdecimal() else {}


def stop_session(info: SessionInfo, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """End a session and everything it started; False if the session had already ended. The signal is sent to the
    driver, which shuts down cleanly even if Spark's JVM has already ended. spark-submit's own process would abandon the
    driver.
    """
    if not info.is_alive:
        return False
    (info.driver if info.driver.is_alive else info.leader).signal(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while info.is_alive and time.monotonic() < deadline:
        time.sleep(POLL_S)
    info.driver.signal(signal.SIGKILL)
    _signal_group(info.pid, signal.SIGKILL)
    Path(info.session_file).unlink(missing_ok=True)
    return True


@dataclass(frozen=True, slots=True)
class _Log:
    """A log to which earlier sessions may have written: this session's part begins at byte ``begin``."""

    path: Path
    begin: int

    def tail(self, lines: int = 20) -> str:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _wait_until_ready(
    process: subprocess.Popen[bytes], ready_file: Path, log: _Log, timeout_s: float, is_given_up: Callable[[], bool]
) -> SessionInfo:
    leader = ProcessId.of(process.pid)
    deadline = time.monotonic() + timeout_s
    while is_given_up() or not ready_file.exists():
        if process.poll() is not None:
            raise SessionStartError(f"the session ended with code {process.returncode}:\n{log.tail()}")
        if is_given_up():
            raise SessionStartError("interrupted before the session was ready; it was ended")
        if time.monotonic() > deadline:
            raise SessionStartError(f"the session was not ready within {timeout_s:g} s:\n{log.tail()}")
        time.sleep(POLL_S)
    return replace(msgspec.json.decode(ready_file.read_bytes(), type=SessionInfo), leader=leader)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Terminate spark-submit and the driver, so that they remove their temporary files; kill them if they remain."""
    _signal_group(process.pid, signal.SIGTERM)
    deadline = time.monotonic() + KILL_AFTER_S
    while _has_members(process) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _has_members(group: subprocess.Popen[bytes]) -> bool:
    group.poll()  # the leader stays a member until it is reaped
    try:
        os.killpg(group.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
