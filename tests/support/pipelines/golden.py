"""The job of the snapshots in ``tests/data/golden``: every kind of state. Uids, schemas and state names stay for ever.

Both inputs have (source, n) with n = 0, 1, 2, ... per source; a row's event time is n + 1 milliseconds. The watermark
stays behind all of them, so that timers and unmatched rows wait until the input ends, whatever order rows came in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

GROUP = 4


class Remembering(StatefulProcessor):
    """Keeps a value, a list and a map of its key, and a timer for each group of rows."""

    more_fields = ""
    more_values: tuple[Any, ...] = ()

    def __init__(self, sleep_ms: float) -> None:
        self._sleep_s = sleep_ms / 1000

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._seen = handle.getValueState("seen", f"seen BIGINT{self.more_fields}")
        self._last = handle.getListState("last", "n BIGINT")
        self._groups = handle.getMapState("groups", "start BIGINT", f"rows BIGINT, total BIGINT{self.more_fields}")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        seen = self._seen.get()[0] if self._seen.exists() else 0
        last = [item[0] for item in self._last.get()] if self._last.exists() else []
        for row in rows:
            time.sleep(self._sleep_s)
            seen += 1
            last = [*last, row.n][-3:]
            group = (row.n // GROUP * GROUP,)
            known = self._groups.getValue(group) if self._groups.containsKey(group) else (0, 0)
            self._groups.updateValue(group, (known[0] + 1, known[1] + row.n, *self.more_values))
            self._handle.registerTimer(group[0] + 1)
            yield Row(source=key[0], n=row.n, seen=seen, last=sum(last))
        self._seen.update((seen, *self.more_values))
        self._last.put([(n,) for n in last])

    def handleExpiredTimer(self, key: tuple[Any, ...], timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        group = (expiredTimerInfo.getExpiryTimeInMs() - 1,)
        rows, total = self._groups.getValue(group)[:2]
        self._groups.removeKey(group)
        yield Row(source=key[0], n=-1 - group[0], seen=rows, last=total)

    def close(self) -> None:
        pass


def numbers(spark: SparkSession, directory: str, name: str, rows_per_second: int) -> DataFrame:
    """The rows of an input file with their event time."""
    return (
        spark.readStream.format("replay")
        .option("path", f"{directory}/{name}.parquet")
        .option("partitionBy", "source")
        .option("rowsPerSecond", rows_per_second)
        .option("batchRows", 32)
        .load()
        .hint("uid", name)
        .withColumn("at", F.timestamp_millis(F.col("n") + 1))
        .hint("uid", f"{name}-time")
        .withWatermark("at", "1 hour")
        .hint("uid", f"{name}-watermark")
    )


def write(frame: DataFrame, directory: str, name: str, mode: str = "append") -> None:
    """To a directory of its own. The files that a kept snapshot covers are not kept with it."""
    sink = frame.hint("uid", name).writeStream.format("parquet").option("onMissing", "ignore")
    sink.outputMode(mode).queryName(name).start(f"{directory}/out/{name}")


def write_kept_and_totals(left: DataFrame, directory: str, processor: Remembering) -> None:
    """What is kept per source: by a processor, and as running aggregates."""
    schema = "source BIGINT, n BIGINT, seen BIGINT, last BIGINT"
    write(left.groupBy("source").transformWithState(processor, schema, "Append", "EventTime"), directory, "kept")
    columns = F.count("*").alias("rows"), F.max("n").alias("max"), F.sum("n").alias("sum")
    write(left.groupBy("source").agg(*columns), directory, "totals", "update")


def write_matches(left: DataFrame, right: DataFrame, directory: str) -> None:
    """Each left row with the right one of its number, or alone."""
    columns = F.col("source").alias("right_source"), F.col("n").alias("m"), F.col("at").alias("right_at")
    numbered = right.select(*columns).hint("uid", "right-numbers")
    condition = F.expr("source = right_source AND n = m AND right_at >= at AND right_at <= at")
    joined = left.join(numbered, condition, "left_outer").hint("uid", "joined")
    write(joined.select("source", "n", "m"), directory, "matches")


def pipeline(spark: SparkSession, directory: str, rate: str, sleep_ms: str) -> None:
    """Builds the job. ``rate`` is that of the left rows per second; ``sleep_ms`` per row holds its sources back."""
    left = numbers(spark, directory, "left", int(rate))
    right = numbers(spark, directory, "right", int(rate) // 2)
    write_kept_and_totals(left, directory, Remembering(float(sleep_ms)))
    write_matches(left, right, directory)
