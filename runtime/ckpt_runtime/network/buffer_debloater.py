"""Buffer debloating: how large the buffers on the way to a subtask may be, by how fast it works them off. Pure.

The number of buffers in flight is fixed by credit and queue lengths; their size decides how long the rows in them take.
With a size of throughput x target / number of buffers they take about the target, and so does a barrier behind them.
Source: Flink's BufferDebloater (FLIP-183).
"""

from __future__ import annotations

from collections.abc import Callable

MIN_BUFFER_BYTES = 256
"""Smaller buffers are mostly overhead."""

_CONVERGED = 10
"""After so many times the smoothed samples, further equal ones change nothing."""


class BufferDebloater:
    """The size of buffers for one subtask, in bytes, between :data:`MIN_BUFFER_BYTES` and ``max_bytes``.

    ``buffers`` is how many may be in flight to the subtask. A sample counts ``2 / (samples + 1)``, the rest is what was
    known before. Senders hear of a size that differs from the last one they heard of by ``threshold_percentages`` or
    more, or that has reached a bound.
    """

    def __init__(
        self, *, target_ms: int, period_ms: int, samples: int, threshold_percentages: int, buffers: int, max_bytes: int
    ) -> None:
        if buffers < 1:
            raise ValueError(f"the number of buffers in flight must be at least 1, was {buffers}")
        self._target_ms = target_ms
        self._period_ms = period_ms
        self._weight = 2 / (samples + 1)
        self._most_periods = _CONVERGED * samples
        self._threshold = threshold_percentages / 100
        self._buffers = buffers
        self._min = min(MIN_BUFFER_BYTES, max_bytes)
        self._max = max_bytes
        self._smoothed = float(max_bytes)
        self.size = max_bytes

    def measured(self, processed_bytes: int, active_ms: float) -> int | None:
        """A new :attr:`size` after ``processed_bytes`` in ``active_ms``; None when it stays as it is.

        Active is a subtask that is not idle for lack of input, back-pressured time included. Time in which nothing
        could be learnt (none at all) is no sample; a sample of several periods counts as so many.
        """
        if active_ms <= 0:
            return None
        wanted = processed_bytes / active_ms * self._target_ms / self._buffers
        for _ in range(max(1, min(int(active_ms / self._period_ms), self._most_periods))):
            self._smooth(wanted)
        size = round(self._smoothed)
        if size == self.size or not (self._differs(size) or size in (self._min, self._max)):
            return None
        self.size = size
        return size

    def _smooth(self, wanted: float) -> None:
        """Growth is limited to what shrinking can be, or one sample of a burst would undo many of slow rows."""
        wanted = max(self._min, min(wanted, 2 * self._smoothed))
        smoothed = self._smoothed + self._weight * (wanted - self._smoothed)
        self._smoothed = min(float(self._max), smoothed)

    def _differs(self, size: int) -> bool:
        return abs(size - self.size) >= self._threshold * self.size


class DesiredBufferSize:
    """What a receiver wants the buffers of a channel to measure, on its way to the sender.

    One thread announces and another one may come to listen: whoever listens has the latest wish in the end.
    """

    __slots__ = ("_listener", "latest")

    def __init__(self) -> None:
        self._listener: Callable[[int], None] | None = None
        self.latest: int | None = None

    def announce(self, size: int) -> None:
        # Set before the listener is looked at, as listen() does it the other way round: whichever comes second tells
        # it.
        self.latest = size
        if self._listener is not None:
            self._listener(size)

    def listen(self, listener: Callable[[int], None]) -> None:
        """``listener(bytes)`` is called with each wish from now on, and with the latest one there is."""
        self._listener = listener
        told = None
        while told != self.latest:
            told = self.latest
            assert told is not None
            listener(told)
