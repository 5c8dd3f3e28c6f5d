"""The session under chaos: its driver's process, and all processes that belong to it, found by a mark in their memory.

The mark is an environment variable, which children inherit however they were started and whoever adopts them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_runtime.client.clients import CkptClient
from tests.support.processes import command_name, living
from tests.support.spark_sessions import wait_until

MARK = "CKPT_CHAOS_RUN"


@dataclass
class Session:
    """One driver after the other, with the same high-availability directory."""

    directory: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    number: int = 0
    driver: subprocess.Popen[bytes] | None = None
    client: CkptClient | None = None

    def start(self) -> CkptClient:
        """Starts a driver; returns a client when it leads."""
        self.number += 1
        ready = self.directory / f"ready-{self.number}"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), MARK: self.mark}
        environment["TMPDIR"] = str(self.directory)  # the last one is killed, and no other follows on it
        options = [f"{key}={value}" for key, value in self.options.items()]
        with (self.directory / f"session-{self.number}.log").open("wb") as log:
            command = [sys.executable, "-m", "tests.chaos.session_main", str(ready), *options]
            self.driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        driver = self.driver
        wait_until(lambda: ready.exists() or driver.poll() is not None, "the session to lead")
        assert ready.exists(), f"the session ended with {driver.returncode}: see {log.name}"
        return self.connect(ready.read_text())

    def connect(self, url: str, token: str | None = None) -> CkptClient:
        """From now on :attr:`client` asks there."""
        self._close_client()
        self.client = CkptClient(url, token=token)
        return self.client

    @property
    def options(self) -> dict[str, str]:
        """The next driver goes on where this one ended."""
        return {
            "high-availability.type": "filesystem",
            "high-availability.storageDir": str(self.directory / "ha"),
            "jobmanager.execution.dynamic-configuration.allow-list": "*",
        }

    @property
    def driver_pid(self) -> int:
        assert self.driver is not None
        return self.driver.pid

    def kill_driver(self) -> CkptClient:
        """Its agents and workers notice by themselves. Returns the client of the next driver."""
        assert self.driver is not None
        self.driver.kill()
        self.driver.wait()
        return self.start()

    def end(self) -> None:
        """Kills the driver; what belonged to it has to end by itself. Raises AssertionError if it does not."""
        self._close_client()
        if self.driver is None:
            return
        if self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        wait_until(lambda: not self.processes(), f"the processes {self.processes()} of the killed driver to end", 120)

    def kill_everything(self) -> None:
        """For the end of a run that went wrong."""
        self._close_client()
        if self.driver is not None and self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        for pid in self.processes():
            _signal(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """All living ones of this run."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return sorted(living(found))

    def of_role(self, role: str) -> list[int]:
        """``worker``, ``template`` or ``agent``."""
        return [pid for pid in self.processes() if command_name(pid) == f"ckpt-{role}"]

    def _close_client(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None


def _signal(pid: int, number: signal.Signals) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


def kill(pid: int) -> bool:
    """SIGKILL; says whether there was such a process."""
    return _signal(pid, signal.SIGKILL)


def freeze(pid: int) -> bool:
    """SIGSTOP; says whether there was such a process."""
    return _signal(pid, signal.SIGSTOP)


def thaw(pid: int) -> bool:
    """SIGCONT; says whether there was such a process."""
    return _signal(pid, signal.SIGCONT)
