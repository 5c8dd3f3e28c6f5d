"""Rows at a fixed rate with the time at which they were made, one shuffle, and a map that measures their age."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyspark.sql import SparkSession

SCHEMA = "row BIGINT, made_us BIGINT"
BUCKETS_PER_DECADE = 200
DECADES = 7
"""The histogram reaches from 1 us to 10 s, in buckets that are 1.2 % wide."""
REPORT_EVERY_S = 0.5


def now_us() -> int:
    """The time in microseconds since the epoch."""
    return time.time_ns() // 1_000


def stamp(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Adds the time in microseconds at which each buffer of the source was made."""
    for batch in batches:
        made = np.full(batch.num_rows, now_us(), dtype=np.int64)
        yield pa.record_batch({"row": batch.column("row"), "made_us": pa.array(made)})


class Ages:
    """Counts ages in microseconds, and writes how many there are of each into a file of a directory now and then."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / f"ages-{uuid.uuid4().hex}.json"
        self._counts = np.zeros(BUCKETS_PER_DECADE * DECADES, dtype=np.int64)
        self._greatest = 0
        self._report_at = 0.0

    def count(self, ages: np.ndarray) -> None:
        """Counts an age for each row, if there are any; one below a microsecond counts as one."""
        if len(ages):
            buckets = (np.log10(np.maximum(ages, 1)) * BUCKETS_PER_DECADE).astype(np.int64)
            np.add.at(self._counts, np.minimum(buckets, len(self._counts) - 1), 1)
            self._greatest = max(self._greatest, int(ages.max()))
        if time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + REPORT_EVERY_S
            written = self._file.with_suffix(".part")
            written.write_text(json.dumps({"counts": self._counts.tolist(), "max": self._greatest}))
            written.rename(self._file)


class Measure:
    """Counts the ages of rows from when the file ``begin`` exists; passes the rows on."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)
        self._ages = Ages(self._directory)
        self._begun = False
        self._look_at = 0.0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            ages = now_us() - batch.column("made_us").to_numpy()
            if self._begun:
                self._ages.count(ages)
            elif time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + REPORT_EVERY_S
                self._begun = (self._directory / "begin").exists()
            yield pa.record_batch({"row": batch.column("row")})


def pipeline(spark: SparkSession, report: str, rows_per_s: str) -> None:
    """``report`` is a directory for reports and ages; ``rows_per_s`` is the rate of all subtasks together."""
    numbers = spark.readStream.format("numbers").options(keys=1, rowNumber=True, rowsPerSecond=int(rows_per_s)).load()
    (
        numbers.hint("uid", "source")
        .mapInArrow(stamp, SCHEMA)
        .hint("uid", "stamp")
        .repartition(1)
        .mapInArrow(Measure(report), "row BIGINT")
        .hint("uid", "measure")
        .writeStream.format("verify")
        .options(row="row", report=report, reportIntervalMs=200)
        .queryName("verify")
        .start()
    )
