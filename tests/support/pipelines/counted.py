"""Numbers that are counted per key for ever, in two vertices."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def pipeline(spark: SparkSession, directory: str) -> None:
    """Builds the job. ``directory`` is for what the sink reports."""
    rows = spark.readStream.format("numbers").options(keys="20", rowsPerSecond="100", batchRows="16")
    counted = (
        rows.load()
        .hint("uid", "source")
        .groupBy("key")
        .agg(F.count("*").alias("count"), F.sum("value").alias("sum"))
        .hint("uid", "count")
    )
    report = counted.writeStream.format("verify").options(key="key", count="count", sum="sum").outputMode("update")
    report.options(report=f"{directory}/report", reportIntervalMs=200).queryName("report").start()
