"""Rows of a file into a sink whose format, options and partitions a test names."""

from __future__ import annotations

import json

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, source: str, schema: str, format_: str, output: str, options: str, key: str) -> None:
    rows = spark.readStream.format("replay").schema(schema).load(source)
    writer = rows.writeStream.format(format_).options(**json.loads(options))
    if key:
        writer = writer.partitionBy(*key.split(","))
    writer.queryName("texts").start(output)
