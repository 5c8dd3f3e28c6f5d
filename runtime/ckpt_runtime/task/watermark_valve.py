"""Combines the watermarks of many channels: event time of a subtask is the least of its inputs'. Pure."""

from __future__ import annotations


class WatermarkValve:
    """``channels`` inputs, all of them without a watermark at first."""

    def __init__(self, channels: int) -> None:
        self._watermarks: list[int | None] = [None] * channels
        self._current: int | None = None

    def advance(self, channel: int, timestamp_ms: int) -> int | None:
        """The new combined watermark, or None when it did not move. A channel's watermark never goes back."""
        known = self._watermarks[channel]
        if known is not None and timestamp_ms <= known:
            return None
        self._watermarks[channel] = timestamp_ms
        least = self._least()
        if least is None or (self._current is not None and least <= self._current):
            return None
        self._current = least
        return least

    def _least(self) -> int | None:
        least: int | None = None
        for watermark in self._watermarks:
            if watermark is None:
                return None
            if least is None or watermark < least:
                least = watermark
        return least
