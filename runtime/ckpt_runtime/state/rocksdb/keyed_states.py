"""Value state and timers whose entries are in the database: the states of the in-memory backend on cached entries; and
the part that they share with lists and maps.

An entry is everything under one key, read and written as a whole, except long lists and large maps
(``keyed_collections.py``). The database holds the timers; an index in memory finds them by time, and is rebuilt when
their state is restored. Entries expire as in memory; a sweep through the database, once per time to live, removes
expired ones.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from copy import copy
from itertools import islice
from typing import Any

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.memory.keyed_state import MemoryState
from ckpt_runtime.state.memory.keyed_states import TimerQueue, ValueStateTable
from ckpt_runtime.state.rocksdb.catalog import StateEntry
from ckpt_runtime.state.rocksdb.codec import KeyCodec, Row, RowsCodec, without_key
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.entries import CachedEntries, EntryTable, FrozenEntries, StoredEntry
from ckpt_runtime.state.states import Key

SWEEP_STEP = 100
"""Entries that one step of the sweep checks for expired ones."""


class RocksDBState(MemoryState):
    """The common part of the kinds of state. :meth:`attach` must be called first."""

    make_entries = CachedEntries
    _entries: CachedEntries

    def attach(
        self, database: Database, entry: StateEntry, keys: KeyCodec, groups: KeyGroupRange, capacity: int
    ) -> None:
        """Connects the state with the database, where it is ``entry`` of the catalog."""
        rows = RowsCodec(
            {number: without_key(schema) for number, schema in entry.schemas().items()},
            entry.current,
            self._fresh_stamp,
        )
        self.attach_entries(database, entry.id, keys, rows, capacity)
        self._groups = groups
        self._sweep_group, self._sweep_key = groups.last + 1, b""
        self._next_sweep = 0

    def attach_entries(self, database: Database, state_id: int, keys: KeyCodec, rows: RowsCodec, capacity: int) -> None:
        """Connects the cache with its table."""
        self._entries.attach(EntryTable(database, state_id, keys, rows, self.to_rows, self.from_rows), capacity)

    def changes(self) -> list[FrozenEntries]:
        """Takes the changed entries."""
        return self._entries.freeze()

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Reads all entries that are not in memory in one call."""
        self._entries.prefetch(keys)

    def _fresh_stamp(self) -> int:
        assert self.ttl is not None
        return self.ttl.now_ms() + self.ttl.duration_ms

    @abstractmethod
    def to_rows(self, entry: Any) -> Iterable[Row]:
        """The rows of an entry, without the key."""

    @abstractmethod
    def from_rows(self, rows: list[Row]) -> Any:
        """The inverse."""

    def stored_entries(self) -> Iterator[tuple[Key, Any]]:
        """All entries of the database, group by group."""
        for group in range(self._groups.first, self._groups.last + 1):
            for found in self._entries.table.scan(group):
                yield found.key, found.entry

    def watch(self, key: Key, expires_at: int) -> None:
        """Does nothing: the sweep through the database finds expired entries."""

    def maintain(self, budget: int) -> None:
        self._entries.maintain(budget)
        if self.ttl is None:
            return
        now = self.ttl.now_ms()
        if self._sweep_group <= self._groups.last:
            self._remove_expired(now)
        elif now >= self._next_sweep:
            self._sweep_group, self._next_sweep = self._groups.first, now + self.ttl.duration_ms

    def _remove_expired(self, now: int) -> None:
        """Does one step. It keeps no iterator, which would keep obsolete files."""
        step = list(islice(self._entries.table.scan(self._sweep_group, self._sweep_key), SWEEP_STEP))
        for found in step:
            self.look_at(found, now)
        if len(step) < SWEEP_STEP:
            self._sweep_group, self._sweep_key = self._sweep_group + 1, b""
        else:
            self._sweep_key = step[-1].encoded_key + b"\0"

    def look_at(self, found: StoredEntry, now: int) -> None:
        """Removes the expired rows of an entry."""
        if any(row[-1] <= now for row in self.to_rows(found.entry)):
            self.expire(found.key, now)
        elif not found.is_current:  # its expiry time was assigned when it was read
            self._entries.writable(found.key, copy)


class StoredValues(RocksDBState, ValueStateTable):
    """One tuple per key."""

    def to_rows(self, entry: Any) -> Iterable[Row]:
        return (entry,)

    def from_rows(self, rows: list[Row]) -> Any:
        return rows[0]


class StoredTimers(RocksDBState, TimerQueue):
    """A priority queue of (time, key)."""

    def to_rows(self, entry: Any) -> Iterable[Row]:
        return [(time,) for time in entry]

    def from_rows(self, rows: list[Row]) -> Any:
        return tuple([time for (time,) in rows])

    def attach(
        self, database: Database, entry: StateEntry, keys: KeyCodec, groups: KeyGroupRange, capacity: int
    ) -> None:
        super().attach(database, entry, keys, groups, capacity)
        for key, times in self.stored_entries():
            for time in times:
                self._pushes += 1
                self._heap.append((time, self._pushes, key))
        heapq.heapify(self._heap)
