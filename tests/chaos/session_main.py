"""A session in a process of its own, to be killed and frozen. Arguments: READY LEASE KEY=VALUE...

Writes its REST address into the file READY once it leads. LEASE is the time of its lease in seconds. It notices
lost workers within two seconds.
"""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.testing.mini_cluster import MiniCluster


def main() -> None:
    """Runs until it is killed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    ready = Path(sys.argv[1])
    cluster = MiniCluster(
        configuration=Configuration.from_properties(sys.argv[3:]).to_dict(),
        rest=True,
        lease_timeout_s=float(sys.argv[2]),
        heartbeat_interval_s=0.25,
        heartbeat_timeout_s=2.0,
    )
    with cluster:
        partial = ready.with_suffix(".partial")
        partial.write_text(cluster.rest_url)
        partial.replace(ready)
        threading.Event().wait()


if __name__ == "__main__":
    main()
