"""A worker process: start-up in the right order, then the control loop until agent or driver is gone.

A worker with an interpreter of its own reads one JSON line from its agent on standard input; a forked worker gets a
pipe from the template. The end of either means that the agent is gone; a worker that runs a job then ends at once, so
that no orphan ever touches a sink (see ``parent_watch.py``).
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
import sys
from contextlib import suppress
from functools import partial
from typing import NoReturn

import msgspec

from ckpt_runtime.client.session_command import UMASK_VARIABLE
from ckpt_runtime.processes import handles
from ckpt_runtime.processes.held_directory import hold
from ckpt_runtime.spark.parent_watch import ParentWatch
from ckpt_runtime.spark.worker_processes import WorkerStart
from ckpt_runtime.state import registry
from ckpt_runtime.structured_log import LogSettings, keep_lines_in, log_of_process, start_logging

_HEAVY_MODULES = (
    "pyarrow.compute",
    "pyarrow.dataset",
    "pyarrow.acero",
    "pyarrow.parquet",
    "pyspark.sql.connect.session",
    "pyspark.sql.connect.streaming.readwriter",
    "pyspark.sql.datasource",
    "pyspark.sql.types",
    "pyspark.sql.streaming.stateful_processor",
    "ckpt_runtime.frontend.program",
    "ckpt_runtime.task.operator_factory",
)


def warm_up() -> None:
    """Imports and compiles; takes seconds the first time on a machine and a fraction of one later."""
    for module in _HEAVY_MODULES:
        importlib.import_module(module)
    registry.warm_up()
    importlib.import_module("ckpt_runtime.state.kernels").warm_up()


logger = logging.getLogger(__name__)

SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (10_000, 20, 50)
"""Batches of rows and state entries form no reference cycles, so collect less often than Python's default."""


def make_ready() -> None:
    """The first steps of a worker or a template."""
    start_logging(LogSettings.of_environment(), "worker")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if UMASK_VARIABLE in os.environ:
        # The user's umask applies to the files of sinks; the session's own files are private.
        os.umask(int(os.environ[UMASK_VARIABLE], 8))


def prepare() -> None:
    """Import and compile everything, which takes seconds. No Python thread is running afterwards."""
    gc.disable()  # everything loaded here stays alive: collecting it would take a quarter of the time
    import pyarrow as pa

    from ckpt_runtime.task import worker

    del worker
    # By default Arrow uses a thread per core, in each worker of the machine.
    pa.set_cpu_count(1)
    warm_up()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def work(start: WorkerStart, pipe: int) -> NoReturn:
    """Serve the driver until it is gone; ``pipe`` is for the ParentWatch. For a process without threads."""
    parent_watch = _watched_parent(start, pipe)
    _reseed()
    _serve(start, parent_watch)


def main() -> None:
    """The main function of a worker with an interpreter of its own."""
    handles.set_name(handles.WORKER)
    make_ready()
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerStart)
    parent_watch = _watched_parent(start, sys.stdin.fileno())
    prepare()
    _serve(start, parent_watch)


def _watched_parent(start: WorkerStart, pipe: int) -> ParentWatch:
    log_of_process(slot=start.slot, worker=start.worker)
    directory = start.directory
    hold(directory)  # until this process ends, even if its agent ends before
    keep_lines_in(directory)
    parent_watch = ParentWatch(pipe, partial(_end, directory), directory=directory)
    # Before any slow step, because an agent may end while its worker still imports.
    parent_watch.start()
    return parent_watch


def _reseed() -> None:
    """Reseed NumPy, since forks of one process would draw the same numbers. Python's own generator reseeds itself."""
    import numpy as np

    np.random.seed()


def _serve(start: WorkerStart, parent_watch: ParentWatch) -> NoReturn:
    from ckpt_runtime.network.connections import ControlConnection
    from ckpt_runtime.task.worker import TaskWorker

    code = 0
    try:
        connection = ControlConnection.dial(start.driver, start.secret)
        worker = TaskWorker(
            connection,
            start.secret,
            parent_watch,
            slot=start.slot,
            worker_id=start.worker,
            data_ports=start.data_ports,
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
