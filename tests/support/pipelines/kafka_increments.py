"""Stores what has arrived in a topic of Kafka since the last run. Arguments: the brokers, the topic, the directory."""

from __future__ import annotations

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, servers: str, topic: str, output: str) -> None:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    rows = (
        reader.option("startingOffsets", "earliest").load().selectExpr("partition", "offset", "string(value) AS text")
    )
    writer = rows.writeStream.format("parquet").option("checkpointLocation", f"{output}/state")
    writer.trigger(availableNow=True).start(f"{output}/rows")
