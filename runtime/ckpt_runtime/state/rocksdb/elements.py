"""Elements of split entries (``codec.py``): a write-back cache of them, and ordered iteration over those of one key.

Like entries, they are cached one by one, by key and tail. Iterating over the elements of a key reads the database and
merges the changed elements in, without filling the cache: it needs memory for the changed elements only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import merge
from operator import itemgetter
from typing import Any, TypeAlias

from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.rocksdb.codec import SPLIT, KeyCodec, Row, RowsCodec, SplitList, elements_of, state_prefix
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.dirty import FrozenDirty
from ckpt_runtime.state.rocksdb.entries import CachedEntries, EntryTable, StoredEntry
from ckpt_runtime.state.states import Key

Place: TypeAlias = tuple[Key, bytes]
"""A key and a tail."""

_MOST_SINGLY = 256
"""Maximum number of elements that are removed one by one; more are removed as a range, which slows later reads."""
_KEYS_AT_HAND = 10_000
MOST_ROWS = 64
"""Maximum number of rows of an entry that is not split, and of a part of a list."""

_tail = itemgetter(0)


class SplitTable(EntryTable):
    """The entries of one state, some of which are split."""

    def to_bytes(self, entry: Any) -> bytes:
        return entry.encode() if type(entry) is SplitList else super().to_bytes(entry)

    def from_bytes(self, value: bytes) -> Any:
        return SplitList.decode(value) if value.startswith(SPLIT) else super().from_bytes(value)

    def scan(self, key_group: int, start: bytes = b"") -> Iterator[StoredEntry]:
        for encoded, value in self.database.scan(state_prefix(key_group, self._id), start):
            key, tail = self._keys.decode_element(encoded)
            entry = self._rows.decode(value) if tail else self.from_bytes(value)
            is_current = value.startswith(SPLIT) or self._rows.is_current(value)
            yield StoredEntry(encoded, key, entry, is_current, tail)


class ElementTable(EntryTable):
    """The elements of the same state."""

    def __init__(self, database: Database, state_id: int, keys: KeyCodec, rows: RowsCodec) -> None:
        super().__init__(database, state_id, keys, rows, _same, _some)
        self._at_hand: dict[Key, bytes] = {}

    def prefix_of(self, key: Key) -> bytes:
        """The prefix of the keys of a key's elements. It is cached, because a key has many elements."""
        found = self._at_hand.get(key)
        if found is None:
            (found,) = self._keys.encode(self._id, [key], to_write=True)
            if len(self._at_hand) >= _KEYS_AT_HAND:
                self._at_hand = {}  # another thread may be reading the old one
            self._at_hand[key] = found
        return found

    def encoded(self, keys: Sequence[Place], *, to_write: bool = False) -> list[bytes]:
        return [self.prefix_of(key) + tail for key, tail in keys]

    def behind(self, key: Key) -> Iterator[tuple[bytes, bytes]]:
        """Tails and entries of all elements of a key, as of this call, in order."""
        prefix = self.prefix_of(key)
        length = len(prefix)
        return ((encoded[length:], value) for encoded, value in self.database.scan(prefix, elements_of(prefix)[0]))

    def forget(self, key: Key) -> None:
        """Removes all elements of a key from the database."""
        self.database.delete_range(*elements_of(self.prefix_of(key)))


def _same(rows: Any) -> Any:
    return rows


def _some(rows: list[Row]) -> list[Row]:
    if not rows:
        raise CorruptStateError("an element has no rows")
    return rows


class CachedElements(CachedEntries):
    """See the module docstring. An element is a list of rows, never an empty one."""

    table: ElementTable

    def __init__(self) -> None:
        super().__init__()
        self._tails: dict[Key, set[bytes]] | None = None

    def put(self, key: Place, entry: Any) -> None:
        super().put(key, entry)
        if self._tails is not None:
            self._tails.setdefault(key[0], set()).add(key[1])

    def of(self, key: Key) -> Iterator[tuple[bytes, list[Row]]]:
        """Tails and rows of all elements of a key as of this call, in order of the tails."""
        changed = self._changed_of(key)
        stored = ((tail, value) for tail, value in self.table.behind(key) if tail not in changed)
        kept = sorted((tail, rows) for tail, rows in changed.items() if rows is not None)
        entries: Iterator[tuple[bytes, Any]] = merge(stored, kept, key=_tail)
        return ((tail, self.table.from_bytes(rows) if type(rows) is bytes else rows) for tail, rows in entries)

    def _changed_of(self, key: Key) -> dict[bytes, list[Row] | None]:
        """The changed elements of a key that the database may not have yet."""
        layers = [self._changed, *(frozen.changed for frozen in reversed(self._frozen))]
        if self._tails is None:
            self._tails = {}
            for layer in layers:
                for other, tail in layer:
                    self._tails.setdefault(other, set()).add(tail)
        found: dict[bytes, list[Row] | None] = {}
        for tail in self._tails.get(key, ()):
            for layer in layers:
                if (key, tail) in layer:
                    rows = layer[key, tail]
                    found[tail] = None if rows is None else list(rows)
                    break
        return found

    def remove_all(self, key: Key, elements: int) -> None:
        """Removes all elements of a key; ``elements`` is their number."""
        if elements <= _MOST_SINGLY:
            for tail, _ in list(self.of(key)):
                self.remove((key, tail))
            return
        self.table.forget(key)
        self._frozen.clear()  # the database has their entries
        self._tails = None
        self._young, self._old, self._changed = (
            {place: rows for place, rows in known.items() if place[0] != key}
            for known in (self._young, self._old, self._changed)
        )

    def freeze(self) -> Any:
        self._tails = None
        return super().freeze()

    def maintain(self, budget: int) -> None:
        before = len(self._changed)
        super().maintain(budget)
        if len(self._changed) < before:
            self._tails = None


class FrozenBoth:
    """The changes of entries and their elements up to one moment."""

    def __init__(self, parts: Sequence[FrozenDirty]) -> None:
        self._parts = parts

    def puts(self) -> Iterator[tuple[bytes, bytes]]:
        for part in self._parts:
            yield from part.puts()

    def deletes(self) -> Iterator[bytes]:
        for part in self._parts:
            yield from part.deletes()

    def release(self) -> None:
        for part in self._parts:
            part.release()
