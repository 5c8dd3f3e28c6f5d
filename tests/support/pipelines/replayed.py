"""Rows of files that a source has to wait for, or that its job cannot keep up with."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, rows: str, output: str, rows_per_second: str) -> None:
    """``rows`` is a Parquet file, whose rows come at a given pace."""
    stream = spark.readStream.format("replay").option("rowsPerSecond", rows_per_second).load(rows).hint("uid", "rows")
    stream.writeStream.format("parquet").queryName("rows").start(output)


def slow(spark: SparkSession, directory: str, output: str, pause_s: str) -> None:
    """Reads the Parquet files of a directory; user code takes ``pause_s`` for each batch of a few rows."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(float(pause_s))
            yield batch

    files = spark.readStream.schema("n BIGINT").format("parquet").load(directory).hint("uid", "rows")
    worked = files.mapInArrow(work, "n BIGINT").hint("uid", "work")
    worked.writeStream.format("parquet").queryName("rows").start(output)
