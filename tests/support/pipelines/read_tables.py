"""Reads a Delta table, and a table of PostgreSQL, up to what is there now, and writes the rows to Delta tables."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def delta(spark: SparkSession, source: str, target: str) -> None:
    rows = spark.readStream.format("delta").option("maxFilesPerTrigger", 1).load(source)
    doubled = rows.hint("uid", "rows").withColumn("twice", F.col("n") * 2)
    writer = doubled.writeStream.format("delta").partitionBy("part").queryName("doubled")
    writer.trigger(availableNow=True).start(target)


def postgres(spark: SparkSession, url: str, table: str, target: str) -> None:
    reader = spark.readStream.format("postgresql").option("url", url).option("dbtable", table)
    rows = reader.option("growingColumn", "id").schema("id BIGINT, n INT").load()
    writer = rows.hint("uid", "rows").filter("n > 0").writeStream.format("delta").queryName("kept")
    writer.trigger(availableNow=True).start(target)
