"""Drivers without Spark, each in a process that can be killed, or that dies at a point named by the test."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.processes.forking import ForkedProcess
from ckpt_runtime.storage.ha_store import HaStore
from tests.support.driver_template import driver_template
from tests.support.processes import children, living
from tests.support.spark_sessions import wait_until

STARTS = 3


def high_availability(directory: Path) -> dict[str, str]:
    return {"high-availability.type": "filesystem", "high-availability.storageDir": str(directory / "ha")}


@dataclass
class Sessions:
    """One session after the other, each in a process that can be killed."""

    directory: Path
    storage: str = ""
    """The high-availability directory, if it is not a local one in ``directory``."""
    lease_timeout_s: float = 30.0
    """On a busy machine a renewal may take seconds, and a driver that has lost its lease ends."""
    """Longer than a busy machine keeps a driver from renewing it. No test waits for the lease of a dead driver."""
    token: str | None = None
    options: dict[str, str] = field(default_factory=dict)
    """More of the session's options."""
    number: int = 0
    processes: list[ForkedProcess] = field(default_factory=list)
    clients: list[CkptClient] = field(default_factory=list)

    @property
    def store(self) -> HaStore:
        """What the drivers leave to each other; to be read only, but for the lease of a dead one."""
        return HaStore(self._options["high-availability.storageDir"])

    @property
    def _options(self) -> dict[str, str]:
        options = {**high_availability(self.directory), **self.options}
        return {**options, "high-availability.storageDir": self.storage} if self.storage else options

    def start(self) -> CkptClient:
        """Returns a client once the session leads.

        A session that could not renew its lease in time, on a busy machine, has ended: another one is started, as a
        supervisor would do.
        """
        for _ in range(STARTS):
            ready = self._started()
            if ready is not None:
                break
        assert ready is not None, "one session after the other gave its leadership up"
        self._close_clients()
        self.clients.append(CkptClient(ready.read_text(), token=self.token))
        return self.clients[-1]

    def _started(self) -> Path | None:
        """The file with the address of a session that leads; None for one that has given its leadership up."""
        ready, process = self.launch(), self.processes[-1]
        try:
            wait_until(lambda: ready.exists() or process.poll() is not None, "the session to lead")
            assert ready.exists() or self._has_given_up(), f"the session ended with {process.returncode}"
        except AssertionError as error:
            error.add_note(self._log.read_text(errors="replace")[-5000:])
            raise
        return ready if ready.exists() else None

    @property
    def _log(self) -> Path:
        return self.directory / f"session-{self.number}.log"

    def _has_given_up(self) -> bool:
        return "this driver has lost its leadership" in self._log.read_text(errors="replace")

    def launch(self) -> Path:
        """Waits for nothing; returns the file that will hold the session's address."""
        self.number += 1
        ready = self.directory / f"ready-{self.number}"
        options = [f"{key}={value}" for key, value in self._options.items()]
        environment = {"TMPDIR": str(self.directory)}  # the last one is killed, and no other follows on it
        if self.token is not None:
            environment[TOKEN_VARIABLE] = self.token
        arguments = [str(ready), str(self.lease_timeout_s), *options]
        self.processes.append(driver_template().fork(arguments, self._log, environment))
        return ready

    def end(self) -> None:
        """Kills the driver that still runs."""
        self._close_clients()
        for process in self.processes:
            if process.poll() is None:
                self.kill()
        driver_template().crash_point.unlink(missing_ok=True)

    def _close_clients(self) -> None:
        while self.clients:
            self.clients.pop().close()

    def kill(self) -> None:
        """The driver alone; its agents and workers have to notice."""
        process = self.processes[-1]
        orphans = children(process.pid)
        process.kill()
        process.wait()
        wait_until(lambda: not living(orphans), "the slots of the killed driver to end", 120)
        self._lease_runs_out()

    def terminate(self) -> None:
        """SIGTERM, as a supervisor sends it: the driver ends in order, and its jobs are suspended."""
        process = self.processes[-1]
        orphans = children(process.pid)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: process.poll() is not None, "the end of the driver", 120)
        assert process.returncode == 0, self._log.read_text(errors="replace")[-5000:]
        wait_until(lambda: not living(orphans), "the slots of the driver to end", 120)

    def arm(self, point: str) -> None:
        """The present or the next driver dies where it gets to this point first."""
        place = driver_template().crash_point
        partial = place.with_suffix(".partial")
        partial.write_text(point)
        partial.replace(place)

    def crashed(self) -> None:
        """Waits for the end of the present driver at the point that it was armed with, and of what belonged to it."""
        process = self.processes[-1]
        orphans: list[int] = []

        def ended() -> bool:
            orphans.extend(pid for pid in children(process.pid) if pid not in orphans)
            return process.poll() is not None

        wait_until(ended, "the driver to reach its crash point", 120)
        assert process.returncode == -signal.SIGKILL
        assert not driver_template().crash_point.exists()
        wait_until(lambda: not living(orphans), "the slots of the crashed driver to end", 120)
        self._lease_runs_out()

    def _lease_runs_out(self) -> None:
        """Of the driver that is dead. How long the next one would look at it is for the tests of standbys."""
        leader = self.store.leader.current()
        if leader is not None:
            self.store.leader.release(leader)
