"""The state in snapshots as Spark DataFrames: ``spark.read.format("ckpt-state")``.

Spark looks for data sources in packages whose names begin with ``pyspark_``, so that the format is there wherever this
package is installed. Importing it registers the format in the active session, too, for packages that came in otherwise
(``--py-files``).
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
        # What Spark has found itself cannot be registered again.
        with suppress(AnalysisException):
            session.dataSource.register(DefaultSource)


_register()
