"""Windows by a string key: the query that the engine and Structured Streaming run in ``benchmarks.windows``."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession, functions

SCHEMA = "customer STRING, amount BIGINT, placed_at TIMESTAMP"


def totals(rows: DataFrame) -> DataFrame:
    """Returns the ten-minute windows of each customer, with their counts."""
    return (
        rows.withWatermark("placed_at", "1 minute")
        .groupBy(functions.window("placed_at", "10 minutes"), "customer")
        .agg(
            functions.count("*").alias("orders"),
            functions.sum("amount").alias("total"),
            functions.approx_count_distinct("amount").alias("amounts"),
        )
    )


def pipeline(spark: SparkSession, path: str, output: str) -> None:
    """Reads the files in parts of one file, and writes the windows that have ended."""
    rows = spark.readStream.format("replay").option("batchRows", "65536").schema(SCHEMA).load(path)
    frame = totals(rows).hint("uid", "totals").select("window.start", "customer", "orders", "total", "amounts")
    frame.writeStream.format("parquet").outputMode("append").queryName("windows").start(output)
