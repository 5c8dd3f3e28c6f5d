"""The state in snapshots as Spark DataFrames: ``spark.read.format("ckpt-state")``.

Spark looks for data sources in packages whose names begin with ``pyspark_``, so the format is available wherever this
package is installed. Importing it also registers the format in the active session, for packages that were added in
other ways (``--py-files``).
"""

from __future__ import annotations

from contextlib import suppress

from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from pyspark_ckpt.source import StateDataSource as DefaultSource

__all__ = ["DefaultSource"]


def _register() -> None:
    session = SparkSession.getActiveSession()
    if session is not None:
        # A source that Spark has found itself cannot be registered again.
        with suppress(AnalysisException):
            session.dataSource.register(DefaultSource)


_register()
