"""Programs whose rows are late by one micro-batch, or by two.

Spark compares the rows of a batch with the watermark of the batch before it: a row that only the rows of the last batch
make late still counts. State is removed behind the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tests.support.pipelines.acceptance import pipeline, program
from tests.support.pipelines.acceptance_aggregations import PAIRS, seconds, timed
from tests.support.pipelines.acceptance_processors import ROCKSDB, Processor

__all__ = ["pipeline"]

BATCHES = (
    [("a", 10), ("b", 12), ("a", 100)],
    # The watermark is 90 for what is removed behind them, and 0 for what is late.
    [("a", 85), ("b", 12), ("b", 90), ("a", 130)],
    # 120 and 90.
    [("a", 85), ("a", 95), ("b", 90), ("b", 91), ("b", 112), ("c", 300)],
    # 290 and 120.
    [("a", 115), ("a", 121), ("b", 119), ("b", 120), ("c", 300), ("b", 500)],
    # 490 and 290.
    [("a", 295), ("a", 280), ("b", 291), ("c", 495), ("d", 490)],
)


@program("append", suite=True, schemas=PAIRS, rows=BATCHES)
def windows_of_late_rows(rows: DataFrame) -> DataFrame:
    return timed(rows).groupBy(F.window("t", "5 seconds"), "k").count().selectExpr(*seconds(), "k", "count")


@program("update", keys="start k", schemas=PAIRS, rows=BATCHES)
def windows_of_late_rows_in_update_mode(rows: DataFrame) -> DataFrame:
    return windows_of_late_rows(rows)


@program("append", schemas=PAIRS, rows=BATCHES)
def sessions_of_late_rows(rows: DataFrame) -> DataFrame:
    return (
        timed(rows)
        .groupBy(F.session_window("t", "8 seconds").alias("s"), "k")
        .count()
        .selectExpr(*seconds("s"), "k", "count")
    )


@program("append", schemas=PAIRS, rows=BATCHES)
def late_rows_without_duplicates(rows: DataFrame) -> DataFrame:
    return timed(rows).dropDuplicates(["k", "t"]).select("k", "v")


@program("append", schemas=PAIRS, rows=BATCHES)
def late_rows_without_duplicates_within_the_watermark(rows: DataFrame) -> DataFrame:
    return timed(rows).dropDuplicatesWithinWatermark(["k"]).select("k", "v")


@program("append", schemas=PAIRS, rows=BATCHES)
def windows_of_windows_of_late_rows(rows: DataFrame) -> DataFrame:
    once = timed(rows).groupBy(F.window("t", "5 seconds"), "k").agg(F.count("*").alias("n"))
    return once.groupBy(F.window("window", "20 seconds")).agg(F.sum("n").alias("n")).selectExpr(*seconds(), "n")


@program("append", schemas=PAIRS, rows=BATCHES)
def sessions_of_late_rows_without_duplicates(rows: DataFrame) -> DataFrame:
    once = timed(rows).dropDuplicatesWithinWatermark(["k", "v"])
    return once.groupBy(F.session_window("t", "8 seconds").alias("s")).count().selectExpr(*seconds("s"), "count")


class Timed(Processor):
    """Tells the rows with the watermark that the processor sees, and the timers, which are a second after each row."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        now = timerValues.getCurrentWatermarkInMs()
        for row in rows:
            self.handle.registerTimer(row.v * 1000 + 1000)
            yield Row(k=key[0], what="row", at=row.v, watermark=now)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        now = timerValues.getCurrentWatermarkInMs()
        yield Row(k=key[0], what="timer", at=expiredTimerInfo.getExpiryTimeInMs() // 1000, watermark=now)


@program("append", schemas=PAIRS, settings=ROCKSDB, rows=BATCHES)
def processor_of_late_rows(rows: DataFrame) -> DataFrame:
    schema = "k STRING, what STRING, at LONG, watermark LONG"
    return timed(rows).groupBy("k").transformWithState(Timed(), schema, "Append", "EventTime")


class Later(Processor):
    """Gives each row with an event time that is a second later."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        now = timerValues.getCurrentWatermarkInMs()
        for row in rows:
            if row.v * 1000 > now:
                yield Row(k=key[0], at=pd.Timestamp(row.v + 1, unit="s").to_pydatetime())


@program("append", schemas=PAIRS, settings=ROCKSDB, rows=BATCHES)
def windows_behind_a_processor_of_late_rows(rows: DataFrame) -> DataFrame:
    later = (
        timed(rows)
        .groupBy("k")
        .transformWithState(Later(), "k STRING, at TIMESTAMP", "Append", "EventTime", eventTimeColumnName="at")
    )
    return later.groupBy(F.window("at", "5 seconds"), "k").count().selectExpr(*seconds(), "k", "count")


def waiting(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Tells the rows and the watermark, and times out 30 seconds behind the watermark."""
    now = state.getCurrentWatermarkMs()
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "vs": [[-1]], "watermark": [now]})
        return
    values = sorted(int(v) for frame in frames for v in frame["v"])
    state.update((len(values),))
    state.setTimeoutTimestamp(now + 30_000)
    yield pd.DataFrame({"k": [key[0]], "vs": [values], "watermark": [now]})


@program("append", schemas=PAIRS, rows=BATCHES)
def function_of_late_rows(rows: DataFrame) -> DataFrame:
    schema, timeout = "k STRING, vs ARRAY<LONG>, watermark LONG", GroupStateTimeout.EventTimeTimeout
    return timed(rows).groupBy("k").applyInPandasWithState(waiting, schema, "n LONG", "append", timeout)
