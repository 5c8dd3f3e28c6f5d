"""A session's process on this machine: the command, a detached start, finding it again, ending it.

The process is started in a session of its own, so that it outlives the Airflow task which started it. An id in its
environment marks it: a task that died between starting the process and writing down its pid finds it by that. The
token travels in the environment as well, never on a command line. Nothing here talks REST.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from ckpt_runtime.client.private_files import append_private
from ckpt_runtime.client.process_id import ProcessId

SESSION_VARIABLE: Final = "CKPT_SESSION_ID"
STOP_GRACE_SECONDS: Final = 20.0
_SECOND_LOOK_SECONDS: Final = 0.25


@dataclass(frozen=True, slots=True)
class SessionProcess:
    """The leader of a session's process group. ``start_ticks`` tells it from a later process with the same pid."""

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
        """Whether it was started on this machine; on another one nothing can be said about it."""
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
        """End it: a polite signal, after :data:`STOP_GRACE_SECONDS` an impolite one."""
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
            # The leader of its session alone: what it has started inherits the variable.
            if os.getsid(pid) == pid and marker in (entry / "environ").read_bytes().split(b"\0"):
                process = ProcessId.of(pid)
                if process.is_alive:
                    return _known(process, session_id, log_file)
    return None
