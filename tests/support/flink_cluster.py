"""A real Flink session cluster on this machine: one JobManager, one TaskManager, and a job of ours to run there.

Needs a Flink distribution and a JDK. ``FLINK_HOME`` names it, as Flink's scripts do; with ``apache-flink`` from PyPI it
is the ``pyflink`` folder of the environment's site-packages.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError
from tests.support.patience import patient
from tests.support.spark_sessions import free_port

HOME = Path(os.environ.get("FLINK_HOME", ""))
SOURCE = Path(__file__).parent / "flink" / "NumberedRows.java"
START_TIMEOUT_S = 120
SLOTS = 4


def absent(*commands: str) -> str:
    """Why tests that need Flink and these commands cannot run; empty when they can."""
    if "FLINK_HOME" not in os.environ:
        return "FLINK_HOME is not set: it names a Flink distribution (the pyflink folder of apache-flink)"
    if not (HOME / "bin" / "flink").is_file():
        return f"FLINK_HOME={HOME} has no bin/flink"
    missing = [command for command in commands if shutil.which(command) is None]
    return f"Flink needs {' and '.join(missing)} on the PATH" if missing else ""


class FlinkCluster:
    """Runs from construction to :meth:`stop`; everything that it writes lies in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._logs = directory / "logs"
        self._logs.mkdir(parents=True)
        self.port = free_port()
        self.rest_url = f"http://127.0.0.1:{self.port}"
        self._options = {
            "jobmanager.rpc.address": "127.0.0.1",
            "jobmanager.rpc.port": str(free_port()),
            "jobmanager.bind-host": "127.0.0.1",
            "jobmanager.memory.process.size": "1024m",
            "jobmanager.scheduler": "adaptive",  # without it there is no live rescale
            "taskmanager.host": "127.0.0.1",
            "taskmanager.bind-host": "127.0.0.1",
            "taskmanager.memory.process.size": "1024m",
            "taskmanager.numberOfTaskSlots": str(SLOTS),
            "rest.address": "127.0.0.1",
            "rest.bind-address": "127.0.0.1",
            "rest.port": str(self.port),
            "web.upload.dir": str(directory / "uploads"),
            "io.tmp.dirs": str(directory / "tmp"),
            "execution.checkpointing.dir": (directory / "checkpoints").as_uri(),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._files: list[IO[bytes]] = []

    def start(self) -> None:
        """Returns when all slots are there. Raises AssertionError with what the cluster printed."""
        self._run("jobmanager.sh")
        self._run("taskmanager.sh")
        with CkptClient(self.rest_url, retry_timeout_s=0) as client:
            self.wait_until(lambda: _slots(client) == SLOTS, "the cluster's slots", START_TIMEOUT_S)

    def _run(self, script: str) -> None:
        options = [part for key, value in self._options.items() for part in ("-D", f"{key}={value}")]
        log = (self._logs / f"{script}.out").open("wb")
        self._files.append(log)
        environment = {**os.environ, "FLINK_HOME": str(HOME), "FLINK_LOG_DIR": str(self._logs)}
        command = ["bash", str(HOME / "bin" / script), "start-foreground", *options]
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        self._processes.append(process)

    def stop(self) -> None:
        """Ends the processes; jobs that run there are lost."""
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for file in self._files:
            file.close()

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float = 60) -> None:
        """Raises AssertionError with the ends of the logs."""
        deadline = time.monotonic() + patient(timeout_s)
        while not holds():
            assert all(process.poll() is None for process in self._processes), f"Flink has ended:\n{self.log()}"
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}:\n{self.log()}"
            time.sleep(0.1)

    def log(self) -> str:
        """The ends of what the processes printed."""
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self._logs.iterdir()))

    def jar(self) -> Path:
        """Compiles :data:`SOURCE`."""
        classes, jar = self._directory / "classes", self._directory / "numbered-rows.jar"
        command = ["javac", "-nowarn", "-d", str(classes), "-cp", f"{HOME}/lib/*", str(SOURCE)]
        subprocess.run(command, check=True, timeout=120)
        packed = ["jar", "--create", "--file", str(jar), "--main-class", SOURCE.stem, "-C", str(classes), "."]
        subprocess.run(packed, check=True, timeout=60)
        return jar


def _slots(client: CkptClient) -> int:
    try:
        return client.execute(requests.cluster_overview()).slots_available
    except CkptClientError:
        return 0


def assert_numbered(directory: Path, rows: int) -> None:
    """What the job of :data:`SOURCE` has committed is each row once, in files that Flink does not hide."""
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith((".", "_"))]
    found = Counter(line for path in files for line in path.read_text().split())
    assert found == Counter(f"{row % 10},{row // 10}" for row in range(rows))
