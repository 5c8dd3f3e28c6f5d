"""User code that prints: arguments are the number of bytes for each row, and of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, size: str, rows: str) -> None:
    """Builds the job, which ends by itself."""
    line = "x" * 99 + "\n"

    def shout(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for _ in range(batch.num_rows):
                print(line * (int(size) // len(line)), end="", flush=True)
            yield batch

    numbers = spark.readStream.format("numbers").option("sequence", True).option("rows", rows).load()
    shouted = numbers.hint("uid", "numbers").mapInArrow(shout, "source BIGINT, n BIGINT").hint("uid", "shout")
    shouted.writeStream.format("noop").queryName("shouted").start()
