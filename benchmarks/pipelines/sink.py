"""Numbers into a sink, as fast as they go, and times, at a rate: what ``benchmarks.sink`` runs."""

from __future__ import annotations

import json

from pyspark.sql import DataFrame, SparkSession

FETCH_WAIT_MS = 10
"""How long the broker of the tests waits before it answers a fetch."""


def pipeline(spark: SparkSession, sink: str, target: str, options: str, rows: str) -> None:
    """``rows`` numbers, each with its key, into a sink."""
    numbers = spark.readStream.format("numbers").option("rows", rows).option("rowNumber", "true").load()
    _write(numbers.hint("uid", "numbers").selectExpr("key", "value", "row"), sink, target, json.loads(options))


def times(spark: SparkSession, sink: str, target: str, options: str, rows_per_s: str) -> None:
    """Rows with the time at which they were due, in microseconds since the epoch."""
    rows = spark.readStream.format("rate").option("rowsPerSecond", rows_per_s).load().hint("uid", "times")
    due = rows.selectExpr("value AS key", "value", "unix_micros(timestamp) AS row")
    _write(due, sink, target, json.loads(options))


def copies(spark: SparkSession, sink: str, target: str, options: str, source: str) -> None:
    """Messages of a topic, whose first 20 characters are the time at which they were made, as :func:`times` has it."""
    servers, _, topic = source.partition("/")
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    reader = reader.option("kafka.fetch.wait.max.ms", str(FETCH_WAIT_MS))
    rows = reader.option("startingOffsets", "earliest").load().hint("uid", "messages")
    if sink == "kafka":
        rows.select("key", "value").writeStream.format(sink).options(**json.loads(options)).queryName("sink").start()
        return
    due = rows.selectExpr("CAST(substring(CAST(value AS STRING), 1, 20) AS BIGINT) AS row", "value")
    _write(due, sink, target, json.loads(options))


def _write(rows: DataFrame, sink: str, target: str, options: dict[str, str]) -> None:
    if sink == "foreachBatch":

        def write(batch: DataFrame, batch_id: int) -> None:
            batch.write.mode("overwrite").parquet(f"{target}/{batch_id}")

        rows.writeStream.foreachBatch(write).queryName("sink").start()
        return
    if sink == "kafka":
        rows = rows.selectExpr("CAST(key AS STRING) AS key", "CAST(row AS STRING) AS value")
    writer = rows.writeStream.format(sink).options(**options).queryName("sink")
    if sink in ("parquet", "delta"):
        writer.start(target)
    else:
        writer.start()
