"""Jobs in sessions that run in Spark, over REST; and a Spark cluster on this machine."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.client.private_files import write_private
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.spark.launch import SessionInfo
from tests.support.flights import PIPELINES as EXAMPLES
from tests.support.jobs import FAST
from tests.support.jobs import PIPELINES as TEST_PIPELINES
from tests.support.outputs import hidden
from tests.support.patience import deadline, patient

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.1


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = 180) -> None:
    """Polls every 20 ms, less often what takes long: each look is a request. Raises AssertionError."""
    begun, is_over = time.monotonic(), deadline(timeout_s)
    pause_s = FIRST_PAUSE_S
    while not condition():
        assert not is_over(), f"timed out after {time.monotonic() - begun:.0f} s waiting for {what}"
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 1.1)


@dataclass
class FlightsJob:
    """The example pipeline with its failing operator, in a session in Spark. ``client`` stays the caller's to close.

    ``options`` come on top of those that all these jobs have.
    """

    session: SessionInfo
    client: CkptClient
    source: Path
    directory: Path
    job_id: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def out(self) -> Path:
        return self.directory / "out"

    @property
    def faults(self) -> Path:
        return self.directory / "faults"

    def start(
        self, rate: int, *, parallelism: int = 2, savepoint: str | None = None, expect_slots: bool = True
    ) -> None:
        """Waits until it runs, unless it is not expected to get its slots."""
        self.faults.mkdir(parents=True, exist_ok=True)
        packed = self.directory / "flights"
        if not packed.exists():
            shutil.copytree(EXAMPLES, packed)
            for name in ("injected.py", "failing_flights.py"):
                shutil.copy(TEST_PIPELINES / name, packed)
        arguments = (str(self.faults), "--input", str(self.source), "--output", str(self.out))
        options = RunOptions(
            entry_point="failing_flights:pipeline",
            arguments=(*arguments, "--rows-per-second", str(rate)),
            parallelism=parallelism,
            configuration={**FAST, "execution.checkpointing.dir": str(self.directory / "checkpoints"), **self.options},
            savepoint_path=savepoint,
        )
        self.job_id = self.client.run_pipeline(self.client.upload_pipeline(*pack_pipeline(packed)), options)
        # A fast one may have run already.
        if expect_slots:
            self.client.wait_for_state(self.job_id, ["RUNNING", "FINISHED"], timeout_s=patient(180))

    def restarts(self) -> int:
        return int(self.client.job_metrics(self.job_id, ("numRestarts",))["numRestarts"])

    def restarted(self, restarts: int, after: str = "a failure") -> None:
        """Waits until that many restarts are over."""

        def over() -> bool:
            tasks = self.client.job_details(self.job_id).status_counts
            return self.restarts() >= restarts and {state for state, number in tasks.items() if number} == {"RUNNING"}

        wait_until(over, f"{restarts} restarts to be over, the last one after {after}")

    def completed(self) -> int:
        return self.client.checkpoint_statistics(self.job_id).counts.completed

    def wait_for_checkpoint(self) -> None:
        """One more than now."""
        known = self.completed()
        wait_until(lambda: self.completed() > known, "a checkpoint")

    def stopped(self) -> str:
        """Stops with a savepoint; returns its URL."""
        trigger = self.client.stop_with_savepoint(self.job_id, str(self.directory / "savepoints"))
        done = self.client.wait_for_operation("savepoint", trigger, self.job_id, timeout_s=patient(180))
        assert done.location is not None
        return done.location

    def finished(self) -> None:
        self.client.wait_for_state(self.job_id, ["FINISHED"], timeout_s=patient(180))
        wait_until(lambda: hidden(self.out) == [], "the clean-up of the sinks")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class SparkCluster:
    """A standalone master with its workers, on loopback."""

    url: str
    web_url: str
    workers: list[subprocess.Popen[bytes]]
    secret: str
    """Of its master, its workers, and the users who may submit applications."""
    start_worker: Callable[[], subprocess.Popen[bytes]]
    """One more, which joins :attr:`workers`."""

    @property
    def settings(self) -> dict[str, str]:
        """What an application needs to be taken in."""
        return {"spark.authenticate.secret": self.secret}

    def alive_workers(self) -> int:
        """As the master's page says; 0 before it answers."""
        try:
            with urllib.request.urlopen(f"{self.web_url}/json/", timeout=5) as answer:
                return int(json.load(answer)["aliveworkers"])
        except (OSError, ValueError):  # while it starts, its port is open before its pages are
            return 0


@contextmanager
def standalone_cluster(
    directory: Path, workers: int, *, cores: int = 1, authenticated: bool = True
) -> Iterator[SparkCluster]:
    """Starts it and waits for its workers, of so many cores each; ends all of it."""
    import pyspark

    home = Path(pyspark.__file__).parent
    environment = {
        **os.environ,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
    }
    secret = secrets.token_hex(16)
    environment["SPARK_CONF_DIR"] = str(_cluster_configuration(directory, secret if authenticated else ""))
    started: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (directory / f"{name}.log").open("wb") as log:
            command = [str(home / "bin" / "spark-class"), *arguments]
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        started.append(process)
        return process

    port, web_port = free_port(), free_port()
    address = ["--host", "127.0.0.1"]
    size = ["--cores", str(cores), "--memory", f"{cores}g", "--webui-port", "0"]
    try:
        master = ["org.apache.spark.deploy.master.Master", *address, "--port", str(port), "--webui-port", str(web_port)]
        start("master", *master)
        url = f"spark://127.0.0.1:{port}"
        running: list[subprocess.Popen[bytes]] = []

        def start_worker() -> subprocess.Popen[bytes]:
            number = len(running)
            own = [*address, *size, "--work-dir", str(directory / f"work-{number}"), url]
            running.append(start(f"worker-{number}", "org.apache.spark.deploy.worker.Worker", *own))
            return running[-1]

        cluster = SparkCluster(url, f"http://127.0.0.1:{web_port}", running, secret, start_worker)
        wait_until(lambda: _answers(port), "the master")
        for _ in range(workers):
            start_worker()
        wait_until(lambda: cluster.alive_workers() == workers, "the workers")
        yield cluster
    finally:
        for process in reversed(started):
            process.terminate()
        for process in reversed(started):
            try:
                process.wait(patient(15))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _cluster_configuration(directory: Path, secret: str) -> Path:
    configuration = directory / "conf"
    settings = "spark.master.rest.enabled false\n"
    if secret:
        settings += f"spark.authenticate true\nspark.authenticate.secret {secret}\n"
    write_private(configuration / "spark-defaults.conf", settings)
    return configuration


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
