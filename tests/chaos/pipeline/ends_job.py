"""Whole jobs from one system into another: Kafka into Kafka, Kafka into Delta, a directory of files into PostgreSQL.

Orders are (id, key, amount). Kafka has the orders of a key in one partition, so their running totals have one answer.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

ORDER = "id BIGINT, key BIGINT, amount BIGINT"


def kafka_to_kafka(spark: SparkSession, servers: str) -> None:
    totals = _totals(spark, servers)
    messages = totals.selectExpr("CAST(key AS STRING) AS key", "to_json(struct(*)) AS value")
    writer = messages.writeStream.format("kafka").option("kafka.bootstrap.servers", servers)
    writer.outputMode("update").option("topic", "totals").queryName("totals").start()


def kafka_to_delta(spark: SparkSession, servers: str, table: str) -> None:
    _totals(spark, servers).writeStream.format("delta").outputMode("update").queryName("totals").start(table)


def files_to_postgres(spark: SparkSession, directory: str, url: str) -> None:
    orders = spark.readStream.schema(ORDER).option("maxFilesPerTrigger", 3).json(directory).hint("uid", "orders")
    kept = orders.filter("id % 7 != 0").withColumn("twice", F.col("amount") * 2).repartition(2)
    writer = kept.writeStream.format("postgresql").option("url", url).option("dbtable", "orders")
    writer.queryName("orders").start()


def _totals(spark: SparkSession, servers: str) -> DataFrame:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", "orders")
    records = reader.option("startingOffsets", "earliest").load().hint("uid", "records")
    orders = records.select(F.from_json(F.col("value").cast("string"), ORDER).alias("o")).select("o.*")
    sums = orders.groupBy("key").agg(
        F.count("*").alias("orders"), F.sum("amount").alias("amount"), F.max("id").alias("id")
    )
    return sums.hint("uid", "totals")
