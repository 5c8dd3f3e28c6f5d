"""Counts of windows over lines of text, each of which is a time in seconds; as many subtasks as the job has."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def pipeline(spark: SparkSession, lines: str, output: str) -> None:
    times = spark.readStream.format("text").load(lines).hint("uid", "lines")
    stamped = times.select(F.timestamp_seconds(F.col("value").cast("long")).alias("at")).withWatermark(
        "at", "0 seconds"
    )
    counted = stamped.groupBy(F.window("at", "10 seconds")).count().hint("uid", "windows")
    rows = counted.select(F.unix_seconds("window.start").alias("start"), "count")
    rows.writeStream.format("parquet").queryName("counts").outputMode("append").start(output)
