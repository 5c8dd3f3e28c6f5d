"""Attacks against real sessions; every test of this folder carries the mark ``attack``.

One session with a running job serves the whole folder, and one Spark application that is open to everybody shows that
an attack does work. An attack runs as another user of the machine, which takes root.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import RunOptions
from ckpt_runtime.spark.launch import SessionInfo, start_session, stop_session
from tests.support.jobs import FAST, PIPELINES
from tests.support.other_user import as_nobody
from tests.support.patience import patient
from tests.support.processes import command_line
from tests.support.spark_sessions import wait_until

ROOT = Path(__file__).resolve().parents[2]
SECRET_OPTION = "do-not-show-this"


@pytest.fixture(scope="session")
def as_other_user() -> Callable[[Callable[[], Any]], Any]:
    """Runs a function in a process of another user; what it returns is JSON."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    return as_nobody


@dataclass(frozen=True)
class AttackedSession:
    """A session with a running job of two slots. Everybody may look into ``directory``, where its files lie."""

    info: SessionInfo
    directory: Path
    client: CkptClient
    job_id: str

    def processes(self) -> list[psutil.Process]:
        """Spark's JVM, the driver, the agents and the workers."""
        leader = psutil.Process(self.info.pid)
        return [leader, *leader.children(recursive=True)]

    def ports(self) -> dict[int, str]:
        """Every port that a process of the session listens on, and that process's name."""
        found = {}
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        found[connection.laddr.port] = process.name()
        return found

    def sockets(self) -> list[str]:
        """The files of all its Unix sockets."""
        found: set[str] = set()
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                found.update(str(connection.laddr) for connection in process.net_connections("unix"))
        return sorted(path for path in found if path.startswith("/"))

    @property
    def connect_port(self) -> int:
        """The port of Spark Connect, from the session's log."""
        log = (self.directory / "session.log").read_text()
        return int(log.partition("CKPT_CONNECT_URL ")[2].split()[0].rpartition(":")[2])

    def command_lines(self) -> list[str]:
        """As the process list shows them."""
        return [command_line(process.pid) for process in self.processes()]

    def restarts(self) -> int:
        return int(self.client.job_metrics(self.job_id, ("numRestarts",))["numRestarts"])

    def completed(self) -> int:
        return self.client.checkpoint_statistics(self.job_id).counts.completed


@pytest.fixture(scope="session")
def attacked() -> Iterator[AttackedSession]:
    directory = Path(tempfile.mkdtemp(prefix="ckpt-attacked-"))
    directory.chmod(0o755)
    info = start_session(
        "local",
        2,
        conf={
            "heartbeat.timeout": "50 s",
            "connect.enabled": "true",
            "connect.port": "0",
            "my.db.password": SECRET_OPTION,
        },
        log_file=directory / "session.log",
        work_directory=directory / "work",
    )
    try:
        with CkptClient(info.rest_url, token=info.token) as client:
            options = RunOptions(arguments=(str(directory),), parallelism=2, configuration=FAST)
            pipeline = client.upload_pipeline(*pack_pipeline(PIPELINES / "counted.py"))
            session = AttackedSession(info, directory, client, client.run_pipeline(pipeline, options))
            client.wait_for_state(session.job_id, ["RUNNING"], timeout_s=patient(180))
            wait_until(lambda: session.completed() > 0, "a checkpoint")
            yield session
            # Spark Connect has been used, whose threads are not to keep the JVM alive.
            info.driver.signal(signal.SIGTERM)
            wait_until(lambda: not info.is_alive, "the session to end by itself")
    finally:
        stop_session(info)
        shutil.rmtree(directory)


@dataclass(frozen=True)
class OpenSpark:
    """Spark as it is by default, with one task; ``begun`` has a line for each of its attempts."""

    rpc_port: int
    block_port: int
    begun: Path
    check: bytes
    """Asks an RPC whether it has tasks to end."""
    kills: list[bytes]
    """Tell it to end its first two tasks."""

    def attempts(self) -> int:
        return len(self.begun.read_text().splitlines()) if self.begun.exists() else 0


@pytest.fixture(scope="session")
def open_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenSpark]:
    begun = tmp_path_factory.mktemp("open") / "begun"
    script = ROOT / "tests" / "support" / "open_spark.py"
    process = subprocess.Popen(
        [sys.executable, str(script), str(begun)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "PYSPARK_PYTHON": sys.executable},
    )
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        kills = [bytes.fromhex(kill) for kill in said["kills"]]
        yield OpenSpark(said["rpc_port"], said["block_port"], begun, bytes.fromhex(said["check"]), kills)
        process.stdin.close()
        process.wait(patient(30))
