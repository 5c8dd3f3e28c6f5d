"""A directory through a filter and windows into a directory: what both sides run in ``benchmarks.etl``."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession, functions

SCHEMA = "customer STRING, amount BIGINT, placed_at TIMESTAMP"


def totals(rows: DataFrame) -> DataFrame:
    """Returns the ten-minute windows of each customer over the orders that are worth something."""
    return (
        rows.filter("amount >= 100")
        .withWatermark("placed_at", "1 minute")
        .groupBy(functions.window("placed_at", "10 minutes"), "customer")
        .agg(functions.count("*").alias("orders"), functions.sum("amount").alias("total"))
        .select("window.start", "customer", "orders", "total")
    )


def pipeline(spark: SparkSession, path: str, output: str) -> None:
    """Reads the files that are there, one range after the other, and writes the windows that have ended."""
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "1").parquet(path)
    writer = totals(rows).writeStream.format("parquet").outputMode("append").queryName("windows")
    writer.trigger(availableNow=True).start(output)
