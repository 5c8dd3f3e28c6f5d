"""Pacing of a source to a number of rows per second, by the clock it is given. Never sleeps."""

from __future__ import annotations

from collections.abc import Callable

_BURST_SECONDS = 1.0
_UNLIMITED = 1 << 62
_PAUSE_MS = 50
"""Each pause ends with a small batch that goes through all operators: with 10 ms these took a fifth of a processor."""


class Pacer:
    """A token bucket: rows may be emitted as time passes; at most one second's worth is saved up."""

    def __init__(self, rows_per_second: float, monotonic_ms: Callable[[], float]) -> None:
        """``rows_per_second`` 0 means unlimited. The clock must be monotonic: a clock set back would stall a source."""
        self._rate = rows_per_second
        self._monotonic_ms = monotonic_ms
        self._at_ms = monotonic_ms()
        self._tokens = 0.0

    def allowance(self) -> int:
        """How many rows may be emitted now."""
        if not self._rate:
            return _UNLIMITED
        now = self._monotonic_ms()
        earned = (now - self._at_ms) * self._rate / 1000
        self._at_ms = now
        self._tokens = min(self._tokens + earned, max(1.0, self._rate * _BURST_SECONDS))
        return int(self._tokens)

    def spend(self, rows: int) -> None:
        """Notes that ``rows`` were emitted."""
        if self._rate:
            self._tokens -= rows

    def idle_ms(self) -> int:
        """How long to wait until a row may be emitted: 50 ms, or longer for rates below 20 rows per second."""
        if not self._rate:
            return _PAUSE_MS
        return max(_PAUSE_MS, min(1000, int((1.0 - self._tokens) * 1000 / self._rate) + 1))
