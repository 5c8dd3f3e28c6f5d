"""A pipeline that sets options of its job. Arguments: KEY=VALUE..."""

from __future__ import annotations

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, *options: str) -> None:
    """Builds the job, which never ends by itself."""
    for option in options:
        key, _, value = option.partition("=")
        spark.conf.set(key, value)
    numbers = spark.readStream.format("numbers").option("rowsPerSecond", 100).load().hint("uid", "numbers")
    numbers.writeStream.format("noop").queryName("numbers").start()
