"""Processes on the worker: a detached session, the submit command of a Spark connection, the offline snapshot tools.

A session's process is started in its own process session, so it outlives the Airflow task that started it. An id in
its environment marks it: a task that died between starting the process and recording its pid finds it by that. The
token travels in the environment as well, never on a command line. The offline tools run as ``ckpt snapshot ...``, which
needs the extra ``runtime`` on the worker and has to reach the storage; the data that they decode stays out of Airflow's
process. This module never calls the REST API.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowException

from airflow_provider_ckpt.conditions.base import Log
from airflow_provider_ckpt.exceptions import (
    CkptArgumentInvalid,
    CkptNotFound,
    CkptOperationFailed,
    CkptRequestRejected,
    CkptSnapshotDamaged,
    CkptTargetExists,
    CkptUnavailable,
)
from ckpt_runtime.client.private_files import append_private
from ckpt_runtime.client.process_id import ProcessId
from ckpt_runtime.client.session_command import SessionCommandError, spark_submit

SESSION_VARIABLE: Final = "CKPT_SESSION_ID"
STOP_GRACE_SECONDS: Final = 20.0
_SECOND_LOOK_SECONDS: Final = 0.25
_NAMESPACE = "spark.kubernetes.namespace"
_NEEDED = "it needs apache-airflow-providers-apache-spark, and for Kubernetes apache-airflow-providers-cncf-kubernetes"
_DEFAULT_BINARY = "spark-submit"
_EXCEPTIONS: dict[int, type[Exception]] = {
    1: CkptSnapshotDamaged,
    2: CkptRequestRejected,
    3: CkptUnavailable,
    4: CkptNotFound,
    5: CkptTargetExists,
}
_SNAPSHOT_GRACE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class SessionProcess:
    """The leader of a session's process group. ``start_ticks`` distinguishes it from a later process of that pid."""

    session_id: str
    hostname: str
    pid: int
    start_ticks: int
    log_file: str

    def to_json(self) -> dict[str, Any]:
        """Plain values for a journal, an XCom or a trigger."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SessionProcess:
        """The inverse of :meth:`to_json`; further fields are ignored."""
        return cls(
            session_id=str(document["session_id"]),
            hostname=str(document["hostname"]),
            pid=int(document["pid"]),
            start_ticks=int(document["start_ticks"]),
            log_file=str(document["log_file"]),
        )

    @property
    def is_here(self) -> bool:
        """Whether it was started on this machine; nothing is known about processes of other machines."""
        return self.hostname == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether it still runs here."""
        return self.is_here and ProcessId(self.pid, self.start_ticks).is_alive

    def log_tail(self, lines: int = 20) -> str:
        """The last lines that it wrote."""
        with contextlib.suppress(OSError):
            return "\n".join(Path(self.log_file).read_text(errors="replace").splitlines()[-lines:])
        return f"{self.log_file} cannot be read here"

    def signal(self, number: int) -> None:
        """Send a signal to it and to everything that it started, if it still runs here."""
        if self.is_alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def terminate(self) -> None:
        """End it with SIGTERM, and after :data:`STOP_GRACE_SECONDS` with SIGKILL."""
        self.signal(signal.SIGTERM)
        if not self.ends_within(STOP_GRACE_SECONDS):
            self.signal(signal.SIGKILL)

    def ends_within(self, seconds: float) -> bool:
        """Whether it ends by itself in that time; one of another machine counts as ended."""
        until = time.monotonic() + seconds
        while self.is_alive:
            if time.monotonic() >= until:
                return False
            time.sleep(0.1)
        return True


def launch(command: Sequence[str], session_id: str, log_file: Path, environment: Mapping[str, str]) -> SessionProcess:
    """Start the command detached from this process, its output in ``log_file``.

    :raises CkptArgumentInvalid: when it cannot be started at all.
    """
    try:
        with append_private(log_file) as log:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment, SESSION_VARIABLE: session_id},
            )
    except OSError as error:
        raise CkptArgumentInvalid("command", command[0], f"it cannot be started: {error}") from error
    return _known(ProcessId.of(process.pid), session_id, str(log_file))


def _known(process: ProcessId, session_id: str, log_file: str) -> SessionProcess:
    return SessionProcess(session_id, socket.gethostname(), process.pid, process.started or 0, log_file)


