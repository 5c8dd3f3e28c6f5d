"""Buffer debloating: adapts the size of the buffers in flight to a subtask to its throughput. Pure.

Credit and queue lengths fix the number of buffers in flight; their size determines how long processing them takes. At
a size of throughput x target / number of buffers, the subtask needs about the target time for all buffers in flight,
and a barrier after them waits about that long.
Source: Flink's BufferDebloater (FLIP-183).
"""

from __future__ import annotations

from collections.abc import Callable

MIN_BUFFER_BYTES = 256
"""Smaller buffers would consist mostly of overhead."""

_CONVERGED = 10
"""After this many times the number of smoothed samples, further equal samples change nothing."""


class BufferDebloater:
    """The size of buffers for one subtask, in bytes, between :data:`MIN_BUFFER_BYTES` and ``max_bytes``.

    ``buffers`` is how many may be in flight to the subtask. A sample has the weight ``2 / (samples + 1)``, the previous
    value the rest. Senders are notified of a size that differs from the last one that they know by
    ``threshold_percentages`` or more, or that has reached a bound.
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

        A subtask is active while it is not idle for lack of input; back-pressured time is included. No active time
        gives no sample; a sample of several periods counts that many times.
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
        """Limits growth like shrinking; otherwise one sample during a burst would undo many samples of slow rows."""
        wanted = max(self._min, min(wanted, 2 * self._smoothed))
        smoothed = self._smoothed + self._weight * (wanted - self._smoothed)
        self._smoothed = min(float(self._max), smoothed)

    def _differs(self, size: int) -> bool:
        return abs(size - self.size) >= self._threshold * self.size


class DesiredBufferSize:
    """The buffer size that the receiver of a channel requests, on its way to the sender.

    One thread announces while another one may start to listen: the listener always ends up with the latest size.
    """

    __slots__ = ("_listener", "latest")

    def __init__(self) -> None:
        self._listener: Callable[[int], None] | None = None
        self.latest: int | None = None

    def announce(self, size: int) -> None:
        # Set before the listener is read, and listen() does both in the opposite order: so the later of the two calls
        # notifies the listener.
        self.latest = size
        if self._listener is not None:
            self._listener(size)

    def listen(self, listener: Callable[[int], None]) -> None:
        """Calls ``listener(bytes)`` with the latest requested size, if any, and with each later one."""
        self._listener = listener
        delivered = None
        while delivered != self.latest:
            delivered = self.latest
            assert delivered is not None
            listener(delivered)
