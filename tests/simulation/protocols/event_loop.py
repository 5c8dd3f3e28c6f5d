"""Virtual time, and processes that run in it, pause and die. One thread; nothing here waits or reads a clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

from ckpt_runtime.checkpoint.instant import Instant

EPOCH_MS = 1_700_000_000_000
"""The wall clock at the start."""


class DriverCrash(BaseException):
    """A driver died at a crash point; raised to unwind what it was doing, which must not take it for an error."""


class SimulatedProcess:
    """Something that can pause for a while, unnoticed by itself, or stop for good."""

    __slots__ = ("alive", "name", "paused_until")

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused_until = 0


class EventLoop:
    """Events in the order of their times, then of their scheduling. Times are monotonic milliseconds."""

    def __init__(self, on_crash: Callable[[SimulatedProcess], None]) -> None:
        self.now = 0
        self.clock_offset = 0
        self.events = 0
        self._end = 0
        self._on_crash = on_crash
        self._sequence = 0
        self._heap: list[tuple[int, int, SimulatedProcess | None, Callable[..., object], tuple[Any, ...]]] = []

    def instant(self, origin: int, skew: int) -> Instant:
        """Of a process whose clocks are off by that. Wall clocks jump with ``clock_offset``, monotonic ones never."""
        return Instant(origin + self.now, EPOCH_MS + self.now + self.clock_offset + skew)

    def at(self, time: int, process: SimulatedProcess | None, action: Callable[..., object], *arguments: Any) -> None:
        """Runs an action at a time, in a process; None is the world outside of all processes."""
        self._sequence += 1
        heapq.heappush(self._heap, (time, self._sequence, process, action, arguments))

    def run_meanwhile(self, until: int) -> None:
        """From within an event, while its process stands still: everything else that is due before ``until``."""
        end, self._end = self._end, min(until, self._end)
        self._run(self._end - 1)
        self.now = max(self.now, self._end)
        self._end = end

    def run_until(self, end: int) -> None:
        """Runs everything due up to ``end``. What is due in a pause runs when the process wakes up, in order."""
        self._end = end
        self._run(end)
        self.now = max(self.now, end)

    def _run(self, end: int) -> None:
        heap = self._heap
        while heap and heap[0][0] <= end:
            time, _, process, action, arguments = heapq.heappop(heap)
            self.now = max(self.now, time)
            if process is not None:
                if not process.alive:
                    continue
                if process.paused_until > time:
                    self.at(process.paused_until, process, action, *arguments)
                    continue
            self.events += 1
            try:
                action(*arguments)
            except DriverCrash:
                if process is None:
                    raise
                self._on_crash(process)
