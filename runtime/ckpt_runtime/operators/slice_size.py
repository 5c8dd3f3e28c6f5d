"""Determines how many rows to process, or to read, at a time, from the duration of earlier slices. Pure.

A call of an operator has a fixed cost and a cost per row. Slices last about :data:`SLICE_MS`, so that barriers and
mails wait no longer, but are never so short that the fixed cost would be more than a tenth of the work: user code that
calls a service once for each batch keeps its batches.

The two costs come from a least-squares line through the latest slices, because other processes make the time of each
slice fluctuate: two slices alone would often show the fixed cost of an expensive call as the cost of its rows, and its
rows would then be processed one by one.
"""

from __future__ import annotations

SLICE_MS = 5.0
FIRST_ROWS = 4
MOST_ROWS = 1 << 20
_OVERHEAD_SHARE = 9
_MEMORY = 0.93
"""By how much the weight of a slice decreases with each later one."""
_CHANGE = 4.0
"""A slice that takes so many times longer or shorter than expected shows that the speed of the operator has changed."""
_GROWTH, _GROWTH_OF_LONG = 8, 2
"""How many times larger the next slice may be; less for slices that are already long."""
_LEAST_SPREAD = 1 / 64
"""Slices whose sizes vary less than that do not show the fixed cost: variance relative to the square of their mean."""


class SliceSize:
    """``rows`` is the size of the next slice. Slices of different sizes show the cost per call and per row."""

    __slots__ = (
        "_call_ms", "_is_split", "_last_ms", "_last_rows", "_most_rows", "_row_ms", "_rows", "_slice_ms", "_square",
        "_time", "_weight", "_work", "rows",
    )  # fmt: skip

    def __init__(self, first_rows: int | None = None, most_rows: int = MOST_ROWS, slice_ms: float = SLICE_MS) -> None:
        self.rows = FIRST_ROWS if first_rows is None else first_rows
        self._most_rows, self._slice_ms = most_rows, slice_ms
        self._last_rows, self._last_ms = 0, 0.0
        self._call_ms = self._row_ms = 0.0
        self._is_split = False
        # Weighted sums over the latest slices: of 1, rows, ms, rows * rows, rows * ms.
        self._weight = self._rows = self._time = self._square = self._work = 0.0

    def took(self, rows: int, ms: float) -> None:
        """Notes that a slice of ``rows`` rows took ``ms`` (monotonic)."""
        expected = self._call_ms + self._row_ms * rows
        if ms > _CHANGE * max(expected, self._last_ms) or ms * _CHANGE < min(expected, self._last_ms):
            self._forget()
        self._weight = self._weight * _MEMORY + 1
        self._rows = self._rows * _MEMORY + rows
        self._time = self._time * _MEMORY + ms
        self._square = self._square * _MEMORY + rows * rows
        self._work = self._work * _MEMORY + rows * ms
        self._split_costs()
        size = self._fitting(rows, ms)
        # Equal slices show nothing new: without one of another size, which shows the fixed cost, rows of an expensive
        # call might be processed one by one forever.
        if not self._is_split and size == rows == self._last_rows:
            size = size // 2 or min(2, self._most_rows)
        self.rows = size
        self._last_rows, self._last_ms = rows, ms

    def _forget(self) -> None:
        self._weight = self._rows = self._time = self._square = self._work = 0.0
        self._call_ms = self._row_ms = 0.0
        self._is_split = False

    def _split_costs(self) -> None:
        """Determines the cost of a call and of a row from the sums."""
        mean_rows, mean_ms = self._rows / self._weight, self._time / self._weight
        variance = self._square / self._weight - mean_rows * mean_rows
        if variance > _LEAST_SPREAD * mean_rows * mean_rows:
            slope = (self._work / self._weight - mean_rows * mean_ms) / variance
            self._row_ms = min(max(0.0, slope), mean_ms / mean_rows)
            self._call_ms = mean_ms - self._row_ms * mean_rows
            self._is_split = True
        elif not self._is_split:
            # All of the time counts as the cost of rows: too small a slice delays no barrier.
            self._call_ms, self._row_ms = 0.0, mean_ms / mean_rows
        elif expected_ms := self._call_ms + self._row_ms * mean_rows:
            # Slices of one size show the speed only.
            self._call_ms *= mean_ms / expected_ms
            self._row_ms *= mean_ms / expected_ms

    def _fitting(self, rows: int, ms: float) -> int:
        growth = _GROWTH_OF_LONG if ms > self._slice_ms else _GROWTH
        # The end of a buffer is a small slice that is no reason against larger ones.
        most = min(rows * growth, self._most_rows) if rows >= self.rows else self._most_rows
        if self._row_ms <= 0:
            return max(self.rows, most)
        wanted_ms = max(self._slice_ms - self._call_ms, self._call_ms * _OVERHEAD_SHARE)
        least = max(1, rows // _GROWTH)
        return max(least, int(min(wanted_ms / self._row_ms, most)))
