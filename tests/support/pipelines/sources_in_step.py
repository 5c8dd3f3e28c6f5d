"""Queries in which two streams of files meet, each batch a file of both, with slow functions behind them."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

SCHEMA = "k STRING, v DOUBLE, n LONG"


UNEVEN = "uneven"
"""The name of a query whose right stream has two files in each batch; all other streams have one."""


def write_batches(directory: Path, *, batches: Mapping[str, int], rows: int, seed: int = 1, files: int = 1) -> None:
    """Writes files whose rows reach back over the last three batches, so that some are late by one or two of them.

    A batch has so many ``files`` of the right stream.
    """
    choice = Random(seed)
    for stream, count in batches.items():
        (directory / stream).mkdir(parents=True)
        for at in range(count):
            latest = 100 * (at // (files if stream == "right" else 1) + 1) + choice.randrange(40)
            times = [choice.randrange(max(0, latest - 300), latest) + 0.5 for _ in range(rows - 1)] + [latest]
            records = [{"k": choice.choice("abcd"), "v": time, "n": number} for number, time in enumerate(times)]
            path = directory / stream / f"{at}.json"
            path.write_text("".join(json.dumps(record) + "\n" for record in records))
            os.utime(path, (1_700_000_000 + at,) * 2)


def timed(rows: DataFrame, time: str = "t", delay: str = "10 seconds") -> DataFrame:
    return rows.withColumn(time, F.timestamp_seconds("v")).withWatermark(time, delay)


def windowed(rows: DataFrame, length: str) -> DataFrame:
    counted = rows.groupBy(F.window("t", length), "k").agg(F.count("*").alias("c"), F.sum("n").alias("s"))
    return counted.select(F.col("window.end").cast("long").alias("end"), "k", "c", "s")


def union(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    both = timed(left).union(timed(right, delay="20 seconds")).repartition("k")
    return windowed(both.withColumn("n", slowly(slow)("n")), "7 seconds")


def join(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    ours = timed(left, "lt").select("k", "lt", F.col("v").alias("lv"), F.col("n").alias("ln"))
    theirs = timed(right, "rt").select(F.col("k").alias("r"), "rt", F.col("v").alias("rv"), F.col("n").alias("rn"))
    on = F.expr("k = r AND rt BETWEEN lt AND lt + INTERVAL 1 SECONDS")
    return ours.join(theirs, on, "full_outer").select("k", "r", "lv", "rv", slowly(slow)("ln").alias("ln"), "rn")


def windows(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    """Windows of windows of a union."""
    both = timed(left).union(timed(right)).repartition("k")
    counted = (
        both.withColumn("n", slowly(slow)("n")).groupBy(F.window("t", "5 seconds"), "k").agg(F.sum("n").alias("n"))
    )
    longer = counted.groupBy(F.window(F.window_time("window"), "20 seconds")).agg(F.sum("n").alias("s"), F.count("*"))
    return longer.select(F.col("window.end").cast("long").alias("end"), "s", "count(1)")


def filtered(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    """The latest rows of files are filtered out, some by a filter behind the union. Spark's event time ignores them."""
    ours = timed(left).filter("n % 3 = 0 AND t < current_timestamp()")
    both = ours.union(timed(right)).filter("n % 2 = 0")
    return windowed(both.withColumn("n", slowly(slow)("n")), "7 seconds").filter("k <> 'a'")


