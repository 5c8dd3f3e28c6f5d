"""FLIP-76's topology: source, map, map, sleepy map, measuring map, with rows shuffled between any two of them.

A row is its number, the time at which it was made, and a payload that begins with a hash of the number. Two maps add
one to the number, the last one takes it off again and compares the payload; the sink keeps a digest of the numbers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

SCHEMA = "row BIGINT, made_ms BIGINT, payload BINARY"
BATCH_ROWS = 4096
HASH_BYTES = 8


def mixed(rows: np.ndarray) -> np.ndarray:
    """The first bytes of the rows' payloads: splitmix64 of each number, shape ``(rows, 8)``."""
    z = rows.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))).view(np.uint8).reshape(-1, HASH_BYTES)


class WithPayload:
    """Makes whole rows of row numbers; ``size`` is the payload's bytes."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            data = np.zeros((batch.num_rows, self._size), dtype=np.uint8)
            hashed = min(self._size, HASH_BYTES)
            data[:, :hashed] = mixed(batch.column("row").to_numpy())[:, :hashed]
            offsets = np.arange(batch.num_rows + 1, dtype=np.int32) * np.int32(self._size)
            payload = pa.Array.from_buffers(
                pa.binary(), batch.num_rows, [None, pa.py_buffer(offsets), pa.py_buffer(data.reshape(-1))]
            )
            made = np.full(batch.num_rows, time.time_ns() // 1_000_000, dtype=np.int64)
            yield pa.record_batch({"row": batch.column("row"), "made_ms": pa.array(made), "payload": payload})


def plus_one(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A map that does next to nothing."""
    for batch in batches:
        yield batch.set_column(0, "row", pc.add(batch.column("row"), 1))


class Sleepy:
    """Sleeps for each row. Below a millisecond, which no clock can do, it sleeps one whenever as much is owed.

    The excess of a sleep counts for the next ones. A file ``hurry`` ends the sleeping for good.
    """

    def __init__(self, sleep_ms: float, hurry: str) -> None:
        self._sleep_s = sleep_ms / 1000
        self._hurry = hurry
        self._owed_s = 0.0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if self._sleep_s:
                self._sleep(batch.num_rows)
            yield batch

    def _sleep(self, rows: int) -> None:
        for _ in range(rows):
            self._owed_s += self._sleep_s
            if self._owed_s >= 0.001:
                if os.path.exists(self._hurry):
                    self._sleep_s = 0.0
                    return
                start = time.perf_counter()
                time.sleep(0.001)
                self._owed_s -= time.perf_counter() - start


def measure(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Compares each payload with its row's number, which is all that is sent on."""
    for batch in batches:
        row = pc.subtract(batch.column("row"), 2)
        payload = batch.column("payload")
        _, offsets, data = payload.buffers()
        ends = np.frombuffer(offsets, dtype=np.int32)[payload.offset : payload.offset + len(payload) + 1]
        content = np.frombuffer(data, dtype=np.uint8)[ends[0] : ends[-1]].reshape(len(payload), -1)
        if not np.array_equal(content[:, :HASH_BYTES], mixed(row.to_numpy())[:, : content.shape[1]]):
            raise ValueError(f"payloads do not belong to their rows, in {len(payload)} rows from number {row[0]}")
        yield pa.record_batch({"row": row})


def pipeline(spark: SparkSession, report: str, sleep_ms: str, payload: str) -> None:
    """``report`` is the sink's report directory, ``payload`` the bytes of each row's payload."""
    numbers = spark.readStream.format("numbers").options(keys=1, rowNumber=True, batchRows=BATCH_ROWS).load()
    source = numbers.hint("uid", "source").mapInArrow(WithPayload(int(payload)), SCHEMA).hint("uid", "payload")
    first = source.repartition(1).mapInArrow(plus_one, SCHEMA).hint("uid", "first")
    second = first.repartition(1).mapInArrow(plus_one, SCHEMA).hint("uid", "second")
    sleepy = second.repartition(1).mapInArrow(Sleepy(float(sleep_ms), f"{report}/hurry"), SCHEMA).hint("uid", "sleepy")
    (
        sleepy.repartition(1)
        .mapInArrow(measure, "row BIGINT")
        .hint("uid", "measure")
        .writeStream.format("verify")
        .options(row="row", report=report, reportIntervalMs=200)
        .queryName("verify")
        .start()
    )
