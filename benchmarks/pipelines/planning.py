"""A query of many operators: what ``benchmarks.planning`` plans. It never runs."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

LEAST_OPERATORS = 5
"""The reader, the watermark, the windows, the columns of the result, the writer."""


def pipeline(spark: SparkSession, directory: str, operators: str, version: str) -> None:
    """``version`` is a number in the query's first filter: no answer to an earlier version is one to this."""
    orders = spark.readStream.schema("id BIGINT, country STRING, amount DOUBLE, placed_at TIMESTAMP").parquet(directory)
    orders = orders.hint("uid", "orders")
    for number in range(int(operators) - LEAST_OPERATORS):
        orders = _operator(orders, number, int(version))
    totals = (
        orders.withWatermark("placed_at", "10 minutes")
        .groupBy(sf.window("placed_at", "1 hour"), "country")
        .agg(sf.count("*").alias("orders"), sf.sum("amount").alias("total"), sf.max("id").alias("last"))
        .hint("uid", "totals")
    )
    rows = totals.select("window.start", sf.upper("country").alias("country"), "orders", "total", "last")
    rows.writeStream.format("noop").queryName("totals").start()


def _operator(orders: DataFrame, number: int, version: int) -> DataFrame:
    kinds = (
        lambda: orders.filter(sf.col("amount") > version + number),
        lambda: orders.withColumn(f"half_{number}", sf.round(sf.col("amount") / 2, 2)),
        lambda: orders.filter(sf.col("country").rlike("^[A-Z]{2}$") | sf.col("id").isNotNull()),
        lambda: orders.withColumn(f"day_{number}", sf.date_format("placed_at", "yyyy-MM-dd")),
    )
    return kinds[number % len(kinds)]()
