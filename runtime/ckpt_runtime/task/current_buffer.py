"""The current buffer of a subtask, processed in slices, so that no barrier waits for a whole buffer of slow rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import pyarrow as pa

from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.operators.slice_size import SliceSize


class CurrentBuffer:
    """Holds at most one buffer. ``now_ms`` is a monotonic clock.

    Slices end anywhere, or only at the row numbers that came with the buffer. The rest of the buffer is in-flight data
    of ``channel`` (FLIP-76), which is None for rows restored from a checkpoint.
    """

    __slots__ = ("_batch", "_ends", "_now_ms", "_offset", "_size", "channel", "input_index")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._batch: pa.RecordBatch | None = None
        self._offset = 0
        self._ends: Sequence[int] | None = None
        self._size = SliceSize()
        self.input_index = 0
        self.channel: InputChannel | None = None

    @property
    def is_empty(self) -> bool:
        return self._batch is None

    @property
    def rest(self) -> pa.RecordBatch | None:
        """The rows that have not been processed yet."""
        return None if self._batch is None else self._batch.slice(self._offset)

    def put(
        self,
        batch: pa.RecordBatch,
        input_index: int,
        channel: InputChannel | None,
        ends: Sequence[int] | None = None,
    ) -> None:
        """Takes a buffer; only called when there is none."""
        self._batch, self._offset, self._ends = batch, 0, ends
        self.input_index, self.channel = input_index, channel

    def process(self, process: Callable[[pa.RecordBatch, int], None], *, whole: bool = False) -> bool:
        """Processes the next slice, or all remaining rows; returns whether it was the last one."""
        batch = self._batch
        assert batch is not None
        left = batch.num_rows - self._offset
        rows = left if whole else min(left, self._size.rows)
        if self._ends is not None and rows < left:
            rows = self._ends[bisect_left(self._ends, self._offset + rows)] - self._offset
        # Passes the batch itself and no slice of it: operators recognise it by identity, and making a slice costs as
        # much as processing a small batch.
        if rows == batch.num_rows:
            part = batch
        else:
            part = batch.slice(self._offset, rows)
        start = self._now_ms()
        process(part, self.input_index)
        self._size.took(rows, self._now_ms() - start)
        if rows == left:
            self._batch = self.channel = None
            return True
        self._offset += rows
        return False
