"""A worker process: start-up in the right order, then the control loop until agent or driver has ended.

A worker with an interpreter of its own reads one JSON line from its agent on standard input; a forked worker gets a
pipe from the template. The end of either means that the agent has ended; a worker that runs a job then ends at once, so
that no orphan ever touches a sink.

A worker that has run a job may hold a sink or a channel, so it ends at once with its agent. A worker that has not may
wait for a while without an agent until another one adopts it. It accepts no work in that time: user code runs only
below a living barrier task.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import select
import shutil
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NoReturn

import msgspec

from ckpt_runtime.client.session_command import UMASK_VARIABLE
from ckpt_runtime.network.agent_messages import ProcessIdentity
from ckpt_runtime.processes import handles
from ckpt_runtime.processes.held_directory import hold
from ckpt_runtime.spark.worker_processes import WorkerStart, own_identity
from ckpt_runtime.state import registry
from ckpt_runtime.structured_log import LogSettings, keep_lines_in, log_of_process, start_logging

logger = logging.getLogger(__name__)


ORPHAN_LEASE_S = 30.0
"""How long a worker waits for its next agent; Spark takes seconds to start another slot."""


class ParentWatch:
    """``pipe`` is the reading end of the pipe that the agent holds open; ``end`` ends this process and never returns.

    ``directory`` has the process's temporary files; its agent removes them afterwards.
    """

    def __init__(
        self, pipe: int, end: Callable[[], None], lease_s: float = ORPHAN_LEASE_S, directory: str = ""
    ) -> None:
        self.directory = directory
        self._agent: int | None = pipe
        self._end = end
        self._lease_s = lease_s
        self._working = False
        self._lock = threading.Lock()
        self._woken, self._wake = os.pipe()

    def start(self) -> None:
        threading.Thread(target=self._follow, name="agent-watch", daemon=True).start()

    @property
    def identity(self) -> ProcessIdentity:
        return own_identity()

    def begin_work(self) -> None:
        """From now on the worker ends with its agent; it ends at once if it has no agent."""
        with self._lock:
            if self._agent is None:
                logger.error("a worker without an agent was asked to work")
                self._end()
            self._working = True

    def adopted_by(self, agent: ProcessIdentity) -> None:
        """Follow another agent instead. Ends the process if that agent has already ended.

        The descriptor of the former agent stays open, as this happens only once or twice in a worker's life.
        """
        try:
            held = handles.hold(agent.pid, agent.started)
        except OSError as error:
            logger.info("the adopting agent is gone: %s", error)
            self._end()
            return
        with self._lock:
            self._agent = held
        # The watching thread still waits on the descriptor of the former agent.
        os.write(self._wake, b"!")

    def _follow(self) -> None:
        while True:
            with self._lock:
                agent = self._agent
            # No descriptor becomes readable if the lease has expired.
            poll = select.poll()
            poll.register(self._woken, select.POLLIN)
            if agent is not None:
                poll.register(agent, select.POLLIN)
            ready = [descriptor for descriptor, _ in poll.poll(self._lease_s * 1000 if agent is None else None)]
            if not ready:
                logger.info("no agent adopted this worker within %g s", self._lease_s)
                self._end()
                return
            if self._woken in ready:
                os.read(self._woken, 1)
            elif not self._survives(agent):
                return

    def _survives(self, agent: int | None) -> bool:
        """Whether the worker continues after its agent has ended or has just been replaced."""
        with self._lock:
            if self._agent != agent:
                return True
            if self._working:
                self._end()
                return False
            self._agent = None
        logger.info("the agent is gone, waiting for another one")
        return True


_HEAVY_MODULES = (
    "encodings.cp437",  # of the names in an archive
    "encodings.idna",
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.acero",
    "pyarrow.parquet",
    "ckpt_runtime.frontend.captured_session",
    "pyspark.sql.datasource",
    "pyspark.sql.types",
    "pyspark.sql.streaming.stateful_processor",
    "pyspark.sql.streaming.stateful_processor_util",
    "google.protobuf.descriptor_pb2",
    "ckpt_runtime.frontend.program",
    "ckpt_runtime.connectors.file_sink",
    "ckpt_runtime.connectors.file_source",
    "ckpt_runtime.connectors.split_source",
    "ckpt_runtime.connectors.waiting_batches",
    "ckpt_runtime.task.deployed_job",
)


def warm_up(*more: str) -> None:
    """Imports and compiles; takes seconds the first time on a machine and a fraction of one later.

    ``more`` are modules that few jobs use, but those of the caller do.
    """
    for module in (*_HEAVY_MODULES, *more):
        importlib.import_module(module)
    registry.warm_up()
    importlib.import_module("ckpt_runtime.state.kernels").warm_up()


SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (10_000, 20, 50)
"""Batches of rows and state entries form no reference cycles, so collect less often than Python's default."""


