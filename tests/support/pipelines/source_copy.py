"""Copies any source into a Parquet directory. Arguments: the format, its options as JSON, its schema, the output."""

from __future__ import annotations

import json

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, source: str, options: str, schema: str, output: str) -> None:
    reader = spark.readStream.format(source).options(**json.loads(options))
    rows = (reader.schema(schema) if schema else reader).load().hint("uid", "source")
    rows.writeStream.format("parquet").queryName("rows").start(output)
