"""A bounded job that keeps nothing of its rows: no operator of it needs a final checkpoint."""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def pipeline(spark: SparkSession, *arguments: str) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", required=True)
    options = parser.parse_args(arguments)
    numbers = spark.readStream.format("numbers").option("rows", options.rows).load().hint("uid", "numbers")
    counts = numbers.groupBy("key").agg(F.count("*").alias("count")).hint("uid", "counts")
    counts.writeStream.format("noop").outputMode("update").queryName("counts").start()
