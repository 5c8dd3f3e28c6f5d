"""A session without Spark in a process of its own, to be killed. Arguments: READY LEASE KEY=VALUE...

Writes its REST address into the file READY once it leads. LEASE is the time of its lease in seconds.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.testing.mini_cluster import MiniCluster


def main() -> None:
    """Runs until it is killed."""
    ready = Path(sys.argv[1])
    configuration = Configuration.from_properties(sys.argv[3:]).to_dict()
    with MiniCluster(configuration=configuration, rest=True, lease_timeout_s=float(sys.argv[2])) as cluster:
        partial = ready.with_suffix(".partial")
        partial.write_text(cluster.rest_url)
        partial.replace(ready)
        threading.Event().wait()


if __name__ == "__main__":
    main()
