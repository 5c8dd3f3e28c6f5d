"""Value, list and map state and timers of one operator: the implementation of a StatefulProcessor's state variables.

Values are canonical tuples (``state/values.py`` checks them before they come here). Lists and maps are changed in
place, except that the first change copies them while a snapshot still shows them.

Timers are a priority queue of (time, key), each pair once, with deletion and listing per key. The times of each key
are the state (frozen like any other); the heap is an index of it, rebuilt on restore, whose outdated entries are
skipped. Times are ms since epoch. One thread owns it.

:class:`TableBackend` is the base of the backends: it makes each of these states once, for one schema.
"""

from __future__ import annotations

import heapq
from abc import abstractmethod
from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, Protocol, TypeVar

import pyarrow as pa

from ckpt_runtime.state import stored_rows, values
from ckpt_runtime.state.backend import KeyedStateBackend
from ckpt_runtime.state.errors import StateSchemaError, schema_mismatch
from ckpt_runtime.state.hashing import check_key_types
from ckpt_runtime.state.memory.keyed_columns import SingleRows
from ckpt_runtime.state.memory.keyed_state import MemoryState, StoredRow
from ckpt_runtime.state.memory.row_buffer import check_same_keys, stored_schema
from ckpt_runtime.state.states import Key, KeyedColumns, Map, RowBufferSpec, TimeToLive, Value
from ckpt_runtime.state.stored_rows import KEY_PREFIX, USER_KEY_PREFIX, VALUE_PREFIX


class ValueStateTable(MemoryState):
    """One tuple per key. ``get(key)`` is the tuple or None."""

    kind = "value"

    def __init__(
        self, uid: str, name: str, key_schema: pa.Schema, value_schema: pa.Schema, ttl: TimeToLive | None = None
    ) -> None:
        super().__init__(uid, name, key_schema, value_schema, ttl)
        self.get: Callable[[Key], Value | None] = self._entries.get if ttl is None else self._get_live
        self.put: Callable[[Key, Value], None] = self._entries.put if ttl is None else self._put_stamped

    def _get_live(self, key: Key) -> Value | None:
        stored = self._entries.get(key)
        assert self.ttl is not None
        return None if stored is None or stored[-1] <= self.ttl.now_ms() else stored[:-1]

    def _put_stamped(self, key: Key, value: Value) -> None:
        self._entries.put(key, self.stamped(key, value))

    def expire(self, key: Key, now: int) -> int | None:
        stored = self._entries.get(key)
        if stored is None:
            return None
        if stored[-1] > now:
            return int(stored[-1])
        self._entries.remove(key)
        return None

    def rows(self, chunk: list[tuple[Key, Any]]) -> Iterable[StoredRow]:
        return chunk

    def load(self, rows: Iterable[StoredRow]) -> None:
        for key, value in rows:
            self._entries.put(key, value)
            if self.ttl is not None:
                self.watch(key, value[-1])


class ListStateTable(MemoryState):
    """A list of tuples per key; an empty list counts as absent."""

    kind = "list"

    def get(self, key: Key) -> list[Value]:
        stored: list[Value] = self._entries.get(key) or []
        if self.ttl is None:
            return stored
        now = self.ttl.now_ms()
        return [value[:-1] for value in stored if value[-1] > now]

    def elements(self, key: Key) -> Iterator[Value]:
        return iter(tuple(self.get(key)))

    def exists(self, key: Key) -> bool:
        return bool(self.get(key))

    def put(self, key: Key, elements: list[Value]) -> None:
        self._entries.put(key, [self.stamped(key, value) for value in elements])

    def append(self, key: Key, elements: list[Value]) -> None:
        stored = self._entries.writable(key, list)
        if stored is None:
            self.put(key, elements)
        elif self.ttl is None:
            stored.extend(elements)
        else:
            stored.extend([self.stamped(key, value) for value in elements])

    def expire(self, key: Key, now: int) -> int | None:
        stored = self._entries.get(key)
        if stored is None:
            return None
        live = [value for value in stored if value[-1] > now]
        if not live:
            self._entries.remove(key)
            return None
        if len(live) < len(stored):
            self._entries.put(key, live)
        return int(min(value[-1] for value in live))

    def rows(self, chunk: list[tuple[Key, Any]]) -> Iterable[StoredRow]:
        return chain.from_iterable([(key, value) for value in elements] for key, elements in chunk)

    def load(self, rows: Iterable[StoredRow]) -> None:
        for key, value in rows:
            stored = self._entries.get(key)
            if stored is None:
                self._entries.put(key, [value])
            else:
                stored.append(value)
            if self.ttl is not None:
                self.watch(key, value[-1])


