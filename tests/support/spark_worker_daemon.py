"""A daemon that forks Spark's Python workers, like ``pyspark.daemon``, but imports first what they need.

Spark starts one for each kind of worker (``spark.python.daemon.module``), and a new worker for nearly every batch of a
stateful processor, and three for each plan that reads or writes state: importing in each of them would take most of its
time.
"""

from __future__ import annotations

import importlib
import sys

_NEEDED = (
    "pandas",
    "pyarrow.compute",
    "pyarrow.parquet",
    "pyspark.sql.datasource_internal",
    "pyspark.sql.functions",
    "pyspark.sql.pandas.serializers",
    "pyspark.sql.streaming.stateful_processor_api_client",
    "pyspark_ckpt.source",
    "pyspark_ckpt.source",
)


def main() -> None:
    """Imports the workers' module, which is the first argument, and what it uses; then forks workers until it ends."""
    from pyspark import daemon

    for name in (*_NEEDED, sys.argv[1]):
        importlib.import_module(name)
    daemon.manager()


if __name__ == "__main__":
    main()
