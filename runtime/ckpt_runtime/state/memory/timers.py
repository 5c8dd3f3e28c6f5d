"""Timers: a priority queue of (time, key), each pair once, with deletion and listing per key.

The times of each key are the state (frozen like any other); the heap is an index of it, rebuilt on restore, whose
outdated entries are skipped. Times are ms since epoch. One thread owns it.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from ckpt_runtime.state import stored_rows
from ckpt_runtime.state.memory.keyed_state import MemoryState, StoredRow
from ckpt_runtime.state.states import Key

_TIME_SCHEMA = pa.schema([pa.field(stored_rows.TIME, pa.int64(), nullable=False)])


class TimerQueue(MemoryState):
    """See the module docstring."""

    kind = "timers"

    def __init__(self, uid: str, name: str, key_schema: pa.Schema) -> None:
        super().__init__(uid, name, key_schema, _TIME_SCHEMA)
        self._heap: list[tuple[int, int, Key]] = []
        self._pushes = 0

    def parts(self) -> list[tuple[str, pa.Schema]]:
        return [(stored_rows.KEY_PREFIX, self.key_schema), ("", _TIME_SCHEMA)]

    def register(self, key: Key, time: int) -> None:
        """Adds a timer; registering the same one twice adds it once."""
        times = self._entries.get(key)
        if times is None:
            self._entries.put(key, (time,))
        elif time in times:
            return
        else:
            ordered = list(times)
            insort(ordered, time)
            self._entries.put(key, tuple(ordered))
        # The number keeps keys of equal times from being compared, which would fail for None among their values.
        self._pushes += 1
        heapq.heappush(self._heap, (time, self._pushes, key))

    def delete(self, key: Key, time: int) -> None:
        """Removes a timer if it is there."""
        times = self._entries.get(key)
        if times is None or time not in times:
            return
        rest = tuple(other for other in times if other != time)
        if rest:
            self._entries.put(key, rest)
        else:
            self._entries.remove(key)

    def times_of(self, key: Key) -> tuple[int, ...]:
        """The timers of a key, ascending."""
        return self._entries.get(key) or ()

    def next_time(self) -> int | None:
        """The earliest timer of all."""
        while self._heap:
            time, _, key = self._heap[0]
            if time in self.times_of(key):
                return time
            heapq.heappop(self._heap)
        return None

    def due(self, until: int) -> list[tuple[int, Key]]:
        """Timers at or before ``until``, ascending. They stay listed until deleted but are not returned again."""
        # A timer that was deleted and registered again is in the heap twice.
        found: dict[tuple[int, Key], None] = {}
        while self._heap and self._heap[0][0] <= until:
            time, _, key = heapq.heappop(self._heap)
            if time in self.times_of(key):
                found[(time, key)] = None
        return list(found)

    def expire(self, key: Key, now: int) -> int | None:
        return None

    def rows(self, chunk: list[tuple[Key, Any]]) -> Iterable[StoredRow]:
        return [(key, (time,)) for key, times in chunk for time in times]

    def load(self, rows: Iterable[StoredRow]) -> None:
        for key, (time,) in rows:
            self.register(key, time)
