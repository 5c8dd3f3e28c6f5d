"""Determines how many rows to process at a time, from the duration of earlier slices. Pure.

A call of an operator has a fixed cost and a cost per row. Slices last about :data:`SLICE_MS`, so that barriers and
mails wait no longer, but are never so short that the fixed cost would be more than a tenth of the work: user code that
calls a service once for each batch keeps its batches, and so do operators on a machine that is slow for a while.
"""

from __future__ import annotations

SLICE_MS = 5.0
FIRST_ROWS = 4
MOST_ROWS = 1 << 20
_OVERHEAD_SHARE = 9
_GROWTH = 8


class SliceSize:
    """``rows`` is the size of the next slice. Slices of different sizes show the cost per call and per row."""

    __slots__ = ("_call_ms", "_known_ms", "_known_rows", "_measured", "_most_rows", "_row_ms", "_slice_ms", "rows")

    def __init__(self, first_rows: int | None = None, most_rows: int = MOST_ROWS, slice_ms: float = SLICE_MS) -> None:
        self.rows = FIRST_ROWS if first_rows is None else first_rows
        self._most_rows = most_rows
        self._slice_ms = slice_ms
        self._call_ms = 0.0
        self._row_ms = 0.0
        self._known_rows = 0
        self._known_ms = 0.0
        self._measured = False

    def took(self, rows: int, ms: float) -> None:
        """Notes that a slice of ``rows`` rows took ``ms`` (monotonic)."""
        expected = self._call_ms + self._row_ms * rows
        if ms * 2 > 3 * max(self._known_ms, expected) or ms * 3 < 2 * min(self._known_ms, expected):
            # This is the first slice, or the speed of the operator has changed. Slices of another size, such as the
            # next one, will show how much of the time is the fixed cost of a call.
            self._call_ms, self._row_ms = 0.0, ms / rows
            self._measured = False
        elif abs(rows - self._known_rows) * 4 > self._known_rows:
            slope = (ms - self._known_ms) / (rows - self._known_rows)
            self._row_ms = min(max(0.0, slope), ms / rows)
            self._call_ms = ms - self._row_ms * rows
            self._measured = True
        self._known_rows, self._known_ms = rows, ms
        self.rows = self._fitting()

    def _fitting(self) -> int:
        most = min(self._known_rows * _GROWTH, self._most_rows) if self._known_rows >= self.rows else self._most_rows
        if self._row_ms <= 0:
            return max(self.rows, most)
        wanted_ms = max(self._slice_ms - self._call_ms, self._call_ms * _OVERHEAD_SHARE)
        fitting = max(1, int(min(wanted_ms / self._row_ms, most)))
        if not self._measured and abs(fitting - self._known_rows) * 4 <= self._known_rows:
            # Another slice of this size would not show the fixed cost either.
            return self._known_rows // 2 or min(2, self._most_rows)
        return fitting
