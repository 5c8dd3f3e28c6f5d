"""Metrics of one subtask, written by its thread and read by the worker's heartbeat."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple


class Activity(IntEnum):
    """The activity of a subtask's thread. The numbers are the positions in :class:`TimeSpent`."""

    BUSY = 0
    IDLE = 1
    BACKPRESSURED = 2


class TimeSpent(NamedTuple):
    """Nanoseconds for each activity."""

    busy: int = 0
    idle: int = 0
    backpressured: int = 0


class ActivityTimer:
    """How long the thread has been busy, idle and back-pressured, including the current interval.

    The task thread writes, any thread reads. All values are in one tuple that is replaced as a whole, so that a reader
    counts each interval exactly once, while it is open as well as when it has ended.
    """

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state: tuple[TimeSpent, Activity | None, int] = (TimeSpent(), None, 0)

    def enter(self, activity: Activity | None, now_ns: int) -> None:
        """Ends the current interval and begins one of the given activity; None begins no interval."""
        self._state = (self.until(now_ns), activity, now_ns)

    @property
    def activity(self) -> Activity | None:
        return self._state[1]

    @property
    def closed(self) -> TimeSpent:
        return self._state[0]

    def until(self, now_ns: int) -> TimeSpent:
        """The intervals that have ended, and the current one up to now."""
        spent, activity, since_ns = self._state
        if activity is None or now_ns <= since_ns:
            return spent
        passed = now_ns - since_ns
        busy, idle, backpressured = spent
        if activity is Activity.BUSY:
            return TimeSpent(busy + passed, idle, backpressured)
        if activity is Activity.IDLE:
            return TimeSpent(busy, idle + passed, backpressured)
        return TimeSpent(busy, idle, backpressured + passed)


@dataclass(slots=True)
class SubtaskMetrics:
    """Rows, bytes, and how the subtask's time was spent.

    ``slices`` counts the processed pieces of buffers: it grows even while one buffer of slow rows takes minutes.
    ``alignment_ms`` and ``start_delay_ms`` are those of the last checkpoint, None before it.
    ``debloated_buffer_size`` is None unless buffers adapt and a sample has been taken.
    """

    rows_in: int = 0
    bytes_in: int = 0
    slices: int = 0
    timer: ActivityTimer = field(default_factory=ActivityTimer)
    alignment_ms: int | None = None
    start_delay_ms: int | None = None
    debloated_buffer_size: int | None = None
