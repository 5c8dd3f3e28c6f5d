"""Combines the watermarks of a subtask's input channels. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_runtime.operators.operator import IDLE_WATERMARK, MAX_WATERMARK


class WatermarkValve:
    """``gates`` has the input gate of each channel; no channel has a watermark at first, and ``current`` is None.

    Neither a channel whose data has ended nor an idle one holds event time back; an idle one is active again with its
    next watermark. With ``ended_hold``, a gate all of whose channels have ended does, as in Spark, unless it has had no
    watermark. When all are idle or have ended, event time first advances to the time that the data reached, as in
    Spark: the minimum over all gates of the maximum watermark of a gate's channels.
    """

    def __init__(self, gates: Sequence[int]) -> None:
        self._gates = list(gates)
        self.ended_hold = False
        self._watermarks: list[int | None] = [None] * len(gates)
        self._reached: list[int | None] = [None] * len(gates)
        self._idle = [False] * len(gates)
        self._all_idle = False
        self.current: int | None = None

    def advance(self, channel: int, timestamp_ms: int) -> list[int]:
        """The new combined watermarks in order, mostly one or none. A channel's watermark never decreases.
        IDLE_WATERMARK is among them when the last channel has become idle, and the current watermark is repeated when
        one is active again.
        """
        was_idle, self._idle[channel] = self._idle[channel], timestamp_ms == IDLE_WATERMARK
        if timestamp_ms == IDLE_WATERMARK:
            return [] if was_idle else self._combined()
        known = self._watermarks[channel]
        if known is None or timestamp_ms > known:
            self._watermarks[channel] = timestamp_ms
            if timestamp_ms != MAX_WATERMARK:
                self._reached[channel] = timestamp_ms
        elif not was_idle:
            return []
        return self._combined()

    def _combined(self) -> list[int]:
        pairs = list(zip(self._watermarks, self._idle, strict=True))
        active = [known for known, idle in pairs if not idle and known != MAX_WATERMARK]
        was_idle, self._all_idle = self._all_idle, not active and any(self._idle)
        if active:
            if self.ended_hold:
                active += self._reached_by_ended()
            moved = self._moved(self._least(active))
            return moved or ([self.current] if was_idle and self.current is not None else [])
        moved = self._moved(self._reached_by_data())
        if not self._all_idle:
            return moved + self._moved(MAX_WATERMARK)
        return moved if was_idle else [*moved, IDLE_WATERMARK]

    def _least(self, active: Sequence[int | None]) -> int | None:
        """The least watermark of the active channels; None while one of them has had none."""
        return None if None in active else min(known for known in active if known is not None)

    def _moved(self, timestamp_ms: int | None) -> list[int]:
        if timestamp_ms is None or (self.current is not None and timestamp_ms <= self.current):
            return []
        self.current = timestamp_ms
        return [timestamp_ms]

    def _reached_by_ended(self) -> list[int | None]:
        """The event times that the data of ended gates reached."""
        ended = set(self._gates) - {
            gate for gate, known in zip(self._gates, self._watermarks, strict=True) if known != MAX_WATERMARK
        }
        by_gate = self._reached_by_gate()
        return [reached for gate, reached in by_gate.items() if gate in ended and reached is not None]

    def _reached_by_data(self) -> int | None:
        """The event time that the data reached; None while a gate has had no watermark, unless ended gates hold."""
        by_gate = self._reached_by_gate()
        found = [reached for reached in by_gate.values() if reached is not None]
        return min(found) if found and (self.ended_hold or len(found) == len(by_gate)) else None

    def _reached_by_gate(self) -> dict[int, int | None]:
        """The maximum watermark of each gate's channels, None for a gate that has had none."""
        by_gate: dict[int, int | None] = {}
        for gate, reached in zip(self._gates, self._reached, strict=True):
            known = by_gate.get(gate)
            by_gate[gate] = reached if known is None else max(known, known if reached is None else reached)
        return by_gate