class MapStateTable(MemoryState):
    """A map from tuple to tuple per key, in order of first insertion; an empty map counts as absent."""

    kind = "map"

    def __init__(
        self,
        uid: str,
        name: str,
        key_schema: pa.Schema,
        user_key_schema: pa.Schema,
        value_schema: pa.Schema,
        ttl: TimeToLive | None = None,
    ) -> None:
        super().__init__(uid, name, key_schema, value_schema, ttl)
        self.user_key_schema = user_key_schema

    def parts(self) -> list[tuple[str, pa.Schema]]:
        user_key = (USER_KEY_PREFIX, self.user_key_schema)
        return [(KEY_PREFIX, self.key_schema), user_key, (VALUE_PREFIX, self.value_schema)]

    def get(self, key: Key) -> Map:
        stored: Map = self._entries.get(key) or {}
        if self.ttl is None:
            return stored
        now = self.ttl.now_ms()
        return {name: value[:-1] for name, value in stored.items() if value[-1] > now}

    def items(self, key: Key) -> Iterator[tuple[Value, Value]]:
        return iter(tuple(self.get(key).items()))

    def exists(self, key: Key) -> bool:
        return bool(self.get(key))

    def get_value(self, key: Key, name: Value) -> Value | None:
        stored = self._entries.get(key)
        value: Value | None = None if stored is None else stored.get(name)
        if value is None or self.ttl is None:
            return value
        return value[:-1] if value[-1] > self.ttl.now_ms() else None

    def put(self, key: Key, name: Value, value: Value) -> None:
        stored = self._entries.writable(key, dict)
        value = self.stamped(key, value)
        if stored is None:
            self._entries.put(key, {name: value})
        else:
            stored[name] = value

    def remove(self, key: Key, name: Value) -> None:
        stored = self._entries.writable(key, dict)
        if stored is not None and stored.pop(name, None) is not None and not stored:
            self._entries.remove(key)

    def expire(self, key: Key, now: int) -> int | None:
        stored = self._entries.get(key)
        if stored is None:
            return None
        live = {name: value for name, value in stored.items() if value[-1] > now}
        if not live:
            self._entries.remove(key)
            return None
        if len(live) < len(stored):
            self._entries.put(key, live)
        return int(min(value[-1] for value in live.values()))

    def rows(self, chunk: list[tuple[Key, Any]]) -> Iterable[StoredRow]:
        return chain.from_iterable([(key, name, value) for name, value in entries.items()] for key, entries in chunk)

    def load(self, rows: Iterable[StoredRow]) -> None:
        for key, name, value in rows:
            stored = self._entries.get(key)
            if stored is None:
                self._entries.put(key, {name: value})
            else:
                stored[name] = value
            if self.ttl is not None:
                self.watch(key, value[-1])


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
        times = self._entries.get(key)
        if times is None or time not in times:
            return
        rest = tuple(other for other in times if other != time)
        if rest:
            self._entries.put(key, rest)
        else:
            self._entries.remove(key)

    def times_of(self, key: Key) -> tuple[int, ...]:
        return self._entries.get(key) or ()

    def next_time(self) -> int | None:
        while self._heap:
            time, _, key = self._heap[0]
            if time in self.times_of(key):
                return time
            heapq.heappop(self._heap)
        return None

    def due(self, until: int) -> list[tuple[int, Key]]:
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


S = TypeVar("S", bound=MemoryState)


class _State(Protocol):
    def stored_schema(self) -> pa.Schema: ...


class TableBackend(KeyedStateBackend):
    """Base of backends whose states are tables by key. The class attributes name the class of each kind of state."""

    values_class: ClassVar[type[ValueStateTable]] = ValueStateTable
    lists_class: ClassVar[type[ListStateTable]] = ListStateTable
    maps_class: ClassVar[type[MapStateTable]] = MapStateTable
    timers_class: ClassVar[type[TimerQueue]] = TimerQueue
    uid: str

    @property
    @abstractmethod
    def states(self) -> Mapping[str, _State]:
        """The states that are in use, by name."""

    @abstractmethod
    def open_state(self, state: MemoryState) -> None:
        """Loads the restored content into a new state, if there is any, and adds the state to :attr:`states`.

        Raises StateSchemaError when that content has another kind, or a schema that does not evolve into this one.
        """

    def value_state(
        self, name: str, key_schema: pa.Schema, value_schema: pa.Schema, ttl: TimeToLive | None = None
    ) -> ValueStateTable:
        return self._keyed(self.values_class, name, key_schema, value_schema, ttl)

    def list_state(
        self, name: str, key_schema: pa.Schema, value_schema: pa.Schema, ttl: TimeToLive | None = None
    ) -> ListStateTable:
        return self._keyed(self.lists_class, name, key_schema, value_schema, ttl)

    def map_state(
        self,
        name: str,
        key_schema: pa.Schema,
        user_key_schema: pa.Schema,
        value_schema: pa.Schema,
        ttl: TimeToLive | None = None,
    ) -> MapStateTable:
        return self._keyed(self.maps_class, name, key_schema, user_key_schema, value_schema, ttl)

    def timers(self, name: str, key_schema: pa.Schema) -> TimerQueue:
        return self._keyed(self.timers_class, name, key_schema)

    def _keyed(self, make: Callable[..., S], name: str, key_schema: pa.Schema, *arguments: Any) -> S:
        check_key_types(key_schema, key_schema.names)
        for schema in (key_schema, *(a for a in arguments if isinstance(a, pa.Schema))):
            if len(schema) == 0:
                raise StateSchemaError(f"state {name!r} of operator {self.uid!r}: a schema without fields")
            values.check_supported(schema, f"state {name!r} of operator {self.uid!r}")
        state = make(self.uid, name, key_schema, *arguments)
        known = self.states.get(name)
        if known is None:
            self.open_state(state)
            return state
        wanted = state.stored_schema()
        if type(known) is not type(state) or not known.stored_schema().equals(wanted):
            raise schema_mismatch(self.uid, name, "it is in use for something else", known.stored_schema(), wanted)
        return known

    def check_rows(self, specs: Sequence[RowBufferSpec]) -> None:
        """Raises StateSchemaError unless the sides' keys have equal types and none of these states is in use."""
        check_same_keys(self.uid, specs)
        for spec in specs:
            if (known := self.states.get(spec.name)) is not None:
                raise schema_mismatch(self.uid, spec.name, "it is in use", known.stored_schema(), stored_schema(spec))

    def keyed_columns(self, spec: RowBufferSpec) -> KeyedColumns:
        return SingleRows(self.row_buffers([spec]))
