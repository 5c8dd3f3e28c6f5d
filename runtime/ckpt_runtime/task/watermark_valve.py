"""Combines the watermarks of many channels: the event time of a subtask is the minimum over its inputs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_runtime.operators.operator import MAX_WATERMARK


class WatermarkValve:
    """``gates`` has the input gate of each channel; no channel has a watermark at first, and ``current`` is None.

    A channel whose data has ended does not hold event time back. When all have ended, event time first advances to the
    time that the data reached, as in Spark: the minimum over all gates of the maximum watermark of a gate's channels.
    """

    def __init__(self, gates: Sequence[int]) -> None:
        self._gates = list(gates)
        self._watermarks: list[int | None] = [None] * len(gates)
        self._reached: list[int | None] = [None] * len(gates)
        self.current: int | None = None

    def advance(self, channel: int, timestamp_ms: int) -> list[int]:
        """The new combined watermarks in order, mostly one or none. A channel's watermark never goes back."""
        known = self._watermarks[channel]
        if known is not None and timestamp_ms <= known:
            return []
        self._watermarks[channel] = timestamp_ms
        if timestamp_ms != MAX_WATERMARK:
            self._reached[channel] = timestamp_ms
        least = self._least()
        if least is None:
            return []
        last = self._reached_by_data() if least == MAX_WATERMARK else None
        moved = []
        for watermark in (last, least):
            if watermark is not None and (self.current is None or watermark > self.current):
                self.current = watermark
                moved.append(watermark)
        return moved

    def _least(self) -> int | None:
        least: int | None = None
        for watermark in self._watermarks:
            if watermark is None:
                return None
            if least is None or watermark < least:
                least = watermark
        return least

    def _reached_by_data(self) -> int | None:
        """The event time that the data reached; None while a gate has had no watermark."""
        by_gate: dict[int, int | None] = {}
        for gate, reached in zip(self._gates, self._reached, strict=True):
            known = by_gate.get(gate)
            by_gate[gate] = reached if known is None else max(known, known if reached is None else reached)
        found = [reached for reached in by_gate.values() if reached is not None]
        return min(found) if len(found) == len(by_gate) else None
