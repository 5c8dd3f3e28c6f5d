"""Programs whose rows are late by one micro-batch, or by two.

Spark compares the rows of a batch with the watermark of the batch before it: a row that only the rows of the last batch
make late still counts. State is removed behind the rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from tests.support.pipelines.acceptance import PROGRAMS, pipeline, program, written_to
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


program("update", schemas=PAIRS, rows=BATCHES)(windows_of_late_rows_in_update_mode=windows_of_late_rows)

program("append", schemas=PAIRS, rows=BATCHES)(
    sessions_of_late_rows=lambda rows: (
        timed(rows)
        .groupBy(F.session_window("t", "8 seconds").alias("s"), "k")
        .count()
        .selectExpr(*seconds("s"), "k", "count")
    ),
    late_rows_without_duplicates=lambda rows: timed(rows).dropDuplicates(["k", "t"]).select("k", "v"),
    late_rows_without_duplicates_within_the_watermark=lambda rows: (
        timed(rows).dropDuplicatesWithinWatermark(["k"]).select("k", "v")
    ),
    inner_join_of_late_rows=lambda rows: pairs_of_one_stream(rows, "inner"),
    left_join_of_late_rows=lambda rows: pairs_of_one_stream(rows, "left_outer"),
    full_join_of_late_rows=lambda rows: pairs_of_one_stream(rows, "full_outer"),
)


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


def pairs_of_one_stream(rows: DataFrame, how: str) -> DataFrame:
    """A stream with itself: the rows with even times and all rows, up to five seconds later."""
    even = rows.where("v % 2 = 0").selectExpr("k AS l", "v AS lv", "timestamp_seconds(v) AS lt")
    every = rows.selectExpr("k AS r", "v AS rv", "timestamp_seconds(v) AS rt")
    left, right = even.withWatermark("lt", "10 seconds"), every.withWatermark("rt", "10 seconds")
    on = F.expr("l = r AND rt BETWEEN lt AND lt + INTERVAL 5 SECONDS")
    return left.join(right, on, how).select(*(["lv"] if how == "left_semi" else ["lv", "rv"]))


program("append", schemas=PAIRS, rows=BATCHES, differs="Spark misses a match with a later row of the same batch.")(
    semi_join_of_late_rows=lambda rows: pairs_of_one_stream(rows, "left_semi")
)


def sides(rows: DataFrame, others: DataFrame, how: str) -> DataFrame:
    left = rows.selectExpr("k AS l", "v AS lv", "timestamp_seconds(v) AS lt").withWatermark("lt", "10 seconds")
    right = others.selectExpr("k AS r", "v AS rv", "timestamp_seconds(v) AS rt").withWatermark("rt", "10 seconds")
    on = F.expr("l = r AND rt BETWEEN lt AND lt + INTERVAL 5 SECONDS")
    return left.join(right, on, how).select("l", "lv", "rv")


TWO = {"schemas": {"rows": "k STRING, v INT", "others": "k STRING, v INT"}, "rows": BATCHES, "others": BATCHES}
SHORTER = {**TWO, "others": BATCHES[:3]}


program("append", **TWO)(
    inner_join_of_two_streams_with_late_rows=lambda rows, others: sides(rows, others, "inner"),
    full_join_of_two_streams_with_late_rows=lambda rows, others: sides(rows, others, "full_outer"),
)

program("append", **SHORTER)(
    left_join_of_two_streams_of_which_one_ends_earlier=lambda rows, others: sides(rows, others, "left_outer")
)


@program("append", **SHORTER)
def windows_of_a_union_with_late_rows(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows).union(timed(others, "5 seconds"))
    return both.groupBy(F.window("t", "5 seconds"), "k").count().selectExpr(*seconds(), "k", "count")


def paced(spark: SparkSession, name: str, directory: str, output: str) -> None:
    """Starts the query of a program, whose sources have the names of its streams as uids."""
    made = PROGRAMS[name]
    streams = {
        each: spark.readStream.schema(made.schemas[each])
        .option("maxFilesPerTrigger", 1)
        .json(f"{directory}/{each}")
        .hint("uid", each)
        for each in made.inputs
    }
    writer = made.build(**streams).writeStream.outputMode(made.mode).trigger(availableNow=True)
    writer.foreachBatch(written_to(Path(output))).option("checkpointLocation", f"{output}-checkpoint").start()


UNITED = {"rows": ([1, 12, None], [5, 25], [8, 31], [70]), "others": ([2, 3], [40, 4], [39, 30, 28])}
"""A stream with more batches than the other, whose rows are late by those of the other one."""
WITHOUT_EMPTY_BATCHES = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}


@program("append", suite=True, **UNITED)
def windows_of_a_union_with_one_watermark(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows.union(others), "10 seconds")
    return both.groupBy(F.window("t", "10 seconds")).agg(F.sum("v").alias("s")).selectExpr(*seconds(), "s")


@program("update", **UNITED)
def windows_of_a_union_with_one_watermark_in_update_mode(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows.union(others.where("v > 2")), "10 seconds")
    return both.groupBy(F.window("t", "10 seconds")).agg(F.sum("v").alias("s")).selectExpr(*seconds(), "s")


@program("append", **UNITED)
def windows_of_a_stream_united_with_itself_and_another(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows.union(rows.where("v > 5")).unionByName(others), "0 seconds")
    return both.groupBy(F.window("t", "10 seconds")).agg(F.sum("v").alias("s")).selectExpr(*seconds(), "s")


@program("append", **UNITED)
def duplicates_of_a_union_with_one_watermark(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows.union(others), "10 seconds").withColumn("k", F.expr("v % 2"))
    return both.dropDuplicatesWithinWatermark(["k"]).select("k", "v")


@program("append", **UNITED)
def join_of_a_union_with_one_watermark(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows.union(others).where("v > 0"), "10 seconds").alias("b")
    late = timed(rows.selectExpr("v + 1 AS v"), "5 seconds").alias("l")
    return both.join(late, F.expr("b.t = l.t"), "left_outer").selectExpr("b.v", "l.v AS w")


FAR = ([("a", 1), ("b", 2), ("a", 12)], [("b", 44), ("a", 55)], [("c", 73), ("a", 90)], [("b", 150)], [("a", 200)])
BEHIND = ([("a", 100)], [("a", 1), ("b", 101)], [("a", 2), ("c", 102)], [("d", 160)])
NEAR = ([("a", 3)], [("z", 20)], [("a", 25)])
GREATEST = {"spark.sql.streaming.multipleWatermarkPolicy": "max"}
APART = {"schemas": {"rows": "k STRING, v INT", "others": "k STRING, v INT"}, "others": NEAR}
"""Streams whose event times are far apart, with rows that are late by their own stream only."""


@program("append", suite=True, rows=BEHIND, **APART)
def union_of_windows_of_streams_far_apart(rows: DataFrame, others: DataFrame) -> DataFrame:
    one = timed(rows).groupBy(F.window("t", "5 seconds")).count()
    other = timed(others, "5 seconds").groupBy(F.window("t", "5 seconds")).count()
    return one.union(other).selectExpr(*seconds(), "count")


@program("append", **SHORTER)
def union_of_windows_of_late_rows(rows: DataFrame, others: DataFrame) -> DataFrame:
    return union_of_windows_of_streams_far_apart(rows, others)


@program("append", rows=FAR, **APART)
def union_of_windows_of_streams_of_which_one_is_behind(rows: DataFrame, others: DataFrame) -> DataFrame:
    return union_of_windows_of_streams_far_apart(rows, others)


@program("append", settings=GREATEST, rows=BEHIND, **APART)
def union_of_windows_with_the_greatest_watermark(rows: DataFrame, others: DataFrame) -> DataFrame:
    return union_of_windows_of_streams_far_apart(rows, others)


@program("append", settings=GREATEST, rows=FAR, **APART)
def left_join_with_the_greatest_watermark(rows: DataFrame, others: DataFrame) -> DataFrame:
    return sides(rows, others, "left_outer")


@program("append", rows=FAR, **APART)
def union_of_rows_without_duplicates_of_streams_far_apart(rows: DataFrame, others: DataFrame) -> DataFrame:
    one, other = (timed(each).dropDuplicatesWithinWatermark(["k"]) for each in (rows, others))
    return one.union(other).select("k", "v")


@program("append", rows=BEHIND, **APART)
def windows_united_with_rows_that_have_a_watermark(rows: DataFrame, others: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "5 seconds")).count().selectExpr(*seconds(), "count")
    return windows.union(timed(others).selectExpr("cast(v AS LONG)", "0L", "1L"))


@program("append", rows=BEHIND, **APART)
def windows_joined_with_those_of_a_stream_far_apart(rows: DataFrame, others: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "5 seconds"), "k").count()
    other = timed(others, "5 seconds").select("k", F.window("t", "5 seconds"), "v")
    return windows.join(other, ["window", "k"], "left").selectExpr(*seconds(), "k", "count", "v")


@program("append", schemas=PAIRS, rows=FAR)
def windows_of_one_stream_with_two_delays(rows: DataFrame) -> DataFrame:
    small = timed(rows, "5 seconds").groupBy(F.window("t", "5 seconds")).count()
    return small.union(timed(rows, "50 seconds").groupBy(F.window("t", "20 seconds")).count()).selectExpr(
        *seconds(), "count"
    )


@program("append", settings=ROCKSDB, rows=BEHIND, **APART)
def processor_united_with_windows_of_a_stream_far_apart(rows: DataFrame, others: DataFrame) -> DataFrame:
    schema = "k STRING, what STRING, at LONG, watermark LONG"
    reported = (
        timed(rows).groupBy("k").transformWithState(Timed(), schema, "Append", "EventTime").where("what = 'timer'")
    )
    windows = timed(others).groupBy(F.window("t", "5 seconds"), "k").count()
    return reported.select("k", "at").union(windows.selectExpr("k", "cast(window.end AS LONG)"))


@program("append", rows=FAR, **APART)
def full_join_of_windows_with_the_times_of_rows(rows: DataFrame, others: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "10 seconds"), "k").count()
    ends = windows.select(F.col("k").alias("l"), F.window_time("window").alias("lt"), "count")
    later = timed(others).select(F.col("k").alias("r"), F.col("t").alias("rt"), "v")
    on = F.expr("l = r AND rt BETWEEN lt - INTERVAL 10 SECONDS AND lt + INTERVAL 10 SECONDS")
    return ends.join(later, on, "full").selectExpr("l", "r", "cast(lt AS LONG) AS lt", "count", "v")


program("append", suite=True, schemas=PAIRS, settings=WITHOUT_EMPTY_BATCHES, rows=BATCHES)(
    windows_without_empty_batches=windows_of_late_rows
)

# Event time reaches 190 with the last batch, and removes windows up to 140.
program("append", suite=True, schemas=PAIRS, settings=WITHOUT_EMPTY_BATCHES, rows=FAR)(
    windows_that_no_empty_batch_removes=windows_of_late_rows
)


program("append", schemas=PAIRS, trigger="once", rows=BATCHES)(windows_with_one_batch_in_each_run=windows_of_late_rows)


@program("append", schemas=PAIRS, settings=WITHOUT_EMPTY_BATCHES, rows=BATCHES)
def windows_of_windows_without_empty_batches(rows: DataFrame) -> DataFrame:
    small = timed(rows).groupBy(F.window("t", "5 seconds"), "k").count()
    return small.groupBy(F.window("window", "20 seconds")).agg(F.sum("count").alias("n")).selectExpr(*seconds(), "n")


@program("append", settings=WITHOUT_EMPTY_BATCHES, differs="The engine refuses it: its streams end apart.", **UNITED)
def left_join_without_empty_batches(rows: DataFrame, others: DataFrame) -> DataFrame:
    left, right = timed(rows.where("v > 0")).alias("l"), timed(others).alias("r")
    return left.join(right, F.expr("l.t = r.t"), "left_outer").selectExpr("l.v", "r.v AS w")
