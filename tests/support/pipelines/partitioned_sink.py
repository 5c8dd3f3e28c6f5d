"""Rows into a directory for each country and day."""

from __future__ import annotations

from pyspark.sql import SparkSession

WRITTEN = ("*", "make_dt_interval(0, 0, n) AS wait", "array(struct(NULL AS nothing)) AS nested")
"""Columns of which two have types that Parquet lacks."""


def pipeline(
    spark: SparkSession, source: str, output: str, format_: str = "parquet", columns: str = "country,day"
) -> None:
    rows = spark.readStream.format("replay").schema("n BIGINT, country STRING, day DATE").load(source)
    rows = rows.selectExpr(*WRITTEN) if columns == "country,day" else rows
    writer = rows.writeStream.format(format_).partitionBy(*columns.split(","))
    writer.queryName("partitioned").start(output)
