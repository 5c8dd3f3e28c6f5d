"""Entries of one state, by key: a write-back cache in front of the database, of bounded size.

Reads look at the recently used entries (two generations: when the younger one is full, the older one is dropped), at
the changes since the last snapshot, at frozen changes that the database does not hold yet, and then into the database.
Values are never None; mutable ones are changed through :meth:`CachedEntries.writable` only. The subtask's thread owns
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from ckpt_runtime.state.rocksdb.codec import BATCH, KeyCodec, RowsCodec, state_prefix
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.states import Key

_UNKNOWN: Any = object()


class StoredEntry(NamedTuple):
    """One entry of the database, and whether it has the present schema; an element has a tail."""

    encoded_key: bytes
    key: Key
    entry: Any
    is_current: bool
    tail: bytes = b""


class EntryTable:
    """The entries of one state in the database. ``to_rows`` and ``from_rows`` convert entries."""

    def __init__(
        self,
        database: Database,
        state_id: int,
        keys: KeyCodec,
        rows: RowsCodec,
        to_rows: Callable[[Any], Iterable[tuple[Any, ...]]],
        from_rows: Callable[[list[tuple[Any, ...]]], Any],
    ) -> None:
        self.database = database
        self._id = state_id
        self._keys = keys
        self._rows = rows
        self._to_rows = to_rows
        self._from_rows = from_rows

    def encoded(self, keys: Sequence[Any], *, to_write: bool = False) -> list[bytes]:
        """Keys as the database has them."""
        return self._keys.encode(self._id, keys, to_write=to_write)

    def to_bytes(self, entry: Any) -> bytes:
        """The stored value of an entry."""
        return self._rows.encode(self._to_rows(entry))

    def from_bytes(self, value: bytes) -> Any:
        """The inverse. Raises CorruptStateError."""
        return self._from_rows(self._rows.decode(value))

    def read(self, keys: Sequence[Key]) -> list[tuple[Key, Any]]:
        """The keys with their entries, or None."""
        encoded = self.encoded(keys)
        # In key order, neighbours in the database are read together.
        order = sorted(range(len(encoded)), key=encoded.__getitem__)
        found = self.database.multi_get([encoded[place] for place in order])
        return [
            (keys[place], None if value is None else self.from_bytes(value))
            for place, value in zip(order, found, strict=True)
        ]

    def puts(self, changed: dict[Key, Any]) -> Iterator[tuple[bytes, bytes]]:
        """The entries to put into the database."""
        # No tuple per entry: so many new tuples would trigger the garbage collector.
        keys = [key for key, entry in changed.items() if entry is not None]
        entries = [entry for entry in changed.values() if entry is not None]
        for start in range(0, len(keys), BATCH):
            encoded = self.encoded(keys[start : start + BATCH], to_write=True)
            yield from zip(encoded, map(self.to_bytes, entries[start : start + BATCH]), strict=True)

    def deletes(self, changed: dict[Key, Any]) -> list[bytes]:
        """The keys to delete from the database."""
        return self.encoded([key for key, entry in changed.items() if entry is None], to_write=True)

    def scan(self, key_group: int, start: bytes = b"") -> Iterator[StoredEntry]:
        """The entries of a key group from the encoded key ``start`` on."""
        for encoded, value in self.database.scan(state_prefix(key_group, self._id), start):
            yield StoredEntry(encoded, self._keys.decode(encoded), self.from_bytes(value), self._rows.is_current(value))


class FrozenEntries:
    """The changed entries as of one moment; None for removed ones."""

    def __init__(self, table: EntryTable, changed: dict[Key, Any]) -> None:
        self._table = table
        self.changed = changed
        self.is_stored = False

    def puts(self) -> Iterator[tuple[bytes, bytes]]:
        return self._table.puts(self.changed)

    def deletes(self) -> list[bytes]:
        return self._table.deletes(self.changed)

    def release(self) -> None:
        self.is_stored = True


class CachedEntries:
    """See the module docstring. :meth:`attach` must be called first; the cache keeps about ``capacity`` keys."""

    table: EntryTable

    def __init__(self) -> None:
        self._young: dict[Key, Any] = {}
        self._old: dict[Key, Any] = {}
        self._changed: dict[Key, Any] = {}
        self._frozen: list[FrozenEntries] = []
        self._half = 0

    def attach(self, table: EntryTable, capacity: int) -> None:
        """Connects the cache with its table in the database."""
        self.table = table
        self._half = max(1, capacity // 2)

    def get(self, key: Key) -> Any:
        """The entry, or None."""
        entry = self._young.get(key, _UNKNOWN)
        return self._find(key) if entry is _UNKNOWN else entry

    def _find(self, key: Key) -> Any:
        entry = self._at_hand(key)
        if entry is _UNKNOWN:
            ((_, entry),) = self.table.read([key])
        self._young[key] = entry
        return entry

    def _at_hand(self, key: Key) -> Any:
        # From the youngest to the oldest: the first one that has the key has its latest entry.
        for known in (self._old, self._changed, *(frozen.changed for frozen in reversed(self._frozen))):
            entry = known.get(key, _UNKNOWN)
            if entry is not _UNKNOWN:
                return entry
        return _UNKNOWN

    def put(self, key: Key, entry: Any) -> None:
        """Sets the entry."""
        self._young[key] = entry
        self._changed[key] = entry

    def remove(self, key: Key) -> None:
        """Removes the entry if there is one."""
        self.put(key, None)

    def writable(self, key: Key, copy: Callable[[Any], Any]) -> Any:
        """The entry, to be changed in place; copied first unless it was copied since the last snapshot."""
        entry = self._changed.get(key, _UNKNOWN)
        if entry is _UNKNOWN:
            entry = self.get(key)
            if entry is not None:
                entry = copy(entry)
                self.put(key, entry)
        return entry

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Reads all entries that are not in memory in one call."""
        young = self._young
        wanted = []
        for key in [key for key in keys if key not in young]:
            entry = self._at_hand(key)
            if entry is _UNKNOWN:
                wanted.append(key)
            else:
                young[key] = entry
        if wanted:
            young.update(self.table.read(wanted))

    def freeze(self) -> list[FrozenEntries]:
        """Takes the changed entries."""
        self._forget_stored()
        if not self._changed:
            return []
        frozen = FrozenEntries(self.table, self._changed)
        self._frozen.append(frozen)
        self._changed = {}
        return [frozen]

    def maintain(self, budget: int) -> None:
        """Enforces the capacity: writes excess changed entries to the database and drops unused ones."""
        self._forget_stored()
        excess = len(self._changed) - self._half
        if excess > 0:
            # Not in small batches: each write has a fixed cost.
            oldest = dict(islice(self._changed.items(), max(excess, budget)))
            self.table.database.write(self.table.puts(oldest), self.table.deletes(oldest))
            # The frozen entries were written to the database before them.
            self._frozen.clear()
            for key in oldest:
                del self._changed[key]
        if len(self._young) > self._half:
            self._old, self._young = self._young, {}

    def _forget_stored(self) -> None:
        if self._frozen and self._frozen[0].is_stored:
            self._frozen = [frozen for frozen in self._frozen if not frozen.is_stored]
