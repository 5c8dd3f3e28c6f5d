"""A session without Spark in a process of its own, to be killed. Arguments: READY LEASE KEY=VALUE...

Writes its REST address into the file READY once it leads. LEASE is the time of its lease in seconds.
The token, if there is to be one, is in the environment. One that does not lead for long says what its threads do.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.configuration.cluster_options import LoggingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.structured_log import LogSettings, start_logging
from ckpt_runtime.testing.mini_cluster import APPLICATION_ID, MiniCluster
from tests.support import analyses

STUCK_S = 90
LOOK_S = 0.1


def main() -> None:
    """Runs until it is killed or its end is requested, by REST or by SIGTERM."""
    faulthandler.dump_traceback_later(STUCK_S)
    if kept := os.environ.get(analyses.VARIABLE):
        analyses.share(Path(kept))
    ended = threading.Event()
    terminated: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: terminated.append(number))
    ready = Path(sys.argv[1])
    given = Configuration.from_properties(sys.argv[3:])
    start_logging(LogSettings(given.get(LoggingOptions.FORMAT), APPLICATION_ID), "driver")
    configuration = given.to_dict()
    token = os.environ.get(TOKEN_VARIABLE)
    with MiniCluster(
        configuration=configuration, rest=True, token=token, lease_timeout_s=float(sys.argv[2]), on_shutdown=ended.set
    ) as cluster:
        if ended.is_set():
            return
        partial = ready.with_suffix(".partial")
        partial.write_text(cluster.rest_url)
        partial.replace(ready)
        faulthandler.cancel_dump_traceback_later()
        # A signal that comes as the main thread falls asleep is handled when it wakes.
        while not ended.wait(LOOK_S) and not terminated:
            pass


if __name__ == "__main__":
    main()
