"""Rows into a directory for each country and day."""

from __future__ import annotations

from pyspark.sql import SparkSession


def pipeline(
    spark: SparkSession, source: str, output: str, format_: str = "parquet", columns: str = "country,day"
) -> None:
    rows = spark.readStream.format("replay").schema("n BIGINT, country STRING, day DATE").load(source)
    writer = rows.writeStream.format(format_).partitionBy(*columns.split(","))
    writer.queryName("partitioned").start(output)
