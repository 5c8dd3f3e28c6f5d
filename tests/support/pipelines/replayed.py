"""Rows of files that a source has to wait for, or that its job cannot keep up with."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pyarrow as pa

from ckpt_runtime.api import StreamSession

SCHEMA = pa.schema([("n", pa.int64())])


def pipeline(session: StreamSession, rows: str, output: str, rows_per_second: str) -> None:
    """``rows`` is a Parquet file, whose rows come at a given pace."""
    stream = session.readStream.format("replay").option("rowsPerSecond", rows_per_second).load(rows).uid("rows")
    stream.writeStream.format("parquet").uid("sink").start(output)


def slow(session: StreamSession, directory: str, output: str, pause_s: str) -> None:
    """Reads the Parquet files of a directory; user code takes ``pause_s`` for each batch of a few rows."""

    def work(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(float(pause_s))
            yield batch

    files = session.readStream.schema("n BIGINT").format("parquet").load(directory).uid("rows")
    files.mapInArrow(work, SCHEMA).uid("work").writeStream.format("parquet").uid("sink").start(output)
