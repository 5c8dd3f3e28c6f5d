"""Alignment of watermarks (FLIP-182 and FLIP-217): sources that are ahead of the slowest source of their group wait.
Pure.

A source has an event time: the watermark that its rows have reached, in ms since the epoch. A *group* is a set of
subtasks, of one source or of several. :class:`AlignmentGroups`, in the driver, gets the event times of the subtasks and
computes the minimum of each group. :class:`SplitAlignment`, in a subtask, holds the splits that are ahead of that
minimum by more than the allowed drift. Neither waits for idle sources or splits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ckpt_runtime.checkpoint.executions import SubtaskKey

_LONGEST_LOOK_MS = 1_000.0
"""The maximum time that one poll adds to the time without rows: a subtask that could not poll for minutes is not
idle."""
_WITHOUT_ROWS_MS = 3_000
"""After this time, a subtask without splits and a split without rows are idle even if no timeout is set: there may be
fewer splits than subtasks, and partitions may be empty."""


class Progress(NamedTuple):
    """A subtask's event time, None before its first row. ``wants_checkpoint``: it waits for a checkpoint that covers
    the rows it has sent."""

    event_time: int | None
    idle: bool = False
    wants_checkpoint: bool = False


@dataclass(slots=True)
class _Part:
    """A split that can be held separately, or all splits of a subtask. ``splits`` are the splits that have not
    ended."""

    event_time: int | None = None
    splits: int = 0
    unbounded: int = 0
    quiet_ms: float = 0.0


_ALL = ""


class SplitAlignment:
    """The splits of one subtask. With ``idle_ms`` 0, a split that has had rows is never idle. :meth:`looked` has
    to be called a few times a second unless :attr:`is_settled`.

    ``each``: the reader can hold each split by itself, and the others wait for the first row of a split without an end.
    Otherwise the reader reads one split after the other, and the time of its last row is the event time of the subtask.
    """

    def __init__(self, max_drift_ms: int, idle_ms: int, *, each: bool) -> None:
        self._max_drift_ms = max_drift_ms
        self._idle_ms = idle_ms
        self._each = each
        self._parts = {_ALL: _Part()}
        self._minimum: int | None = None
        self._looked_at: float | None = None

    def add(self, split_id: str, event_time: int | None, *, bounded: bool) -> None:
        """Adds a split; ``event_time`` is the time of its last row if it was read before."""
        if self._each:
            self._parts.pop(_ALL, None)
        part = self._parts.setdefault(split_id if self._each else _ALL, _Part())
        part.splits += 1
        part.unbounded += not bounded
        part.quiet_ms = 0.0
        self._reached(part, event_time)

    def remove(self, split_id: str, *, bounded: bool) -> None:
        """A split has ended."""
        part = self._part_of(split_id)
        part.splits -= 1
        part.unbounded -= not bounded
        if self._each:
            del self._parts[split_id]
            self._parts = self._parts or {_ALL: _Part()}

    def advance(self, split_id: str, event_time: int | None) -> None:
        """The rows of a split have reached ``event_time``; None if no row has a time."""
        self._reached(self._part_of(split_id), event_time)

    def align(self, minimum: int) -> None:
        """The driver has computed the group's minimum."""
        self._minimum = minimum

    def looked(self, now_ms: float) -> None:
        """Rows are requested from the reader: splits that are not held become idle unless they return rows."""
        passed = 0.0 if self._looked_at is None else min(now_ms - self._looked_at, _LONGEST_LOOK_MS)
        self._looked_at = now_ms
        held = self.held
        for key, part in self._parts.items():
            part.quiet_ms = 0.0 if key in held else part.quiet_ms + passed

    @property
    def held(self) -> frozenset[str]:
        """The splits whose rows have to wait; one name stands for all splits if the reader cannot hold them
        separately."""
        minimum, own = self._minimum, self._own_minimum
        if minimum is None:
            # The minimum of the group is not known yet: rows that are read now might be far ahead of it.
            return frozenset(key for key, part in self._parts.items() if part.event_time is not None)
        # If a split of this subtask is behind the progress last reported to the driver, the group is behind it, too.
        limit = (minimum if own is None else min(minimum, own)) + self._max_drift_ms
        times = ((key, part.event_time) for key, part in self._parts.items())
        return frozenset(key for key, event_time in times if event_time is not None and event_time > limit)

    @property
    def holds_all(self) -> bool:
        """Whether no split may be read."""
        return len(self.held) == len(self._parts)

    @property
    def is_settled(self) -> bool:
        """Whether the subtask has no split and stays idle until it gets one."""
        return self.progress.idle and not any(part.splits for part in self._parts.values())

    def event_time_of(self, split_id: str) -> int | None:
        """The event time that the rows of a split have reached."""
        return self._part_of(split_id).event_time

    @property
    def progress(self) -> Progress:
        """The report for the driver."""
        active = list(self._active)
        if not active:
            return Progress(None, idle=True)
        # A split with an end is read to its end regardless of the others, perhaps after another split of the same
        # reader.
        if any(part.event_time is None and (part.unbounded or not part.splits) for part in active):
            return Progress(None)
        return Progress(self._own_minimum)

    @property
    def drift_ms(self) -> int | None:
        """By how many ms this subtask is ahead of its group; None while either time is unknown."""
        own = self._own_minimum
        return None if own is None or self._minimum is None else max(0, own - self._minimum)

    def _part_of(self, split_id: str) -> _Part:
        return self._parts[split_id if self._each else _ALL]

    def _reached(self, part: _Part, event_time: int | None) -> None:
        if event_time is not None:
            known = part.event_time if self._each else None
            part.event_time = event_time if known is None else max(known, event_time)
            part.quiet_ms = 0.0

    @property
    def _active(self) -> Iterator[_Part]:
        for part in self._parts.values():
            had_rows = part.splits and part.event_time is not None
            idle_ms = self._idle_ms or (0 if had_rows else _WITHOUT_ROWS_MS)
            if not idle_ms or part.quiet_ms < idle_ms:
                yield part

    @property
    def _own_minimum(self) -> int | None:
        return min((part.event_time for part in self._active if part.event_time is not None), default=None)


class AlignmentGroups:
    """The groups of a deployment: ``members`` maps each group's name to its subtasks."""

    def __init__(self, members: Mapping[str, Iterable[SubtaskKey]]) -> None:
        self._members = {group: dict.fromkeys(keys, Progress(None)) for group, keys in members.items()}
        self._group_of = {key: group for group, keys in self._members.items() for key in keys}
        self._minima: dict[str, int] = {}

    def reported(self, key: SubtaskKey, progress: Progress) -> bool:
        """Takes the progress of a subtask; returns whether it is in a group."""
        group = self._group_of.get(key)
        if group is not None:
            self._members[group][key] = progress
        return group is not None

    def ended(self, key: SubtaskKey) -> bool:
        """A subtask has ended: its group no longer waits for it. Returns whether it is in a group."""
        return self.reported(key, Progress(None, idle=True))

    def moved(self) -> Iterator[tuple[int, tuple[SubtaskKey, ...]]]:
        """The minima that have changed since the last call, each with the subtasks that it is sent to. A group has no
        minimum until each of its subtasks has had a row or is idle. When all subtasks are idle, the last minimum
        remains.
        """
        for group, members in self._members.items():
            active = [progress.event_time for progress in members.values() if not progress.idle]
            if not active or None in active:
                continue
            minimum = min(time for time in active if time is not None)
            if self._minima.get(group) != minimum:
                self._minima[group] = minimum
                yield minimum, tuple(members)