def branches(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    """Event time is that of the rows which any branch of a frame keeps."""
    return windowed(left.filter("n % 5 = 0").union(left.filter("k = 'b' AND n % 2 = 0")), "7 seconds")


def without_keys(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    """Rows without a key match nothing, and neither do those whose key the other side filters out."""
    ours = left.select(F.expr("nullif(k, 'a')").alias("k"), F.col("t").alias("lt"), F.col("v").alias("lv"))
    theirs = right.filter("k <> 'b'").select(F.col("k").alias("r"), F.col("t").alias("rt"), F.col("v").alias("rv"))
    on = F.expr("k = r AND rt BETWEEN lt AND lt + INTERVAL 1 SECONDS")
    return ours.join(theirs, on).select("k", "lv", "rv")


def chosen(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    """A table says which rows are filtered out."""
    keys = left.sparkSession.createDataFrame([("a",), ("c",)], "k STRING")
    left.union(right).createOrReplaceTempView("chosen_rows")
    keys.createOrReplaceTempView("chosen_keys")
    rows = left.sparkSession.sql("SELECT * FROM chosen_rows WHERE k IN (SELECT k FROM chosen_keys)")
    return windowed(rows.filter("n > (SELECT 2 * count(*) FROM chosen_keys)"), "7 seconds")


class Numbered(StatefulProcessor):
    """Numbers the rows of a key, in calls that have all rows of a batch or some of them."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._count = handle.getValueState("count", "count LONG")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        count = self._count.get()[0] if self._count.exists() else 0
        for row in rows:
            count += 1
            yield Row(k=key[0], n=count, t=row.t)
        self._count.update((count,))

    def close(self) -> None:
        pass


def processed(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    """The source waits until the windows have a batch, whose rows the processor gathers."""
    numbered = (
        timed(left)
        .groupBy("k")
        .transformWithState(Numbered(), "k STRING, n LONG, t TIMESTAMP", "Append", "EventTime", eventTimeColumnName="t")
    )
    return windowed(numbered, "7 seconds").drop("s")


def furthest(slow: str, left: DataFrame, right: DataFrame) -> DataFrame:
    """With the policy ``max``, event time is that of the stream that is ahead: rows of the other one are late by it."""
    both = timed(left).union(timed(right, delay="150 seconds")).repartition("k")
    return windowed(both.withColumn("n", slowly(slow)("n")), "7 seconds")


def slowly(slow: str):  # type: ignore[no-untyped-def]
    """The identity, which takes a millisecond while the file ``slow`` is there."""

    @F.udf("long")
    def same(n: int | None) -> int | None:
        if os.path.exists(slow):
            time.sleep(0.001)
        return n

    return same


OF_ONE_FRAME = {"branches": branches, "without_keys": without_keys, "chosen": chosen}
"""Queries that read the same two frames with event time, and filter them differently."""
FURTHEST, PROCESSED = "furthest", "processed"
QUERIES = {
    "union": union,
    "join": join,
    "windows": windows,
    UNEVEN: windows,
    "filtered": filtered,
    FURTHEST: furthest,
    PROCESSED: processed,
    **OF_ONE_FRAME,
}


def pipeline(spark: SparkSession, directory: str, output: str, names: str, continues: str) -> None:
    started(spark, directory, output, names, continues)


def started(spark: SparkSession, directory: str, output: str, names: str, continues: str) -> list[StreamingQuery]:
    """Starts queries ``names``; those after the first one read streams whose names end with their number.

    Unless ``continues`` is empty, each has a location in which its next run continues.
    """
    queries = []
    frames: list[DataFrame] = []
    for number, name in enumerate(names.split(",")):
        spark.conf.set("spark.sql.streaming.multipleWatermarkPolicy", "max" if name == FURTHEST else "min")
        streams = frames
        if name not in OF_ONE_FRAME or not frames:
            streams = [
                spark.readStream.schema(SCHEMA)
                .option("maxFilesPerTrigger", files)
                .json(f"{directory}/{stream}{number or ''}")
                for stream, files in (("left", 1), ("right", 2 if name == UNEVEN else 1))
            ]
        if name in OF_ONE_FRAME:
            streams = frames = frames or [timed(stream) for stream in streams]
        writer = QUERIES[name](f"{directory}/slow", *streams).writeStream.queryName(f"{name}{number or ''}")
        writer = writer.trigger(availableNow=True)
        if continues:
            writer = writer.option("checkpointLocation", f"{output}/state-of-{name}{number}")
        queries.append(writer.format("parquet").start(f"{output}/{number}"))
    return queries
