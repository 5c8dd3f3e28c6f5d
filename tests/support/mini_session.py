"""A session without Spark in a process of its own, to be killed. Arguments: READY LEASE KEY=VALUE...

Writes its REST address into the file READY once it leads. LEASE is the time of its lease in seconds.
The token, if there is to be one, is in the environment. One that does not lead for long says what its threads do.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
from pathlib import Path

from ckpt_runtime.client.session_command import TOKEN_VARIABLE
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.testing.mini_cluster import MiniCluster

STUCK_S = 90


def main() -> None:
    """Runs until it is killed."""
    faulthandler.dump_traceback_later(STUCK_S)
    logging.basicConfig(level=logging.INFO)
    ready = Path(sys.argv[1])
    configuration = Configuration.from_properties(sys.argv[3:]).to_dict()
    token = os.environ.get(TOKEN_VARIABLE)
    with MiniCluster(
        configuration=configuration, rest=True, token=token, lease_timeout_s=float(sys.argv[2])
    ) as cluster:
        partial = ready.with_suffix(".partial")
        partial.write_text(cluster.rest_url)
        partial.replace(ready)
        faulthandler.cancel_dump_traceback_later()
        threading.Event().wait()


if __name__ == "__main__":
    main()
