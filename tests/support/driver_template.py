"""Drivers from a template: a process that has imported everything, from which a run's drivers are forked.

Three seconds of a processor are what a driver from a cold interpreter spends on imports: its own, and those of the
template that its agents come from. A forked one is a process like another, with its own pid, environment, working
directory and output; it ends as an interpreter does, or by a signal. That it has imported what workers need is all that
it could notice.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from ckpt_runtime.storage.crash_points import VARIABLE
from tests.support.driver_template_main import MAX_MESSAGE, DriverStart
from tests.support.run_directory import RUN


class ForkedDriver:
    """One driver, as :class:`subprocess.Popen` shows a process. For a single thread."""

    def __init__(self, told: socket.socket) -> None:
        """The template says first its pid, in the end its exit code."""
        said, descriptors, _, _ = socket.recv_fds(told, MAX_MESSAGE, 1)
        if not descriptors:
            told.close()
            raise OSError("the driver cannot be forked, or its template is gone")
        self.pid = int(said)
        self.returncode: int | None = None
        self._told = told
        (self._descriptor,) = descriptors

    def poll(self) -> int | None:
        return self.wait() if self.returncode is None and select.select([self._told], [], [], 0)[0] else self.returncode

    def wait(self) -> int:
        """The exit code, negative for a signal."""
        if self.returncode is None:
            said = self._told.recv(MAX_MESSAGE)
            self.kill()  # nobody would tell its end when the template is gone
            self.returncode = int(said) if said else -signal.SIGKILL
            self._told.close()
            os.close(self._descriptor)
        return self.returncode

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)


class DriverTemplate:
    """The template of this process."""

    def __init__(self) -> None:
        # The place of crash points is read when they are imported: all drivers have the same.
        self.crash_point = RUN.kept("drivers") / "crash-point"
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.driver_template_main", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=self._environment({}),
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def fork(self, arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> ForkedDriver:
        """Its environment is this process's with ``environment`` on top. Raises OSError."""
        told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = DriverStart(list(arguments), os.getcwd(), self._environment(environment))
        with theirs, tempfile.TemporaryFile() as document, log.open("wb") as output:
            document.write(json.dumps(vars(start)).encode())
            document.flush()
            socket.send_fds(self._connection, [b"fork"], [document.fileno(), output.fileno(), theirs.fileno()])
        return ForkedDriver(told)

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join(path for path in sys.path if path)
        return {**os.environ, "PYTHONPATH": path, VARIABLE: str(self.crash_point), **more}

    def close(self) -> None:
        """Ends it with all its drivers."""
        atexit.unregister(self.close)
        self._connection.close()
        self._process.wait()


_template: DriverTemplate | None = None


def driver_template() -> DriverTemplate:
    """The one of this process, which is started when it is asked for first."""
    global _template
    if _template is None:
        _template = DriverTemplate()
    return _template
