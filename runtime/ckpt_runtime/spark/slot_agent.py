"""The slot agent: the long-running Python function of one barrier task. Small and boring on purpose.

It starts worker processes when the driver asks for them, reports when one ended, and kills one on request. It relays no
data and runs no user code, so that Spark, which fails a whole barrier stage when one task fails, rarely sees a failure.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_runtime.network.connections import ControlConnection

logger = logging.getLogger(__name__)

_ZIPPED = ("pyspark.zip", "py4j-")


@dataclass(frozen=True, slots=True)
class AgentParameters:
    """What an agent needs to find its driver."""

    driver_host: str
    driver_port: int
    secret: str
    stage_id: int


class SlotAgent:
    """One slot's supervisor; :meth:`run` returns when the driver says so or is gone."""

    def __init__(self, parameters: AgentParameters, index: int) -> None:
        self._parameters = parameters
        self._slot = f"{parameters.stage_id}-{index}"
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._connection: ControlConnection | None = None

    def run(self) -> None:
        """Raises OSError when the driver cannot be reached at all."""
        parameters = self._parameters
        connection = ControlConnection.dial((parameters.driver_host, parameters.driver_port), parameters.secret)
        self._connection = connection
        try:
            connection.send(
                {
                    "type": "hello",
                    "role": "agent",
                    "slot": self._slot,
                    "stage": parameters.stage_id,
                    "pid": os.getpid(),
                    "host": connection.local_host,
                    "cpus": sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [],
                }
            )
            while self._handle(connection.receive()):
                pass
        except ConnectionError:
            logger.info("slot %s: the driver is gone", self._slot)
        finally:
            self._kill_all()
            connection.close()

    def _handle(self, message: dict[str, str]) -> bool:
        match message["type"]:
            case "spawn":
                self._spawn(message["worker"])
            case "kill":
                worker = self._workers.get(message["worker"])
                if worker is not None:
                    worker.kill()
            case "ping":
                assert self._connection is not None
                self._connection.send({"type": "heartbeat"})
            case "shutdown":
                return False
            case other:
                logger.warning("slot %s: unknown message %r", self._slot, other)
        return True

    def _spawn(self, worker_id: str) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(_worker_path()), "TZ": "UTC"}
        worker = subprocess.Popen(
            [sys.executable, "-m", "ckpt_runtime.spark.worker_main"],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=sys.__stderr__.fileno() if sys.__stderr__ is not None else None,
            env=environment,
        )
        self._workers[worker_id] = worker
        assert worker.stdin is not None
        start = {
            "driver": [self._parameters.driver_host, self._parameters.driver_port],
            "secret": self._parameters.secret,
            "slot": self._slot,
            "worker": worker_id,
        }
        with suppress(BrokenPipeError):
            worker.stdin.write(json.dumps(start).encode() + b"\n")
        threading.Thread(target=self._watch, args=(worker_id, worker), daemon=True).start()

    def _watch(self, worker_id: str, worker: subprocess.Popen[bytes]) -> None:
        code = worker.wait()
        self._workers.pop(worker_id, None)
        if worker.stdin is not None:
            worker.stdin.close()
        assert self._connection is not None
        try:
            self._connection.send({"type": "exited", "worker": worker_id, "code": code})
        except OSError:
            logger.debug("slot %s: the driver is gone, cannot report worker %s", self._slot, worker_id)

    def _kill_all(self) -> None:
        workers = list(self._workers.values())
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.wait()


def _worker_path() -> list[str]:
    """This process's import path, without Spark's zipped copy of pyspark where the interpreter has it installed.

    A zip has no compiled modules: importing from it takes seconds of each worker's start.
    """
    path = [entry for entry in sys.path if entry]
    if any((Path(entry) / "pyspark" / "__init__.py").is_file() for entry in path):
        return [entry for entry in path if not (entry.endswith(".zip") and Path(entry).name.startswith(_ZIPPED))]
    return path


def run_agent(parameters: AgentParameters, index: int) -> None:
    """What a barrier task (or a test's plain process) calls."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    SlotAgent(parameters, index).run()
