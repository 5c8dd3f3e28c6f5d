"""Count and sum per key by a ``StatefulProcessor`` in Python; every update goes to a sink that checks it."""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

STATE_SCHEMA = "count BIGINT, sum BIGINT"
OUTPUT_SCHEMA = "key BIGINT, count BIGINT, sum BIGINT"

Update = Row("key", "count", "sum")


class CountAndSum(StatefulProcessor):
    """One row out per row in: the key with its count and sum so far."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._totals = handle.getValueState("totals", STATE_SCHEMA)

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        count, total = self._totals.get() or (0, 0)
        for row in rows:
            count += 1
            total += row.value
            yield Update(key[0], count, total)
        self._totals.update((count, total))

    def close(self) -> None:
        pass


def pipeline(spark: SparkSession, report: str, keys: str) -> None:
    """``report`` is the sink's report directory, ``keys`` the number of keys."""
    (
        spark.readStream.format("numbers")
        .option("keys", keys)
        .load()
        .hint("uid", "source")
        .groupBy("key")
        .transformWithState(CountAndSum(), OUTPUT_SCHEMA, "Update", "None")
        .hint("uid", "state")
        .writeStream.format("verify")
        .outputMode("update")
        .options(key="key", count="count", sum="sum", report=report, reportIntervalMs=1000)
        .queryName("verify")
        .start()
    )
