"""A session on a standalone Spark cluster of this machine: a JVM and executors beside what every session has."""

from __future__ import annotations

import os
import random
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.spark.launch import SessionInfo, start_session, stop_session
from ckpt_runtime.spark.protection import AUTHENTICATION_SECRET
from tests.chaos.session import MARK, START_S, Session, kill
from tests.support.processes import agent_of, children, command_line
from tests.support.spark_sessions import SparkCluster, standalone_cluster, wait_until

SLOTS = 3
HOSTS, HOST_CORES = 2, 3
"""What is left when a host is lost has enough slots."""
_SPARK_OPTIONS = {
    "spark.executor.cores": "1",
    "spark.executor.memory": "512m",
    "spark.driver.host": "127.0.0.1",
    "spark.ui.enabled": "false",
}
_CLASSES = {"jvm": "org.apache.spark.deploy.SparkSubmit", "executor": "CoarseGrainedExecutorBackend"}


@dataclass
class SparkSession(Session):
    """Its driver's process is that of Python; the JVM beside it ends with it, and the other way round."""

    info: SessionInfo | None = None
    cluster: SparkCluster | None = None
    _starting: Future[SessionInfo] | None = None
    _former_info: SessionInfo | None = None
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    _started: ExitStack = field(default_factory=ExitStack)

    @property
    def driver_pid(self) -> int:
        assert self.info is not None
        return self.info.driver.pid

    def lead(self) -> CkptClient:
        assert self._starting is not None
        self.info = self._starting.result()
        return self.connect(self.info.rest_url, self.info.token)

    def stand_by(self) -> None:
        self._former_info = self.info
        super().stand_by()

    def dismiss(self) -> None:
        """It has to end by itself when it wakes."""
        former = self._former_info
        assert former is not None
        wait_until(lambda: not {former.pid, former.driver.pid} & set(self.processes()), "the former driver to end", 120)

    def _launch(self) -> None:
        if self.cluster is None:
            os.environ[MARK] = self.mark
            self._started.callback(os.environ.pop, MARK, None)
            self.cluster = self._started.enter_context(standalone_cluster(self.directory, HOSTS, cores=HOST_CORES))
        self.number += 1
        spark_conf = _SPARK_OPTIONS | {AUTHENTICATION_SECRET: self.cluster.secret}
        log_file = self.log(self.number)
        log_file.touch()
        self._starting = self._threads.submit(
            start_session,
            self.cluster.url,
            SLOTS,
            log_file=log_file,
            conf=self.options,
            spark_conf=spark_conf,
            ready_timeout_s=START_S,
        )

    def kill_driver(self) -> CkptClient:
        return self._replace(self.driver_pid)

    def kill_jvm(self) -> CkptClient:
        """Its driver has to release its leadership."""
        [jvm] = self.of_role("jvm")
        return self._replace(jvm)

    def kill_host(self, choice: random.Random) -> None:
        """One of the cluster's machines goes with all that runs there; another one comes."""
        assert self.cluster is not None
        daemon = choice.choice([worker for worker in self.cluster.workers if worker.poll() is None])
        for pid in [daemon.pid, *children(daemon.pid)]:
            kill(pid)
        daemon.wait()
        self.cluster.start_worker()

    def _replace(self, pid: int) -> CkptClient:
        """The next session comes when nothing of this one but the cluster runs any more."""
        mine = [*self.of_role("jvm"), self.driver_pid]
        kill(pid)
        wait_until(lambda: not set(mine) & set(self.processes()), "driver and JVM to end together", 120)
        return self.start()

    def of_role(self, role: str) -> list[int]:
        if role in _CLASSES:
            return [pid for pid in self.processes() if _CLASSES[role] in command_line(pid)]
        if role != "agent":
            return super().of_role(role)
        found = []
        for worker in self.of_role("worker"):
            try:
                found.append(agent_of(worker))
            except LookupError:
                continue
        return sorted(set(found))

    def end(self) -> None:
        if self.info is not None:
            stop_session(self.info)
        self._started.close()
        super().end()

    def kill_everything(self) -> None:
        super().kill_everything()
        self._started.close()
