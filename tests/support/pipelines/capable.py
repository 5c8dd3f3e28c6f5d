"""The job of the golden snapshots without its join, and later versions of it.

``same`` is the job as it is; ``evolved`` has another field in two of its states; ``upgraded`` has another operator in
front of these states, so that their rows come by another edge, and more aggregates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from golden import Remembering, numbers, write, write_kept_and_totals
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle


class Evolved(Remembering):
    """Has more to remember."""

    more_fields = ", note STRING"
    more_values = ("new",)


class Passing(StatefulProcessor):
    """Gives rows as they come."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(source=key[0], n=row.n)

    def close(self) -> None:
        pass


def passed(left: DataFrame) -> DataFrame:
    """The same rows, through one more operator."""
    stream = left.groupBy("source").transformWithState(Passing(), "source BIGINT, n BIGINT", "Append", "None")
    timed = stream.hint("uid", "passing").withColumn("at", F.timestamp_millis(F.col("n") + 1))
    return timed.hint("uid", "passed-time").withWatermark("at", "1 hour").hint("uid", "passed-watermark")


def pipeline(spark: SparkSession, directory: str, rate: str, sleep_ms: str, version: str) -> None:
    """Builds the job in a version."""
    left = numbers(spark, directory, "left", int(rate))
    if version == "upgraded":
        left = passed(left)
    processor = (Evolved if version == "evolved" else Remembering)(float(sleep_ms))
    write_kept_and_totals(left, directory, processor)
    if version == "upgraded":
        more = left.groupBy("source").agg(F.count("*").alias("rows"), F.max("n").alias("max"))
        write(more, directory, "more", "update")
