"""Drops late rows, whose event time the watermark has reached, before they touch state, as in Spark."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

_MAX = (1 << 63) - 1


class LateRows:
    """Removes late rows from batches by a timestamp column and counts them; rows without event time are kept.

    ``rows_in`` says how many rows a batch stands for, by default its own number of rows.
    """

    def __init__(self, column: str, rows_in: Callable[[pa.RecordBatch], int] = len) -> None:
        self._column = column
        self._rows_in = rows_in
        self.dropped = 0

    def removed(self, batch: pa.RecordBatch, watermark_ms: int) -> pa.RecordBatch:
        """The rows whose event time is after the watermark."""
        column = batch.column(self._column)
        times = column.cast(pa.int64())
        bound = in_unit(watermark_ms, column.type.unit)
        earliest = pc.min(times).as_py()
        if earliest is None or earliest > bound:
            return batch
        on_time = batch.filter(pc.fill_null(pc.greater(times, bound), True))
        self.dropped += self._rows_in(batch) - self._rows_in(on_time)
        return on_time


def in_unit(watermark_ms: int, unit: str) -> int:
    """The latest 64-bit value of the unit that is at or before the watermark."""
    if unit == "s":
        return watermark_ms // 1000
    return max(min(watermark_ms * {"ms": 1, "us": 1000, "ns": 1_000_000}[unit], _MAX), -_MAX)
