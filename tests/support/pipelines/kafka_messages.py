"""Rows as messages of Kafka."""

from __future__ import annotations

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, source: str, rate: str, servers: str, topic: str) -> None:
    rows = spark.readStream.format("replay").schema("n BIGINT").option("rowsPerSecond", rate).load(source)
    messages = rows.hint("uid", "rows").selectExpr(
        "CAST(n AS STRING) AS key",
        "CASE WHEN n % 2 = 0 THEN CAST(n AS STRING) END AS value",
        "array(named_struct('key', 'twice', 'value', CAST(CAST(n * 2 AS STRING) AS BINARY))) AS headers",
    )
    writer = messages.writeStream.format("kafka").option("kafka.bootstrap.servers", servers)
    writer.option("topic", topic).queryName("messages").start()
