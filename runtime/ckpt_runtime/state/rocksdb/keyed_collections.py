"""List and map state whose entries are in the database.

The content of a key is one entry while it is short: it is read and written as a whole. When it grows beyond
``MOST_ROWS`` it is split (``codec.py``): each entry of a map, and each ``MOST_ROWS`` elements of a list, becomes an
element in the database that is read and written on its own. The cost of a change therefore does not depend on the size,
and memory holds the elements that were used last. A split map iterates over its entries in the order of their keys'
bytes.

Elements of split entries are in a write-back cache. Like entries, they are cached one by one, by key and tail.
Iterating over the elements of a key reads the database and merges the changed elements in, without filling the cache:
it needs memory for the changed elements only.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from heapq import merge
from itertools import chain
from operator import itemgetter
from typing import Any, TypeAlias

import pyarrow as pa

from ckpt_runtime.state import values
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.memory.keyed_states import ListStateTable, MapStateTable
from ckpt_runtime.state.rocksdb.codec import (
    SPLIT,
    KeyCodec,
    Row,
    RowsCodec,
    SplitList,
    elements_of,
    map_tail,
    number_tail,
    state_prefix,
)
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.entries import CachedEntries, EntryTable, FrozenEntries, StoredEntry
from ckpt_runtime.state.rocksdb.keyed_states import RocksDBState
from ckpt_runtime.state.states import Key, Map, TimeToLive, Value

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

    def freeze(self) -> list[FrozenEntries]:
        self._tails = None
        return super().freeze()

    def maintain(self, budget: int) -> None:
        before = len(self._changed)
        super().maintain(budget)
        if len(self._changed) < before:
            self._tails = None


class StoredCollection(RocksDBState):
    """The common part of lists and maps."""

    _rows_per_element: int

    def attach_entries(self, database: Database, state_id: int, keys: KeyCodec, rows: RowsCodec, capacity: int) -> None:
        table = SplitTable(database, state_id, keys, rows, self.to_rows, self.from_rows)
        self._entries.attach(table, capacity)
        self._elements = CachedElements()
        self._elements.attach(ElementTable(database, state_id, keys, rows), capacity // self._rows_per_element)

    def changes(self) -> list[FrozenEntries]:
        return [*self._entries.freeze(), *self._elements.freeze()]

    def maintain(self, budget: int) -> None:
        super().maintain(budget)
        self._elements.maintain(budget)

    def clear(self, key: Key) -> None:
        stored = self._entries.get(key)
        if type(stored) is SplitList:
            self._elements.remove_all(key, stored.elements)
        super().clear(key)

    def stored_entries(self) -> Iterator[tuple[Key, Any]]:
        for group in range(self._groups.first, self._groups.last + 1):
            for found in self._entries.table.scan(group):
                if type(found.entry) is SplitList:
                    behind = self._elements.table.behind(found.key)
                    parts = [self._elements.table.from_bytes(value) for _, value in behind]
                    yield found.key, self.from_rows(list(chain.from_iterable(parts)))
                elif not found.tail:
                    yield found.key, found.entry

    def rows_of(self, key: Key) -> Iterator[Row]:
        """The live rows of a split entry as of this call, a few at a time."""
        parts = self._elements.of(key)
        now = None if self.ttl is None else self.ttl.now_ms()
        return (row for _, rows in parts for row in rows if now is None or row[-1] > now)

    def exists(self, key: Key) -> bool:
        stored = self._entries.get(key)
        if type(stored) is SplitList:
            return self.ttl is None or next(self.rows_of(key), None) is not None
        return bool(self.get(key))

    @abstractmethod
    def get(self, key: Key) -> Any:
        """The whole live content of a key."""

    def expire(self, key: Key, now: int) -> int | None:
        """Does nothing for split entries, whose elements expire one by one."""
        if type(self._entries.get(key)) is SplitList:
            return None
        return super().expire(key, now)  # type: ignore[safe-super]

    def look_at(self, found: StoredEntry, now: int) -> None:
        if not found.tail:
            if type(found.entry) is not SplitList:
                super().look_at(found, now)
            return
        place = (found.key, found.tail)
        rows = self._elements.get(place)
        head = self._entries.get(found.key)
        if rows is None or type(head) is not SplitList:  # already removed, but not yet in the database
            return
        live = [row for row in rows if row[-1] > now]
        if not live:
            self.remove_element(found.key, head, found.tail)
        elif len(live) < len(rows):
            self._elements.put(place, live)
        elif not found.is_current:  # its expiry time was assigned when it was read
            self._elements.writable(place, copy)

    def remove_element(self, key: Key, head: SplitList, tail: bytes) -> None:
        """Removes an element that exists."""
        self._elements.remove((key, tail))
        if head.elements == 1:
            self._entries.remove(key)
        else:
            self._entries.put(key, head._replace(elements=head.elements - 1))


class StoredLists(StoredCollection, ListStateTable):
    """A list of tuples per key."""

    _rows_per_element = MOST_ROWS

    def to_rows(self, entry: Any) -> Iterable[Row]:
        return entry  # type: ignore[no-any-return]

    def from_rows(self, rows: list[Row]) -> Any:
        return rows

    def get(self, key: Key) -> list[Value]:
        return list(self.elements(key)) if type(self._entries.get(key)) is SplitList else ListStateTable.get(self, key)

    def elements(self, key: Key) -> Iterator[Value]:
        if type(self._entries.get(key)) is not SplitList:
            return ListStateTable.elements(self, key)
        rows = self.rows_of(key)
        return rows if self.ttl is None else (row[:-1] for row in rows)

    def put(self, key: Key, elements: list[Value]) -> None:
        self.clear(key)
        ListStateTable.put(self, key, elements)
        self._split_if_long(key)

    def append(self, key: Key, elements: list[Value]) -> None:
        head = self._entries.get(key)
        if type(head) is SplitList:
            self._add(key, head, [self.stamped(key, value) for value in elements])
        else:
            ListStateTable.append(self, key, elements)
            self._split_if_long(key)

    def _split_if_long(self, key: Key) -> None:
        rows = self._entries.get(key)
        if len(rows) > MOST_ROWS:
            self._add(key, SplitList(0, 0), rows)

    def _add(self, key: Key, head: SplitList, rows: Sequence[Row]) -> None:
        """Fills the last part, then makes new ones."""
        start = 0
        if head.next:
            last = (key, number_tail(head.next - 1))
            known = self._elements.get(last)
            if known is not None and len(known) < MOST_ROWS:
                start = MOST_ROWS - len(known)
                self._elements.writable(last, list).extend(rows[:start])
        number = head.next
        for part in range(start, len(rows), MOST_ROWS):
            self._elements.put((key, number_tail(number)), list(rows[part : part + MOST_ROWS]))
            number += 1
        if number != head.next:
            self._entries.put(key, SplitList(head.elements + number - head.next, number))


class StoredMaps(StoredCollection, MapStateTable):
    """A map from tuple to tuple per key."""

    _rows_per_element = 1

    def __init__(
        self,
        uid: str,
        name: str,
        key_schema: pa.Schema,
        user_key_schema: pa.Schema,
        value_schema: pa.Schema,
        ttl: TimeToLive | None = None,
    ) -> None:
        super().__init__(uid, name, key_schema, user_key_schema, value_schema, ttl)
        self._width = len(user_key_schema)
        self._make_key = values.user_key_maker(user_key_schema)

    def to_rows(self, entry: Any) -> Iterable[Row]:
        return [(*name, *value) for name, value in entry.items()]

    def from_rows(self, rows: list[Row]) -> Any:
        width, make_key = self._width, self._make_key
        return {make_key(row[:width]): row[width:] for row in rows}

    def get(self, key: Key) -> Map:
        return dict(self.items(key)) if type(self._entries.get(key)) is SplitList else MapStateTable.get(self, key)

    def items(self, key: Key) -> Iterator[tuple[Value, Value]]:
        if type(self._entries.get(key)) is not SplitList:
            return MapStateTable.items(self, key)
        width, make_key, end = self._width, self._make_key, None if self.ttl is None else -1
        return ((make_key(row[:width]), row[width:end]) for row in self.rows_of(key))

    def get_value(self, key: Key, name: Value) -> Value | None:
        if type(self._entries.get(key)) is not SplitList:
            return MapStateTable.get_value(self, key, name)
        rows = self._elements.get((key, map_tail(name)))
        if rows is None:
            return None
        value: Value = rows[0][self._width :]
        if self.ttl is None:
            return value
        return value[:-1] if value[-1] > self.ttl.now_ms() else None

    def put(self, key: Key, name: Value, value: Value) -> None:
        head = self._entries.get(key)
        if type(head) is SplitList:
            place = (key, map_tail(name))
            if self._elements.get(place) is None:
                self._entries.put(key, head._replace(elements=head.elements + 1))
            self._elements.put(place, [(*name, *self.stamped(key, value))])
            return
        MapStateTable.put(self, key, name, value)
        stored = self._entries.get(key)
        if len(stored) > MOST_ROWS:
            for row in self.to_rows(stored):
                self._elements.put((key, map_tail(row[: self._width])), [row])
            self._entries.put(key, SplitList(len(stored), 0))

    def remove(self, key: Key, name: Value) -> None:
        head = self._entries.get(key)
        if type(head) is not SplitList:
            MapStateTable.remove(self, key, name)
            return
        tail = map_tail(name)
        if self._elements.get((key, tail)) is not None:
            self.remove_element(key, head, tail)

    def remove_element(self, key: Key, head: SplitList, tail: bytes) -> None:
        """Removes an element; a map that has become small is stored as one entry again."""
        super().remove_element(key, head, tail)
        if 1 < head.elements <= MOST_ROWS // 2:
            rows = [rows[0] for _, rows in self._elements.of(key)]
            self._elements.remove_all(key, len(rows))
            self._entries.put(key, self.from_rows(rows))
            if self.ttl is not None:  # the search for expired entries has already passed this key
                self.expire(key, self.ttl.now_ms())