def find(session_id: str, log_file: str) -> SessionProcess | None:
    """The process group leader that carries the id in its environment, if one runs here."""
    found = _scan(session_id, log_file)
    if found is None:
        # The kernel shows the environment of a process that is just being started a moment later.
        time.sleep(_SECOND_LOOK_SECONDS)
        found = _scan(session_id, log_file)
    return found


def _scan(session_id: str, log_file: str) -> SessionProcess | None:
    marker = f"{SESSION_VARIABLE}={session_id}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            # The leader of its session alone: its child processes inherit the variable.
            if os.getsid(pid) == pid and marker in (entry / "environ").read_bytes().split(b"\0"):
                process = ProcessId.of(pid)
                if process.is_alive:
                    return _known(process, session_id, log_file)
    return None


@dataclass(frozen=True, slots=True)
class Submission:
    """The whole command, and the master that it names."""

    command: list[str]
    master: str


def submission(
    conn_id: str, spark_conf: Mapping[str, str], properties_file: str, application: str, arguments: Sequence[str]
) -> Submission:
    """The submit hook's command for a connection of Airflow's Spark provider. Spark's settings are in the file, because
    every user can read a command line.

    The hook reads the connection and builds the command; so master, deploy mode, queue, binary, keytab, principal and
    Kubernetes namespace mean here what they mean to the team's other Spark jobs. It is imported only when such a
    connection is named.

    A keytab in the connection is written to a file by the hook, as for its own jobs.

    :raises CkptArgumentInvalid: naming the connection, what it has, and what is allowed.
    """
    try:
        from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

        BaseHook.get_connection(conn_id)  # the hook would continue with YARN
        hook = SparkSubmitHook(
            conn_id=conn_id,
            conf={key: value for key, value in spark_conf.items() if key == _NAMESPACE},  # it decides by this one
            properties_file=properties_file,
            application_args=list(arguments),
            name=spark_conf.get("spark.app.name", "checkpointing stream engine"),  # --name wins over the file
        )
    except (ImportError, NameError) as error:
        raise _refused(conn_id, f"{_NEEDED}: {error}") from error
    except (AirflowException, RuntimeError, ValueError) as error:
        raise _refused(conn_id, str(error)) from error
    connection = hook._connection  # noqa: SLF001 - the hook has no public way to ask
    if connection["deploy_mode"] == "cluster":
        raise _refused(
            conn_id, "its deploy-mode is cluster; it must be client, because a session's driver runs on this machine"
        )
    command = hook._build_spark_submit_command(application)  # noqa: SLF001
    return Submission([_binary(conn_id, command[0]), "--load-spark-defaults", *command[1:]], connection["master"])


def _binary(conn_id: str, named: str) -> str:
    """The one on the path, as the hook has it; else that of the PySpark beside this interpreter."""
    if named != _DEFAULT_BINARY or shutil.which(named) is not None:
        return named
    try:
        return spark_submit()
    except SessionCommandError as error:
        raise _refused(conn_id, f"{named} is not on the path, and {error}") from error


def _refused(conn_id: str, reason: str) -> CkptArgumentInvalid:
    return CkptArgumentInvalid("spark_conn_id", conn_id, reason)


class SnapshotProcess:
    """Runs one command at a time; ``end`` may be called during this, by a signal handler."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._running: subprocess.Popen[str] | None = None

    def run(self, *arguments: str, accepted: Sequence[int] = (0,)) -> Any:
        """The document that ``ckpt snapshot`` prints for these arguments.

        :raises CkptSnapshotDamaged: and the others by the command's exit code, unless that is accepted.
        """
        self._log.info("Running ckpt snapshot %s", " ".join(arguments))
        code, output, errors = self._ended("--json", "snapshot", *arguments)
        if code in accepted:
            return json.loads(output)
        raise _EXCEPTIONS.get(code, CkptOperationFailed)(_reason(errors, code))

    def _ended(self, *arguments: str) -> tuple[int, str, str]:
        """The exit code, the output and the error output of the command with these arguments."""
        with subprocess.Popen(
            [sys.executable, "-m", "ckpt_runtime.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        ) as process:
            self._running = process
            output, errors = process.communicate()
        self._running = None
        return process.returncode, output, errors

    def end(self) -> bool:
        """End the running process, so that it removes its files; whether something ran."""
        process = self._running
        if process is None or process.poll() is not None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_SNAPSHOT_GRACE_SECONDS)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return True


def _reason(errors: str, code: int) -> str:
    """The message of its error document, else its last words."""
    for line in reversed(errors.strip().splitlines()):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["error"])
    return errors.strip()[-2000:] or f"ckpt snapshot ended with code {code}"
