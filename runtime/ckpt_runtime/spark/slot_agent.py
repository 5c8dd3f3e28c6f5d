"""The slot agent: the long-running Python function of one Spark task. Deliberately small and simple.

It starts worker processes on the driver's request, adopts workers of an agent that has ended, reports when a worker has
ended, and kills workers on request. It relays no data and runs no user code, so that its Spark task rarely fails.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt_runtime.network.agent_messages import (
    TO_AGENT,
    AdoptWorker,
    AgentCommand,
    AgentHeartbeat,
    KillWorker,
    Ping,
    RegisterAgent,
    ShutdownAgent,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.connections import ControlConnection
from ckpt_runtime.processes import handles
from ckpt_runtime.processes.held_directory import HeldDirectory
from ckpt_runtime.spark.worker_processes import Spawner, WorkerProcess, WorkerStart, WorkerStarter, own_identity
from ckpt_runtime.spark.worker_template import Forker
from ckpt_runtime.structured_log import PLAIN, LogSettings, kept_lines, start_logging

logger = logging.getLogger(__name__)

_DIRECTORY_PREFIX = "ckpt-worker-"
_CLEAN_UP_S = 10.0


@dataclass(frozen=True, slots=True)
class AgentParameters:
    """The data with which an agent finds its driver."""

    driver_host: str
    driver_port: int
    secret: str
    slot: str
    log: LogSettings = PLAIN


class SlotAgent:
    """The supervisor of one slot; :meth:`run` returns when the driver orders a shutdown or has ended."""

    def __init__(self, parameters: AgentParameters, starter: WorkerStarter | None = None) -> None:
        self._parameters = parameters
        self._starter = _starter() if starter is None else starter
        self._slot = parameters.slot
        self._workers: dict[str, WorkerProcess] = {}
        self._directories: dict[str, HeldDirectory | str] = {}
        """The directories by worker; that of an adopted worker is held only by the worker itself."""
        self._watchers: dict[str, threading.Thread] = {}
        self._connection: ControlConnection | None = None

    def run(self) -> None:
        """Raises OSError if the driver cannot be reached at all, MalformedMessageError for a malformed message."""
        parameters = self._parameters
        connection = ControlConnection.dial((parameters.driver_host, parameters.driver_port), parameters.secret)
        self._connection = connection
        try:
            cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else ()
            process, host = own_identity(), connection.local_host
            connection.send(RegisterAgent(self._slot, host, tuple(cpus), process))
            while self._execute_command(connection.receive(TO_AGENT)):
                pass
        except ConnectionError:
            logger.info("slot %s: the driver is gone", self._slot)
        finally:
            workers = list(self._workers.values())
            for worker in workers:
                worker.kill()
            self._starter.close()
            for worker in workers:
                worker.wait()
            for directory in list(self._directories.values()):
                _remove(directory)
            # Watchers may still be deleting directories that no other process would delete; they end with this process.
            for watcher in list(self._watchers.values()):
                watcher.join(_CLEAN_UP_S)
            connection.close()

    def _execute_command(self, command: AgentCommand) -> bool:
        match command:
            case SpawnWorker():
                self._spawn(command)
            case AdoptWorker():
                self._adopt(command)
            case KillWorker():
                worker = self._workers.get(command.worker)
                if worker is not None:
                    worker.kill()
            case Ping():
                assert self._connection is not None
                self._connection.send(AgentHeartbeat(self._progress_of(command.starting)))
            case ShutdownAgent():
                self._release(command.keep)
                return False
        return True

    def _progress_of(self, worker_ids: Collection[str]) -> dict[str, int]:
        """The processor time that each worker has used, without workers that have ended. Only Linux provides it."""
        progress = {}
        for worker_id in worker_ids:
            worker = self._workers.get(worker_id)
            if worker is not None:
                with suppress(OSError):
                    progress[worker_id] = handles.processor_ticks(worker.pid)
        return progress

    def _spawn(self, command: SpawnWorker) -> None:
        """Start a worker. A failure to start it is reported like the end of a worker, so that the driver retries."""
        parameters, worker_id = self._parameters, command.worker
        directory: HeldDirectory | str = ""
        try:
            directory = HeldDirectory(_DIRECTORY_PREFIX)
            driver = (parameters.driver_host, parameters.driver_port)
            place = str(directory.path)
            start = WorkerStart(driver, parameters.secret, self._slot, worker_id, place, command.data_ports)
            worker = self._starter.start(start)
        except OSError as error:
            logger.warning("slot %s: worker %s cannot be started: %s", self._slot, worker_id, error)
            _remove(directory)
            self._report_exit(worker_id, None)
            return
        self._supervise(worker_id, worker, directory)

    def _adopt(self, command: AdoptWorker) -> None:
        try:
            worker = handles.AdoptedProcess(command.process.pid, command.process.started)
        except OSError as error:
            logger.info("slot %s: worker %s cannot be adopted: %s", self._slot, command.worker, error)
            self._report_exit(command.worker, None)
            return
        self._supervise(command.worker, worker, command.directory)

    def _supervise(self, worker_id: str, worker: WorkerProcess, directory: HeldDirectory | str) -> None:
        self._workers[worker_id] = worker
        self._directories[worker_id] = directory
        watcher = threading.Thread(target=self._watch, args=(worker_id, worker), daemon=True)
        self._watchers[worker_id] = watcher
        watcher.start()

    def _watch(self, worker_id: str, worker: WorkerProcess) -> None:
        code = worker.wait()
        directory = self._directories.pop(worker_id, "")
        # A released worker has another agent, which reports its end.
        if self._workers.pop(worker_id, None) is not None:
            log = kept_lines(str(directory.path) if isinstance(directory, HeldDirectory) else directory)
            self._report_exit(worker_id, code, log)
        # After the report, because deleting may take long and a job waits for its next worker.
        _remove(directory)
        self._watchers.pop(worker_id, None)

    def _report_exit(self, worker_id: str, code: int | None, log: str = "") -> None:
        assert self._connection is not None
        try:
            self._connection.send(WorkerExited(worker_id, code, log))
        except OSError:
            logger.debug("slot %s: the driver is gone, cannot report worker %s", self._slot, worker_id)

    def _release(self, worker_ids: Collection[str]) -> None:
        """Release the workers; they wait for the agent of another slot."""
        for worker_id in worker_ids:
            worker = self._workers.pop(worker_id, None)
            if worker is not None:
                self._watchers.pop(worker_id, None)
                directory = self._directories.pop(worker_id, None)
                if isinstance(directory, HeldDirectory):
                    directory.leave()
                worker.release()


def _remove(directory: HeldDirectory | str) -> None:
    """Remove a worker's temporary files. The worker is killed when its job is over, so it cannot do so itself."""
    if isinstance(directory, HeldDirectory):
        directory.remove()
    elif Path(directory).name.startswith(_DIRECTORY_PREFIX):
        shutil.rmtree(directory, ignore_errors=True)


def _starter() -> WorkerStarter:
    return Forker() if handles.machine() else Spawner()


def run_agent(parameters: AgentParameters) -> None:
    """Run an agent; called by a Spark task, or by a plain process in tests."""
    begin_log(parameters)
    SlotAgent(parameters).run()


def begin_log(parameters: AgentParameters) -> None:
    """Start the log of an agent and of the processes that it starts from now on."""
    start_logging(parameters.log, "agent", slot=parameters.slot)
    parameters.log.for_children()
