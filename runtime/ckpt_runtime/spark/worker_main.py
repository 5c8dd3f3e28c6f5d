"""Entry point of a worker process: start-up in the right order, then the control loop until agent or driver is gone.

A worker reads one JSON line from its agent on standard input; the end of that pipe means that the agent died, and the
worker follows at once, so that no orphan ever touches a sink.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import threading

SWITCH_INTERVAL_S = 0.0005
GC_THRESHOLDS = (10_000, 20, 50)
"""Batches of rows and state entries are no garbage in cycles: collect less often than Python's default."""


def main() -> None:
    """Runs until the driver says shutdown or either side is lost."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    start = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_follow_agent, name="agent-watch", daemon=True).start()
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
    worker = TaskWorker(connection, start["secret"], slot=start["slot"], worker_id=start["worker"])
    try:
        worker.run()
    except ConnectionError:
        logging.getLogger(__name__).info("worker %s: the driver is gone", start["worker"])
    finally:
        worker.close()
        logging.shutdown()
        os._exit(0)


def _follow_agent() -> None:
    while sys.stdin.buffer.read(4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
