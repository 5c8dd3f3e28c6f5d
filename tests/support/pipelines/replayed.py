"""Rows of a file at a given pace, which waits for nothing else."""

from __future__ import annotations

from ckpt_runtime.api import StreamSession


def pipeline(session: StreamSession, rows: str, output: str, rows_per_second: str) -> None:
    """``rows`` is a Parquet file."""
    stream = session.readStream.format("replay").option("rowsPerSecond", rows_per_second).load(rows).uid("rows")
    stream.writeStream.format("parquet").uid("sink").start(output)
