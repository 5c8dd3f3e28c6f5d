"""Example pipeline, version 1: orders from Kafka, with countries from Parquet, by minute, into a Delta table.

    ckpt run pipelines/orders.py -- --servers localhost:9092 --customers /data/customers.parquet --table /data/revenue

A message of topic ``orders`` is a JSON object with ``customer``, ``cents`` and ``placed_at``. The table gets one row
for each minute and country, when the minute is over in event time: how many orders there were, and their sum.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession, functions

ORDER = "order_id BIGINT, customer STRING, cents BIGINT, placed_at TIMESTAMP"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The pipeline's arguments, the same in both versions."""
    parser = argparse.ArgumentParser(prog="orders")
    parser.add_argument("--servers", required=True, help="brokers of Kafka, as HOST:PORT")
    parser.add_argument("--customers", required=True, help="Parquet table with the columns customer and country")
    parser.add_argument("--table", required=True, help="directory of the Delta table")
    return parser.parse_args(list(arguments))


def revenue(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    """Orders and their sum for each minute and country."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", options.servers)
    records = reader.option("subscribe", "orders").option("startingOffsets", "earliest").load().hint("uid", "records")
    orders = records.select(functions.from_json(functions.col("value").cast("string"), ORDER).alias("order")).select(
        "order.*"
    )
    customers = spark.read.parquet(options.customers)
    known = orders.join(functions.broadcast(customers), "customer").withWatermark("placed_at", "2 minutes")
    minutes = known.hint("uid", "event-time").groupBy(functions.window("placed_at", "1 minute"), "country")
    sums = minutes.agg(functions.count("*").alias("orders"), functions.sum("cents").alias("revenue_cents")).hint(
        "uid", "minutes"
    )
    return sums.select(functions.col("window.start").alias("minute"), "country", "orders", "revenue_cents")


def write_revenue(rows: DataFrame, options: argparse.Namespace) -> None:
    """Appends to the Delta table: each checkpoint is one version of it."""
    rows.writeStream.format("delta").option("mergeSchema", "true").queryName("revenue").start(options.table)


def pipeline(spark: SparkSession, *arguments: str) -> None:
    """Builds the job."""
    options = parse_arguments(arguments)
    write_revenue(revenue(spark, options), options)
