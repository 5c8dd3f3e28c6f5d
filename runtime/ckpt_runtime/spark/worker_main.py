"""Entry point of a worker process: start-up in the right order, then the control loop until agent or driver is gone.

A worker reads one JSON line from its agent on standard input; the end of that pipe means that the agent is gone, and a
worker that runs a job follows at once, so that no orphan ever touches a sink (see ``tether.py``).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
from contextlib import suppress
from functools import partial
from typing import NoReturn

from ckpt_runtime.spark.tether import Tether

SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (10_000, 20, 50)
"""Batches of rows and state entries are no garbage in cycles: collect less often than Python's default."""


def main() -> None:
    """Runs until the driver says shutdown or either side is lost."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    start = json.loads(sys.stdin.buffer.readline())
    directory = start["directory"]
    tether = Tether(sys.stdin.fileno(), partial(_end, directory), directory=directory)
    tether.start()
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    import pyarrow as pa

    from ckpt_runtime.network.connections import ControlConnection
    from ckpt_runtime.task.worker import TaskWorker
    from ckpt_runtime.task.worker_warm_up import warm_up

    pa.set_cpu_count(1)
    warm_up()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    connection = ControlConnection.dial((start["driver"][0], start["driver"][1]), start["secret"])
    worker = TaskWorker(connection, start["secret"], tether, slot=start["slot"], worker_id=start["worker"])
    try:
        worker.run()
    except ConnectionError:
        logging.getLogger(__name__).info("worker %s: the driver is gone", start["worker"])
    finally:
        worker.close()
        logging.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(0)


def _end(directory: str) -> NoReturn:
    """At once: somebody else deletes what a job left in the directory, which may take a while."""
    with suppress(OSError):
        os.posix_spawnp("rm", ["rm", "-rf", "--", directory], os.environ)
    os._exit(1)


if __name__ == "__main__":
    main()