def make_ready(process: str) -> None:
    """The first steps of a worker or a template; ``process`` says in its log which of both it is."""
    start_logging(LogSettings.of_environment(), process)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if UMASK_VARIABLE in os.environ:
        # The user's umask applies to the files of sinks; the session's own files are private.
        os.umask(int(os.environ[UMASK_VARIABLE], 8))


def prepare(*more: str) -> None:
    """Import and compile everything, which takes seconds. No Python thread is running afterwards.

    ``more`` are further modules to import.
    """
    gc.disable()  # everything loaded here stays alive: collecting it would take a quarter of the time
    import pyarrow as pa

    from ckpt_runtime.task import worker

    del worker
    # By default Arrow uses a thread per core, in each worker of the machine.
    pa.set_cpu_count(1)
    warm_up(*more)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def work(start: WorkerStart, pipe: int) -> NoReturn:
    """Serve the driver until it has ended; ``pipe`` is for the ParentWatch. For a process without threads."""
    parent_watch = _watched_parent(start, pipe)
    # Forks of one process would draw the same numbers. Python's own generator reseeds itself.
    import numpy as np

    np.random.seed()
    _serve(start, parent_watch)


def main() -> None:
    """The main function of a worker with an interpreter of its own."""
    handles.set_name(handles.WORKER)
    make_ready("worker")
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerStart)
    parent_watch = _watched_parent(start, sys.stdin.fileno())
    prepare()
    _serve(start, parent_watch)


def _watched_parent(start: WorkerStart, pipe: int) -> ParentWatch:
    log_of_process(process="worker", slot=start.slot, worker=start.worker)
    directory = start.directory
    hold(directory)  # until this process ends, even if its agent ends before
    keep_lines_in(directory)
    parent_watch = ParentWatch(pipe, partial(_end, directory), directory=directory)
    # Before any slow step, because an agent may end while its worker still imports.
    parent_watch.start()
    return parent_watch


def _serve(start: WorkerStart, parent_watch: ParentWatch) -> NoReturn:
    from ckpt_runtime.network.connections import ControlConnection
    from ckpt_runtime.task.worker import TaskWorker

    code = 0
    try:
        connection = ControlConnection.dial(start.driver, start.secret)
        worker = TaskWorker(
            connection, start.secret, parent_watch, slot=start.slot, worker_id=start.worker, data_ports=start.data_ports
        )
        try:
            worker.run()
        finally:
            worker.close()
    except ConnectionError:
        logger.info("worker %s: the driver is gone", start.worker)
    except BaseException:
        logger.exception("worker %s ends", start.worker)
        code = 1
    finally:
        logging.shutdown()
        shutil.rmtree(start.directory, ignore_errors=True)
        os._exit(code)


def _end(directory: str) -> NoReturn:
    """End at once: another process deletes the files a job left in the directory, which may take a while."""
    with suppress(OSError):
        os.posix_spawnp("rm", ["rm", "-rf", "--", directory], os.environ)
    os._exit(1)


if __name__ == "__main__":
    main()
