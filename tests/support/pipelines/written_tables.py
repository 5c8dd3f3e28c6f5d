"""Rows of a file as tables, by the names of formats as programs use them."""

from __future__ import annotations

from pyspark.sql import SparkSession


def delta(spark: SparkSession, source: str, output: str) -> None:
    rows = spark.readStream.format("replay").load(source)
    rows.writeStream.format("delta").partitionBy("name").queryName("delta").start(output)


def postgres(spark: SparkSession, source: str, url: str) -> None:
    rows = spark.readStream.format("replay").load(source)
    rows.writeStream.format("postgresql").option("url", url).option("dbtable", "numbers").queryName("postgres").start()
