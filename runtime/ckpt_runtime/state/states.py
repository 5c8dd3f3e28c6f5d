"""What operators hold in their hands: keyed states by kind, and the values with which they ask for one.

Vectorised operators work on a batch in one call (:class:`KeyedAggregates`, :class:`KeyedRows`). User code reads and
writes key by key (:class:`KeyedValues`, :class:`KeyedLists`, :class:`KeyedMaps`, :class:`KeyedTimers`): the operator
names the keys of a batch beforehand with ``KeyedStateBackend.prefetch``, so that a backend that reads through a cache
fetches them in one call, and writes go to the cache.

All calls come from the subtask's thread. Keys are tuples of Python values, one per key column, made canonical by the
caller (``values.canonical_key``); values are canonical tuples (``state/values.py`` checks them before they come here).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import pyarrow as pa

from ckpt_runtime.state.columns import AnyArray

Key: TypeAlias = tuple[Any, ...]
Value: TypeAlias = tuple[Any, ...]
Map: TypeAlias = dict[Value, Value]


@dataclass(frozen=True, slots=True)
class TimeToLive:
    """How long entries live after their last update, and the clock (ms since epoch) that says so."""

    duration_ms: int
    now_ms: Callable[[], int]


@dataclass(frozen=True, slots=True)
class AggregateColumn:
    """One aggregate with the type of its input column (None for count(*)) and of its result."""

    function: str
    column: str | None
    alias: str
    input_type: pa.DataType | None
    result_type: pa.DataType

    def describe(self) -> dict[str, Any]:
        """JSON form, kept in snapshots and compared on restore."""
        return {
            "alias": self.alias,
            "function": self.function,
            "column": self.column,
            "input_type": None if self.input_type is None else str(self.input_type),
            "result_type": str(self.result_type),
        }


@dataclass(frozen=True, slots=True)
class RowBufferSpec:
    """One side of :class:`KeyedRows`: its state's name, its columns, which of them are the key, and how rows end.

    ``event_time`` is the timestamp column by which they do (rows with null in it must not be added), or None.
    ``keeps_matched`` is false when a row ends with its first match.
    """

    name: str
    schema: pa.Schema
    keys: tuple[str, ...]
    event_time: str | None = None
    keeps_matched: bool = True

    @property
    def key_schema(self) -> pa.Schema:
        return pa.schema([self.schema.field(key) for key in self.keys])


class KeyedState(Protocol):
    """What states of user code share."""

    name: str

    def clear(self, key: Key) -> None:
        """Removes everything under ``key``."""


class KeyedValues(KeyedState, Protocol):
    """One tuple per key. What has outlived its time is never returned, of lists and maps neither."""

    value_schema: pa.Schema

    # Attributes and not methods: user code calls them for every row, and a backend binds the shortest way once.
    get: Callable[[Key], Value | None]
    put: Callable[[Key, Value], None]


class KeyedLists(KeyedState, Protocol):
    """A list of tuples per key; an empty list is no list. Elements live on their own."""

    value_schema: pa.Schema

    def get(self, key: Key) -> list[Value]:
        """The live elements, all in memory; do not change the list."""

    def elements(self, key: Key) -> Iterator[Value]:
        """The live elements as they are now, whatever is done to the list meanwhile; some of them in memory."""

    def exists(self, key: Key) -> bool:
        """Whether there are any."""

    def put(self, key: Key, elements: list[Value]) -> None:
        """Replaces the list."""

    def append(self, key: Key, elements: list[Value]) -> None:
        """Adds elements at the end."""


class KeyedMaps(KeyedState, Protocol):
    """A map from tuple to tuple per key; an empty map is no map. A small one is in order of first insertion, and every
    one in the same order at each time."""

    user_key_schema: pa.Schema
    value_schema: pa.Schema

    def get(self, key: Key) -> Map:
        """The live entries, all in memory; do not change the dict."""

    def items(self, key: Key) -> Iterator[tuple[Value, Value]]:
        """The live entries as they are now, whatever is done to the map meanwhile; some of them in memory."""

    def exists(self, key: Key) -> bool:
        """Whether there are any."""

    def get_value(self, key: Key, name: Value) -> Value | None:
        """One entry's value, or None."""

    def put(self, key: Key, name: Value, value: Value) -> None:
        """Sets one entry."""

    def remove(self, key: Key, name: Value) -> None:
        """Removes one entry if it is there."""


class KeyedTimers(Protocol):
    """A priority queue of (time, key), each pair once. Times are ms since epoch."""

    def register(self, key: Key, time: int) -> None:
        """Adds a timer; the same one twice is one."""

    def delete(self, key: Key, time: int) -> None:
        """Removes a timer if it is there."""

    def times_of(self, key: Key) -> tuple[int, ...]:
        """The timers of a key, ascending."""

    def next_time(self) -> int | None:
        """The earliest timer of all."""

    def due(self, until: int) -> list[tuple[int, Key]]:
        """Timers at or before ``until``, ascending. They stay listed until deleted but are not given out again."""


class KeyedAggregates(Protocol):
    """Running aggregates: one row per key."""

    def update(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Adds all rows; for each aggregate its value after each row.

        Raises :class:`~ckpt_runtime.state.errors.AggregateOverflowError`; the state is then unusable.
        """


class KeyedRowBuffer(Protocol):
    """The rows of one side of :class:`KeyedRows`, in the order in which they came."""

    spec: RowBufferSpec

    def __len__(self) -> int: ...

    def append(self, batch: pa.RecordBatch, slots: AnyArray, matched: AnyArray) -> None:
        """Adds rows behind those of their keys; ``matched`` says (0 or 1) which have found a match already.

        Raises :class:`~ckpt_runtime.state.errors.StateError` when there are too many.
        """

    def matches(
        self, slots: AnyArray, times: AnyArray, lower: int, upper: int, found: AnyArray
    ) -> Iterator[tuple[AnyArray, AnyArray]]:
        """Pairs (probing position, row), some thousands at a time.

        Ordered by position, then by when the row came. ``times`` are the probes', in the unit of this side's; a row
        matches whose time minus the probe's is between ``lower`` and ``upper``. With no times every row of the key
        matches. Sets ``found`` (uint8) to 1 where there was a match. Nothing may be added before the last pair is out.
        """

    def mark_found(self, slots: AnyArray, times: AnyArray, lower: int, upper: int, found: AnyArray) -> None:
        """As :meth:`matches`, only setting ``found``."""

    def expired(self, bound: int) -> Iterator[AnyArray]:
        """Forgets rows whose event time is at or before ``bound`` (own unit); the numbers of those without a match.

        They come some at a time, and hold until the next ones are asked for; so do slots.
        """

    def take(self, rows: AnyArray, wanted: Sequence[int]) -> list[pa.Array]:
        """The columns at the positions ``wanted`` of rows by number."""


class KeyedRows(Protocol):
    """Rows per key of several sides that meet by key: the state of joins and of gathered rows.

    Slots of keys and numbers of rows hold until :meth:`compact_if_due` or :meth:`take_all`.
    """

    @property
    def sides(self) -> Sequence[KeyedRowBuffer]: ...

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        """The slot of each row's key; what the state has for these keys is at hand from here on."""

    def take_all(self) -> Iterator[pa.RecordBatch]:
        """The rows of all sides, one side after the other, in order, in parts that split no key. Nothing is left."""

    def compact_if_due(self) -> None:
        """Removes what has been forgotten when it is worth it: constant work per row. Call it behind each batch."""
