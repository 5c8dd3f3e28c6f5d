"""Drops late rows, whose event time the watermark has reached, before they touch state, as in Spark."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

_MAX = (1 << 63) - 1


class LateRows:
    """Removes late rows from batches by a timestamp column and counts them; rows without event time are kept."""

    def __init__(self, column: str) -> None:
        self._column = column
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
        self.dropped += batch.num_rows - on_time.num_rows
        return on_time


def in_unit(watermark_ms: int, unit: str) -> int:
    """The latest 64-bit value of the unit that is at or before the watermark."""
    if unit == "s":
        return watermark_ms // 1000
    return max(min(watermark_ms * {"ms": 1, "us": 1000, "ns": 1_000_000}[unit], _MAX), -_MAX)
