"""The measures of a subtask's operators between two checkpoints, for progress reports. Pure.

Measures belong to the checkpoint that ends their interval. The measures of an aborted checkpoint are sent again with
the next one: each row is part of the measures of exactly one completed checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from ckpt_runtime.graph.schema import NonNegative

Combine = Callable[[str, Sequence[bytes]], bytes]
"""Combines the results of the ``observe`` with that uid over several intervals."""
ENOUGH_LOOKS = 2
"""If an interval counts this many polls, the last of them began in the interval."""
MOST_INTERVALS = 16
"""Maximum number of separate intervals in a subtask. Beyond it, the oldest intervals are combined."""


class EventTimes(Struct, frozen=True):
    """Event times of rows, in ms since 1970. ``total`` is their sum."""

    least: int
    greatest: int
    total: float
    rows: NonNegative

    def and_(self, later: EventTimes) -> EventTimes:
        """Those of both."""
        least, greatest = min(self.least, later.least), max(self.greatest, later.greatest)
        return EventTimes(least, greatest, self.total + later.total, self.rows + later.rows)


class OperatorMeasures(Struct, frozen=True, omit_defaults=True):
    """One operator in one interval.

    ``state`` is Spark's name of an operator with state, and empty for others. ``stored_rows``, ``stored_bytes`` and
    ``watermark`` are the values at the end of the interval; None for an operator without state. ``observed`` are
    partial results of ``observe``. ``pending`` is the number of rows waiting in a source, if known. ``reached`` and
    ``latest`` are offsets of a source's partitions, by topic: the ends of the rows that it has read and of the rows
    that exist. ``begun`` are the offsets at which it began to read. ``looks`` counts the polls of a source that
    returned no rows. ``uncommitted``: a sink still has output to commit.
    """

    uid: str
    state: str = ""
    rows_in: NonNegative = 0
    rows_out: NonNegative = 0
    late: NonNegative = 0
    updated: NonNegative = 0
    removed: NonNegative = 0
    bad: NonNegative = 0
    looks: NonNegative = 0
    uncommitted: bool = False
    stored_rows: NonNegative | None = None
    stored_bytes: NonNegative | None = None
    watermark: int | None = None
    event_times: EventTimes | None = None
    observed: bytes = b""
    pending: NonNegative | None = None
    reached: dict[str, dict[str, int]] = {}
    latest: dict[str, dict[str, int]] = {}
    begun: dict[str, dict[str, int]] = {}

    def less(self, before: OperatorMeasures) -> OperatorMeasures:
        """Converts counts since the operator was opened into counts since the measurement ``before``."""
        counts = {name: max(0, getattr(self, name) - getattr(before, name)) for name in _COUNTS}
        return replace(self, **counts)

    def and_(self, later: OperatorMeasures, combine: Combine) -> OperatorMeasures:
        """Combines the measures of this interval and a ``later`` one of the same operator and subtask."""
        parts = [each for each in (self.observed, later.observed) if each]
        times = [each for each in (self.event_times, later.event_times) if each is not None]
        return replace(
            later,
            **{name: getattr(self, name) + getattr(later, name) for name in _COUNTS},
            watermark=self.watermark if later.watermark is None else later.watermark,
            event_times=times[0].and_(times[1]) if len(times) > 1 else next(iter(times), None),
            observed=combine(self.uid, parts) if len(parts) > 1 else b"".join(parts),
        )


_COUNTS = ("rows_in", "rows_out", "late", "updated", "removed", "bad", "looks")


class Interval(Struct, frozen=True):
    """The measures of a subtask's operators in the interval that a checkpoint ends."""

    checkpoint_id: NonNegative
    operators: Annotated[tuple[OperatorMeasures, ...], Meta(max_length=1000)]

    def and_(self, later: Interval, combine: Combine) -> Interval:
        """Combines this interval and the one after it."""
        pairs = zip(self.operators, later.operators, strict=True)
        return Interval(later.checkpoint_id, tuple(first.and_(second, combine) for first, second in pairs))


Intervals = Annotated[tuple[Interval, ...], Meta(max_length=2 * MOST_INTERVALS)]


class OpenIntervals:
    """The intervals of a subtask whose checkpoints have not been reported as completed, oldest first."""

    def __init__(self, combine: Combine) -> None:
        self._combine = combine
        self._open: list[Interval] = []
        self._aborted: set[int] = set()

    def add(self, interval: Interval) -> tuple[Interval, ...]:
        """Adds an interval that has ended, and returns all intervals that its checkpoint may have to report."""
        self._open.append(interval)
        self._join()
        return tuple(self._open)

    def completed(self, checkpoint_id: int) -> None:
        """Removes the intervals that the completed checkpoint has reported."""
        self._open = [interval for interval in self._open if interval.checkpoint_id > checkpoint_id]
        self._aborted = {known for known in self._aborted if known > checkpoint_id}

    def aborted(self, checkpoint_id: int) -> None:
        """Merges the interval of an aborted checkpoint into the next one."""
        if any(interval.checkpoint_id == checkpoint_id for interval in self._open):
            self._aborted.add(checkpoint_id)
            self._join()

    def _join(self) -> None:
        joined: list[Interval] = []
        for interval in self._open:
            over = len(joined) == 1 and len(self._open) > MOST_INTERVALS
            if joined and (joined[-1].checkpoint_id in self._aborted or over):
                self._aborted.discard(joined[-1].checkpoint_id)
                joined[-1] = joined[-1].and_(interval, self._combine)
            else:
                joined.append(interval)
        self._open = joined
