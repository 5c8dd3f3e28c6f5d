"""The job of kept snapshots whose lists, maps and rows of joins are larger than an entry and than memory.

As ``golden.py``: uids, schemas and state names stay for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from tests.support.pipelines.golden import numbers, write, write_matches

SOURCES_PER_KEY = 10


class Gathering(StatefulProcessor):
    """Keeps every row of a few sources in a list and in a map; gives the running aggregates of a row's source."""

    def __init__(self, sleep_ms: float) -> None:
        self._sleep_s = sleep_ms / 1000

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._rows = handle.getListState("rows", "source BIGINT, n BIGINT")
        self._numbers = handle.getMapState("numbers", "source BIGINT, n BIGINT", "n BIGINT")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            time.sleep(self._sleep_s)
            self._rows.appendValue((row.source, row.n))
            self._numbers.updateValue((row.source, row.n), (row.n,))
            listed = [n for source, n in self._rows.get() if source == row.source]
            total = sum(n for (source, _), (n,) in self._numbers.iterator() if source == row.source)
            yield Row(source=row.source, rows=len(listed), max=listed[-1], sum=total)

    def close(self) -> None:
        pass


def pipeline(spark: SparkSession, directory: str, rate: str, sleep_ms: str) -> None:
    """Builds the job."""
    left = numbers(spark, directory, "left", int(rate))
    right = numbers(spark, directory, "right", int(rate) // 2)
    keyed = left.withColumn("few", F.expr(f"source DIV {SOURCES_PER_KEY}")).hint("uid", "few")
    schema = "source BIGINT, rows BIGINT, max BIGINT, sum BIGINT"
    gathered = keyed.groupBy("few").transformWithState(Gathering(float(sleep_ms)), schema, "Append", "EventTime")
    write(gathered, directory, "totals")
    write_matches(left, right, directory)
