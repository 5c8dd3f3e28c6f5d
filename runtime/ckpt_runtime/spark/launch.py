"""Starts a session as a detached ``spark-submit`` and stops it again. Imports no pyspark."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_runtime.client.private_files import PRIVATE_UMASK, append_private, write_private
from ckpt_runtime.client.process_id import ProcessId
from ckpt_runtime.client.session_command import (
    NO_AUTHENTICATION,
    TOKEN_VARIABLE,
    SessionFiles,
    configuration_text,
    properties_text,
    session_command,
    session_environment,
)

POLL_S = 0.1
STOP_TIMEOUT_S = 30.0
LOCAL_SLOTS = 2

_TOKEN_OPTION = "rest.token"
_TOKEN_FILE_OPTION = "rest.token-file"


class SessionStartError(RuntimeError):
    """The session did not come up; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A running session. ``leader`` leads its process group, ``driver`` is its Python process.

    ``session_file`` tells where it answers, and is removed when it ends. ``token`` is None for one that asks for none.
    """

    rest_url: str
    leader: ProcessId
    driver: ProcessId
    log_file: str
    session_file: str
    token: str | None = None

    @property
    def pid(self) -> int:
        """Of the leader: the id of the process group."""
        return self.leader.pid

    @property
    def is_alive(self) -> bool:
        """Whether one of its processes still runs: a driver may outlive Spark's JVM, if only for a moment."""
        return self.leader.is_alive or self.driver.is_alive


def new_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def start_session(
    master: str,
    slots: int | None,
    *,
    rest_port: int = 0,
    token: str | None = None,
    authenticated: bool = True,
    conf: dict[str, str] | None = None,
    spark_conf: dict[str, str] | None = None,
    log_file: Path,
    ready_timeout_s: float = 120.0,
    rest_host: str = "127.0.0.1",
    work_directory: Path | None = None,
) -> SessionInfo:
    """Launches the session and waits until it leads. Beside ``log_file`` lie its other files, all private.

    ``master`` is a Spark master URL; ``local`` becomes ``local[slots]``, so that there are that many
    task slots (they may outnumber the cores). On a standalone master ``slots`` is how many the application may
    take, by way of ``spark.cores.max``; None leaves all to it. Other masters have settings of their own for that.

    Without a token, here or in ``conf``, one is made up, unless the session is not to be ``authenticated``. It travels
    in the environment, and all options in files: everybody can read a command line. Raises SessionCommandError,
    or SessionStartError after killing what was started.
    """
    log_file = log_file.absolute()
    ready_file, properties_file = log_file.with_suffix(".ready.json"), log_file.with_suffix(".spark.conf")
    configuration_file = log_file.with_suffix(".options.json")
    ready_file.unlink(missing_ok=True)
    conf = dict(conf or {})
    if authenticated:
        token = token or _configured_token(conf) or new_token()
        conf.pop(_TOKEN_OPTION, None)
    command = session_command(
        f"local[{slots or LOCAL_SLOTS}]" if master in ("local", "local[*]") else master,
        rest_host=rest_host,
        rest_port=rest_port,
        files=_files(log_file, ready_file, properties_file, configuration_file, work_directory),
    )
    inherited = {key: value for key, value in os.environ.items() if key != TOKEN_VARIABLE}
    settings = {**_slot_settings(master, slots, spark_conf or {}), **(spark_conf or {})}
    write_private(properties_file, properties_text(master, settings))
    write_private(configuration_file, configuration_text(conf if authenticated else {**conf, **NO_AUTHENTICATION}))
    try:
        with append_private(log_file) as log:
            # Earlier sessions have written to it as well, and their last lines would be shown for this one's.
            begin = log.tell()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=PRIVATE_UMASK,
                env={**inherited, **session_environment(master, token)},
            )
        try:
            return _wait_until_ready(process, ready_file, _Log(log_file, begin), ready_timeout_s, token)
        except BaseException:
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            ready_file.unlink(missing_ok=True)
            raise
    finally:
        properties_file.unlink(missing_ok=True)
        configuration_file.unlink(missing_ok=True)


def _files(log: Path, ready: Path, properties: Path, configuration: Path, work: Path | None) -> SessionFiles:
    return SessionFiles(
        properties=str(properties),
        log=str(log),
        ready=str(ready),
        work=None if work is None else str(work),
        configuration=str(configuration),
    )


def _configured_token(conf: dict[str, str]) -> str | None:
    file = conf.get(_TOKEN_FILE_OPTION)
    return conf.get(_TOKEN_OPTION) if file is None else Path(file).read_text().strip()


def _slot_settings(master: str, slots: int | None, spark_conf: dict[str, str]) -> dict[str, str]:
    """A task takes ``spark.task.cpus`` cores; its value is Spark's to check."""
    if slots is None or not master.startswith("spark://"):
        return {}
    cpus = spark_conf.get("spark.task.cpus", "1")
    return {"spark.cores.max": str(slots * int(cpus))} if cpus.isdecimal() else {}


def stop_session(info: SessionInfo, timeout_s: float = STOP_TIMEOUT_S) -> bool:
    """Ends a session and everything it started; False when it was gone already.

    The driver is asked: it ends in good order, also when Spark's JVM is gone already; spark-submit's own process would
    just drop it.
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
    """A log that earlier sessions may have written to as well: this one began at byte ``begin``."""

    path: Path
    begin: int

    def tail(self, lines: int = 20) -> str:
        with self.path.open("rb") as file:
            file.seek(self.begin)
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


def _wait_until_ready(
    process: subprocess.Popen[bytes], ready_file: Path, log: _Log, timeout_s: float, token: str | None
) -> SessionInfo:
    leader = ProcessId.of(process.pid)
    deadline = time.monotonic() + timeout_s
    while not ready_file.exists():
        if process.poll() is not None:
            raise SessionStartError(f"the session ended with code {process.returncode}:\n{log.tail()}")
        if time.monotonic() > deadline:
            raise SessionStartError(f"the session was not ready within {timeout_s:g} s:\n{log.tail()}")
        time.sleep(POLL_S)
    ready = json.loads(ready_file.read_text())
    driver = ProcessId(ready["driver_pid"], ready["driver_started"])
    return SessionInfo(ready["rest_url"], leader, driver, str(log.path), str(ready_file), token)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
