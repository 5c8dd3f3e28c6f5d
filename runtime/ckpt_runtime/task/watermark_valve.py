"""The event time of a subtask: combines the watermarks of its input channels. Pure.

:class:`WatermarkValve` knows channels and gates, :class:`InputTime` also batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy

from ckpt_runtime.network.elements import Watermark
from ckpt_runtime.operators.operator import IDLE_WATERMARK, MAX_WATERMARK


class WatermarkValve:
    """``gates`` has the input gate of each channel; no channel has a watermark at first, and ``current`` is None.

    Neither a channel whose data has ended nor an idle one holds event time back; an idle one is active again with its
    next watermark. With ``ended_hold``, a gate whose channels have all ended holds event time back, as in Spark, unless
    it never had a watermark. When all are idle or have ended, event time first advances to the time that the data
    reached, as in Spark: the minimum over all gates of the maximum watermark of a gate's channels. With ``by_gate``,
    event time always is this minimum: rows of a batch are compared with the time of the batches that all channels had
    ended before. With ``greatest`` it is the maximum over the gates instead of the minimum, and a gate without a
    watermark does not hold event time back.
    """

    def __init__(
        self, gates: Sequence[int], *, ended_hold: bool = False, by_gate: bool = False, greatest: bool = False
    ) -> None:
        self._gates = list(gates)
        self._ended_hold = ended_hold
        self._by_gate = by_gate
        self._greatest = greatest
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
            if self._by_gate:
                active = self._reached_by_active()
            elif self._greatest:
                active = self._least_by_gate()
            if self._ended_hold:
                active += self._reached_by_ended()
            moved = self._moved(self._of_all(active))
            return moved or ([self.current] if was_idle and self.current is not None else [])
        moved = self._moved(self._reached_by_data())
        if not self._all_idle:
            return moved + self._moved(MAX_WATERMARK)
        return moved if was_idle else [*moved, IDLE_WATERMARK]

    def _of_all(self, active: Sequence[int | None]) -> int | None:
        """The minimum of the active watermarks, None while one is missing; with ``greatest`` the maximum of the
        existing ones."""
        known = [each for each in active if each is not None]
        if self._greatest:
            return max(known, default=None)
        return min(known) if len(known) == len(active) else None

    def _least_by_gate(self) -> list[int | None]:
        """The least watermark of the active channels of each gate; None while one of them has had none."""
        by_gate: dict[int, list[int | None]] = {}
        for gate, known, idle in zip(self._gates, self._watermarks, self._idle, strict=True):
            if not idle and known != MAX_WATERMARK:
                by_gate.setdefault(gate, []).append(known)
        return [
            None if None in found else min(each for each in found if each is not None) for found in by_gate.values()
        ]

    def _moved(self, timestamp_ms: int | None) -> list[int]:
        if timestamp_ms is None or (self.current is not None and timestamp_ms <= self.current):
            return []
        self.current = timestamp_ms
        return [timestamp_ms]

    def _reached_by_active(self) -> list[int | None]:
        """The event times of the gates that have a channel which is neither idle nor ended."""
        channels = zip(self._gates, self._watermarks, self._idle, strict=True)
        active = {gate for gate, known, idle in channels if not idle and known != MAX_WATERMARK}
        return [reached for gate, reached in self._reached_by_gate().items() if gate in active]

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
        if self._greatest:
            return max(found, default=None)
        return min(found) if found and (self._ended_hold or len(found) == len(by_gate)) else None

    def _reached_by_gate(self) -> dict[int, int | None]:
        """The maximum watermark of each gate's channels, None for a gate that has had none."""
        by_gate: dict[int, int | None] = {}
        for gate, reached in zip(self._gates, self._reached, strict=True):
            known = by_gate.get(gate)
            by_gate[gate] = reached if known is None else max(known, known if reached is None else reached)
        return by_gate


class InputTime:
    """The event time of a subtask whose channels, by their gates, may send times of batches.

    ``in_step``: its sources are in step. Then a watermark takes effect when all channels have ended their batch: other
    sources may still send rows of the batch, and the time of one source must not make them late.
    """

    def __init__(
        self, gates: Sequence[int], *, ended_hold: bool = False, in_step: bool = False, greatest: bool = False
    ) -> None:
        self.in_step = in_step
        self._valve = WatermarkValve(gates, ended_hold=ended_hold, by_gate=in_step, greatest=greatest)
        self._coming: WatermarkValve | None = None
        self._batches = WatermarkValve(gates)
        self._held: list[list[Watermark]] = [[] for _ in gates]

    @property
    def current(self) -> int | None:
        """The event time that all inputs have reached; None before that."""
        return self._valve.current

    def advance(self, channel: int, watermark: Watermark) -> list[Watermark]:
        """The new watermarks in order: those of event time, then possibly the coming one with the batch that has
        ended."""
        time_ms, batch = watermark.timestamp_ms, watermark.batch
        if self.in_step and time_ms not in (MAX_WATERMARK, IDLE_WATERMARK):
            self._held[channel].append(watermark)
            if batch is None or batch < 0 or not self._batches.advance(channel, batch):
                return []
            return self._end_batch()
        moved: list[int] = []
        if batch is None:
            moved = self._apply_held(channel, len(self._held[channel])) if time_ms == MAX_WATERMARK else []
            moved += self._valve.advance(channel, time_ms)
        elif self._coming is None:
            # Few jobs have coming watermarks. Every watermark of a channel is at least as early as its coming one.
            self._coming = deepcopy(self._valve)
        coming_moved = self._coming is not None and bool(self._coming.advance(channel, time_ms))
        number = MAX_WATERMARK if time_ms == MAX_WATERMARK else batch
        # Without a number, a batch of one source ends.
        ended = number is not None and bool(self._batches.advance(channel, number))
        found = [Watermark(each) for each in moved]
        return found + self._end_batch() if ended or (coming_moved and (batch or 0) <= 0) else found

    def _apply_held(self, channel: int, count: int) -> list[int]:
        """Returns the new combined watermarks, to which the first watermarks that a channel holds lead."""
        moved = []
        for watermark in self._held[channel][:count]:
            if watermark.batch is None:
                moved += self._valve.advance(channel, watermark.timestamp_ms)
            else:
                self._coming = self._coming or deepcopy(self._valve)
                self._coming.advance(channel, watermark.timestamp_ms)
        del self._held[channel][:count]
        return moved

    def _end_batch(self) -> list[Watermark]:
        """Ends a range of all inputs, or the data."""
        batch = self._batches.current
        if batch is None or batch == MAX_WATERMARK:
            return []
        moved = []
        for channel, held in enumerate(self._held):
            ended = [at for at, each in enumerate(held, start=1) if each.batch is not None and 0 <= each.batch <= batch]
            moved += self._apply_held(channel, max(ended, default=0))
        found = [Watermark(time_ms) for time_ms in moved[-1:]]
        coming = None if self._coming is None else self._coming.current
        if coming is None and self.in_step:
            coming = self.current or 0  # after a restore, when one source has already ended the next batch
        return found if coming is None or coming == MAX_WATERMARK else [*found, Watermark(coming, batch)]
