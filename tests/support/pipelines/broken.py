"""Pipelines that are refused, each in its own way."""

from __future__ import annotations

import os

from pyspark.sql import SparkSession


def raises(spark: SparkSession) -> None:
    """The author's own mistake."""
    raise LookupError("the table of ports is missing")


def exits(spark: SparkSession) -> None:
    """A script that ends itself."""
    os._exit(7)


def same_uids(spark: SparkSession) -> None:
    """Two operators of one uid."""
    for _ in range(2):
        spark.readStream.format("numbers").load().hint("uid", "twice").writeStream.format("noop").start()


def changes(spark: SparkSession) -> None:
    """Builds another plan in every process."""
    numbers = spark.readStream.format("numbers").load().hint("uid", f"numbers-{os.getpid()}")
    numbers.writeStream.format("noop").queryName("numbers").start()
