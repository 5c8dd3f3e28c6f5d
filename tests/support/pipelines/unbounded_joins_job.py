"""The joins without bounds of time as a job, whose batches are those of Spark."""

from __future__ import annotations

from batches import Batches
from pyspark.sql import SparkSession
from unbounded_joins import pairs, side


def pipeline(spark: SparkSession, source: str, output: str) -> None:
    spark.dataSource.register(Batches)
    rows = spark.readStream.format("batches").option("path", source).load()
    pairs(side(rows, "l"), side(rows, "r")).writeStream.format("parquet").queryName("pairs").start(output)
