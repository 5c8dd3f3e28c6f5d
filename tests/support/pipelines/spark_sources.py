"""A PySpark program that copies a source into a Parquet directory. Spark and the engine run it as it is."""

from __future__ import annotations

import json

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, source: str, schema: str, options: str, path: str, output: str) -> None:
    """Reads what is there now. ``options`` is a JSON object."""
    reader = spark.readStream.format(source).options(**json.loads(options))
    if schema:
        reader = reader.schema(schema)
    copied = reader.load(path or None)
    writer = copied.hint("uid", "source").writeStream.format("parquet").queryName("copy").trigger(availableNow=True)
    writer.option("checkpointLocation", f"{output}-checkpoint").start(output).awaitTermination()
