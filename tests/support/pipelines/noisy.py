"""User code that prints: arguments are the number of bytes for each row, and of rows."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ckpt_runtime.api import StreamSession


def pipeline(session: StreamSession, size: str, rows: str) -> None:
    """Builds the job, which ends by itself."""
    line = "x" * 99 + "\n"

    def shout(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for _ in range(batch.num_rows):
                print(line * (int(size) // len(line)), end="", flush=True)
            yield batch

    numbers = session.readStream.format("numbers").option("sequence", True).option("rows", rows).load().uid("numbers")
    schema = pa.schema([("source", pa.int64()), ("n", pa.int64())])
    numbers.mapInArrow(shout, schema).uid("shout").writeStream.format("noop").uid("sink").start()
