"""Counted rows in blocks, with keyed state: blocks that are over never change again.

``seen`` gets each row (source, n) with the number of rows that keyed state had seen of its block of 200: n % 200 + 1,
if and only if state and input are exact. ``counts`` the same as a running aggregate. A program may name another
expression for the block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

BLOCK = 200


class Seen(StatefulProcessor):
    """How many rows of its key came so far."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", "seen BIGINT")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        known = self._seen.get()
        seen = 0 if known is None else known[0]
        for row in rows:
            seen += 1
            yield Row(source=row.source, n=row.n, seen=seen)
        self._seen.update((seen,))


def pipeline(spark: SparkSession, output: str, rows: str, rate: str, block: str = f"n DIV {BLOCK}") -> None:
    """Builds the job: sources of ``rows`` rows in all."""
    numbered = (
        spark.readStream.format("numbers")
        .option("sequence", True)
        .option("rows", rows)
        .option("rowsPerSecond", rate)
        .option("batchRows", 64)
        .load()
        .hint("uid", "numbers")
        .withColumn("block", F.expr(block))
        .hint("uid", "blocks")
    )
    (
        numbered.groupBy("source", "block")
        .transformWithState(Seen(), "source BIGINT, n BIGINT, seen BIGINT", "Append", "None")
        .hint("uid", "seen")
        .writeStream.format("parquet")
        .queryName("seen")
        .start(f"{output}/seen")
    )
    (
        numbered.groupBy("source", "block")
        .agg(F.count("*").alias("rows"))
        .hint("uid", "counts")
        .writeStream.format("parquet")
        .outputMode("update")
        .queryName("counts")
        .start(f"{output}/counts")
    )
