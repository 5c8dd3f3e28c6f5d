"""Counts the messages of topics by their value: each change of a count is a row of a Parquet directory."""

from __future__ import annotations

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, servers: str, topic: str, output: str) -> None:
    messages = (
        spark.readStream.format("kafka")
        .option("kafka.bootstrap.servers", servers)
        .option("kafka.topic.metadata.refresh.interval.ms", "200")
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
        .hint("uid", "orders")
    )
    counts = messages.selectExpr("CAST(value AS STRING) AS value").groupBy("value").count().hint("uid", "counts")
    counts.writeStream.format("parquet").outputMode("update").queryName("counted").start(output)
