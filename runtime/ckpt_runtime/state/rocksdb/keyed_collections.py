"""List and map state whose entries lie in the database.

The content of a key is one entry while it is short: it is read and written as a whole. When it grows beyond
``MOST_ROWS`` it is split (``codec.py``): each entry of a map, and each ``MOST_ROWS`` elements of a list, becomes an
element in the database that is read and written on its own. So the cost of a change does not depend on the size, and
memory holds the elements that were used last. A split map iterates over its entries in the order of their keys' bytes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any

import pyarrow as pa

from ckpt_runtime.state import values
from ckpt_runtime.state.memory.keyed_states import ListStateTable, MapStateTable
from ckpt_runtime.state.rocksdb.codec import KeyCodec, Row, RowsCodec, SplitList, map_tail, number_tail
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.dirty import CachedState
from ckpt_runtime.state.rocksdb.elements import MOST_ROWS, CachedElements, ElementTable, FrozenBoth, SplitTable
from ckpt_runtime.state.rocksdb.entries import StoredEntry
from ckpt_runtime.state.rocksdb.keyed_states import RocksDBState
from ckpt_runtime.state.states import Key, Map, TimeToLive, Value


class StoredCollection(RocksDBState):
    """The common part of lists and maps."""

    _rows_per_element: int

    def attach_entries(self, database: Database, state_id: int, keys: KeyCodec, rows: RowsCodec, capacity: int) -> None:
        table = SplitTable(database, state_id, keys, rows, self.to_rows, self.from_rows)
        self._entries.attach(table, capacity)
        self._elements = CachedElements()
        self._elements.attach(ElementTable(database, state_id, keys, rows), capacity // self._rows_per_element)

    @property
    def cache(self) -> CachedState:
        return self

    def freeze(self) -> Any:
        frozen = [part for part in (self._entries.freeze(), self._elements.freeze()) if part is not None]
        return FrozenBoth(frozen) if frozen else None

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
