"""A paced count and sum per key with small state: the restart is timed, not the work."""

from __future__ import annotations

from pyspark.sql import SparkSession, functions


def pipeline(spark: SparkSession, report: str, keys: str, rows_per_second: str) -> None:
    """``report`` is the sink's report directory; ``rows_per_second`` is the rate of all subtasks together."""
    (
        spark.readStream.format("numbers")
        .options(keys=keys, rowsPerSecond=rows_per_second)
        .load()
        .hint("uid", "source")
        .groupBy("key")
        .agg(functions.count("*").alias("count"), functions.sum("value").alias("sum"))
        .hint("uid", "state")
        .writeStream.format("verify")
        .outputMode("update")
        .options(key="key", count="count", sum="sum", report=report, reportIntervalMs=50)
        .queryName("verify")
        .start()
    )
