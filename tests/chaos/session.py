"""The session under chaos: its driver's process, and all processes that belong to it, found by a mark in their memory.

The mark is an environment variable, which children inherit however they are started and adopted.
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
from tests.support.patience import patient
from tests.support.processes import command_name, living
from tests.support.spark_sessions import wait_until

MARK = "CKPT_CHAOS_RUN"
START_S = patient(600.0)
"""How long a driver may take to start on a busy machine: Spark's takes a minute of one."""
STORAGE_TIMEOUT_S = 6
"""How long a call to storage is waited for."""
_GIVEN_UP = "this driver has lost its leadership"


@dataclass
class Session:
    """One driver after the other, with the same high-availability directory."""

    directory: Path
    lease_s: float = 4.0
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    number: int = 0
    driver: subprocess.Popen[bytes] | None = None
    former: subprocess.Popen[bytes] | None = None
    client: CkptClient | None = None

    def start(self) -> CkptClient:
        """Starts a driver; returns a client when it leads."""
        self._launch()
        return self.lead()

    def log(self, number: int) -> Path:
        """What a driver has said."""
        return self.directory / f"session-{number}.log"

    def stand_by(self) -> None:
        """Starts a second driver, which waits to lead. What becomes of the first one is the caller's to say."""
        self.former = self.driver
        self._launch()
        log = self.log(self.number)
        wait_until(lambda: "waiting for the leadership" in log.read_text(errors="replace"), "the standby", START_S)

    def lead(self) -> CkptClient:
        """Waits until the youngest driver leads; returns its client."""
        driver, ready = self.driver, self.directory / f"ready-{self.number}"
        assert driver is not None
        wait_until(lambda: ready.exists() or driver.poll() is not None, "the session to lead", START_S)
        assert ready.exists(), f"the session ended with {driver.returncode}: see {self.log(self.number)}"
        return self.connect(ready.read_text())

    def has_given_up(self) -> bool:
        """Whether the driver could not renew its lease in time: this machine was busy for longer than that."""
        log = self.log(self.number)
        return log.exists() and _GIVEN_UP in log.read_text(errors="replace")

    def dismiss(self) -> None:
        """The driver that has led before the youngest one is dead, or finds out that it leads no more."""
        former, log = self.former, self.log(self.number - 1)
        assert former is not None

        def over() -> bool:
            return former.poll() is not None or _GIVEN_UP in log.read_text(errors="replace")

        wait_until(over, "the former driver to release its leadership")
        former.kill()
        former.wait()

    def _launch(self) -> None:
        self.number += 1
        ready = self.directory / f"ready-{self.number}"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), MARK: self.mark}
        environment["TMPDIR"] = str(self.directory)  # the last one is killed, and no other follows on it
        options = [f"{key}={value}" for key, value in self.options.items()]
        with self.log(self.number).open("wb") as log:
            command = [sys.executable, "-m", "tests.chaos.session_main", str(ready), str(self.lease_s), *options]
            self.driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)

    def connect(self, url: str, token: str | None = None) -> CkptClient:
        """From now on :attr:`client` asks there."""
        self._close_client()
        # The first submission waits until Spark has started, which plans it.
        self.client = CkptClient(url, token=token, timeout_s=patient(120.0))
        return self.client

    @property
    def options(self) -> dict[str, str]:
        """The next driver continues where this one ended."""
        return {
            "high-availability.type": "filesystem",
            "high-availability.storageDir": str(self.directory / "ha"),
            "jobmanager.execution.dynamic-configuration.allow-list": "*",
            "jobmanager.storage.timeout": f"{STORAGE_TIMEOUT_S} s",
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
        for driver in (self.driver, self.former):
            if driver is not None and driver.poll() is None:
                driver.kill()
                driver.wait()
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
