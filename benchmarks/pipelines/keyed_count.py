"""Count and sum per key by the engine's own aggregate; every update goes to a sink that checks it."""

from __future__ import annotations

from pyspark.sql import SparkSession, functions


def pipeline(spark: SparkSession, report: str, keys: str, key: str = "int") -> None:
    """``report`` is the sink's report directory, ``keys`` the number of keys, ``key`` their form."""
    (
        spark.readStream.format("numbers")
        .option("keys", keys)
        .option("keyForm", key)
        .option("batchRows", 65_536)
        .load()
        .hint("uid", "source")
        .groupBy("key")
        .agg(functions.count("*").alias("count"), functions.sum("value").alias("sum"))
        .hint("uid", "state")
        .writeStream.format("verify")
        .outputMode("update")
        .options(key="key", keyForm=key, count="count", sum="sum", report=report, reportIntervalMs=1000)
        .queryName("verify")
        .start()
    )
