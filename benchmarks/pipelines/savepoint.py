"""A large value per key, written once in ascending order and then changed here and there, at a pace.

Row ``i`` of the source becomes ``spread`` keys while the state fills, one key afterwards. A value that is not the one
that its key's last update wrote fails the job, so a restore that lost or mixed up state cannot continue.
"""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

POOL_BYTES = 1 << 22
"""Larger ones take each restart a part of what it takes in all."""
STRIDE = 1_000_003
"""A prime that no number of keys is a multiple of: changes visit all keys before they come back to one."""

Update = Row("key", "count", "sum")


class LargeValues(StatefulProcessor):
    """Per key how often it was written, and bytes that follow from the key and that number alone."""

    def __init__(self, value_bytes: int) -> None:
        self._value_bytes = value_bytes

    def init(self, handle: StatefulProcessorHandle) -> None:
        # Random, so that compression makes only values smaller that overlap.
        self._pool = random.Random(0).randbytes(POOL_BYTES)
        self._values = handle.getValueState("values", "count BIGINT, bytes BINARY")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Any], timerValues: Any) -> Iterator[Row]:
        found = self._values.get()
        count = 0 if found is None else found[0]
        if found is not None and found[1] != self._bytes(key[0], count):
            raise ValueError(f"the state of key {key[0]} is not what its update {count} wrote")
        for _ in rows:
            count += 1
            yield Update(key[0], count, count)
        self._values.update((count, self._bytes(key[0], count)))

    def _bytes(self, key: int, count: int) -> bytes:
        digest = hashlib.blake2b(b"%d %d" % (key, count), digest_size=8).digest()
        start = int.from_bytes(digest, "big") % (POOL_BYTES - self._value_bytes)
        return self._pool[start : start + self._value_bytes]

    def close(self) -> None:
        pass


def _keys(keys: int, spread: int, splits: int) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    filling = -(-keys // spread)

    def to_keys(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = batch.column(0).to_numpy() + splits * batch.column(1).to_numpy()
            first = (rows[rows < filling, None] * spread + np.arange(spread)).ravel()
            then = rows[rows >= filling] * STRIDE % keys
            found = np.concatenate([first[first < keys], then])
            yield pa.RecordBatch.from_pydict({"key": pa.array(found, pa.int64())})

    return to_keys


def pipeline(spark: SparkSession, report: str, keys: str, value_bytes: str, rows_per_second: str, spread: str) -> None:
    """``keys`` values of ``value_bytes``; ``rows_per_second`` of the source, 0 for as fast as it goes."""
    from ckpt_runtime.connectors.splits import SPLITS

    (
        spark.readStream.format("numbers")
        .options(sequence="true", rowsPerSecond=rows_per_second, batchRows=1024)
        .load()
        .hint("uid", "source")
        .mapInArrow(_keys(int(keys), int(spread), SPLITS), "key BIGINT")
        .hint("uid", "keys")
        .groupBy("key")
        .transformWithState(LargeValues(int(value_bytes)), "key BIGINT, count BIGINT, sum BIGINT", "Update", "None")
        .hint("uid", "state")
        .writeStream.format("verify")
        .outputMode("update")
        .options(key="key", count="count", sum="sum", report=report, reportIntervalMs=200)
        .queryName("verify")
        .start()
    )
