"""Copies one topic of Kafka into another one, exactly once. Arguments: the brokers, and both topics."""

from __future__ import annotations

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, servers: str, source: str, target: str) -> None:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", source)
    rows = reader.option("startingOffsets", "earliest").load().hint("uid", "source").select("key", "value")
    writer = rows.writeStream.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", target)
    writer.option("kafka.transaction.timeout.ms", "60000").queryName("target").start()
