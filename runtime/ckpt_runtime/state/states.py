"""The interfaces that operators use: keyed states by kind, and the parameters with which they request one.

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
    """How long entries live after their last update, and the clock (ms since epoch) that measures it."""

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
    """One side of :class:`KeyedRows`: its state's name, its columns, its key columns, and when its rows are removed.

    ``event_time`` is the timestamp column by which rows expire (rows with null in it must not be added), or None.
    ``keeps_matched`` is false when a row is removed at its first match.
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
    """The part that all kinds of state of user code have in common."""

    name: str

    def clear(self, key: Key) -> None:
        """Removes everything under ``key``."""


class KeyedValues(KeyedState, Protocol):
    """One tuple per key. Expired values are never returned; the same holds for lists and maps."""

    value_schema: pa.Schema

    # Attributes and not methods: user code calls them for every row, and a backend binds the fastest function once.
    get: Callable[[Key], Value | None]
    put: Callable[[Key, Value], None]


class KeyedLists(KeyedState, Protocol):
    """A list of tuples per key; an empty list counts as absent. Each element expires on its own."""

    value_schema: pa.Schema

    def get(self, key: Key) -> list[Value]:
        """The live elements, all in memory; do not change the list."""

    def elements(self, key: Key) -> Iterator[Value]:
        """The live elements as of this call, unaffected by later changes; only some of them are in memory at a time."""

    def exists(self, key: Key) -> bool:
        """Whether there are any."""

    def put(self, key: Key, elements: list[Value]) -> None:
        """Replaces the list."""

    def append(self, key: Key, elements: list[Value]) -> None:
        """Adds elements at the end."""


class KeyedMaps(KeyedState, Protocol):
    """A map from tuple to tuple per key; an empty map counts as absent. A small map is in order of first insertion;
    the order of any map is the same at each iteration."""

    user_key_schema: pa.Schema
    value_schema: pa.Schema

    def get(self, key: Key) -> Map:
        """The live entries, all in memory; do not change the dict."""

    def items(self, key: Key) -> Iterator[tuple[Value, Value]]:
        """The live entries as of this call, unaffected by later changes; only some of them are in memory at a time."""

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
        """Adds a timer; registering the same one twice adds it once."""

    def delete(self, key: Key, time: int) -> None:
        """Removes a timer if it is there."""

    def times_of(self, key: Key) -> tuple[int, ...]:
        """The timers of a key, ascending."""

    def next_time(self) -> int | None:
        """The earliest timer of all."""

    def due(self, until: int) -> list[tuple[int, Key]]:
        """Timers at or before ``until``, ascending. They stay listed until deleted but are not returned again."""


class KeyedAggregates(Protocol):
    """Running aggregates: one row per key."""

    @property
    def nbytes(self) -> int:
        """The size of what is in memory."""

    def update(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Adds all rows; returns for each aggregate its value after each row.

        Raises :class:`~ckpt_runtime.state.errors.AggregateOverflowError`; the state is then unusable.
        """


class KeyedRowBuffer(Protocol):
    """The rows of one side of :class:`KeyedRows`, in order of arrival."""

    spec: RowBufferSpec

    def __len__(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """The size of the rows in memory."""

    def append(self, batch: pa.RecordBatch, slots: AnyArray, matched: AnyArray) -> None:
        """Adds rows after the existing rows of their keys; ``matched`` says (0 or 1) which have already found a match.

        Raises :class:`~ckpt_runtime.state.errors.StateError` when there are too many.
        """

    def matches(
        self, slots: AnyArray, times: AnyArray, lower: int, upper: int, found: AnyArray
    ) -> Iterator[tuple[AnyArray, AnyArray]]:
        """Pairs (probing position, row), some thousands at a time.

        Ordered by position, then by arrival of the row. ``times`` are those of the probing rows, in this side's unit; a
        row matches when its time minus the probe's is between ``lower`` and ``upper``. Without times every row of the
        key matches. Sets ``found`` (uint8) to 1 where there was a match. The caller must take all pairs before it adds
        rows.
        """

    def consume(self, slots: AnyArray) -> AnyArray:
        """Removes the row of each slot, for sides that keep at most one row per key; returns its number, or -1.

        No slot may come twice.
        """

    def candidates(
        self, slots: AnyArray, times: AnyArray, lower: int, upper: int
    ) -> Iterator[tuple[AnyArray, AnyArray]]:
        """Like :meth:`matches`, but changes nothing: the caller accepts those for which a further condition holds."""

    def accept(self, rows: AnyArray) -> AnyArray:
        """Records a match of candidates, and removes them if matched rows are not kept. Returns the rows that lived."""

    def mark_found(self, slots: AnyArray, times: AnyArray, lower: int, upper: int, found: AnyArray) -> None:
        """Like :meth:`matches`, but only sets ``found``."""

    def expired(self, bound: int) -> Iterator[AnyArray]:
        """Removes rows whose event time is at most ``bound`` (own unit); yields the numbers of those without a match.

        The numbers come in several arrays. An array, and all slots, are valid until the next array is asked for.
        """

    def stored(self) -> Iterator[pa.RecordBatch]:
        """All rows, without removing them. The caller must take all parts before it adds or removes rows."""

    def take(self, rows: AnyArray, wanted: Sequence[int]) -> list[pa.Array]:
        """The columns at the positions ``wanted`` of the rows with these numbers."""


class KeyedRows(Protocol):
    """Rows per key of several sides that are joined by key: the state of joins and of gathered rows.

    Slots of keys and numbers of rows are valid until :meth:`compact_if_due` or :meth:`take_all`.
    """

    @property
    def sides(self) -> Sequence[KeyedRowBuffer]: ...

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        """The slot of each row's key; from this call on, the rows of these keys are in memory."""

    def take_all(self) -> Iterator[pa.RecordBatch]:
        """Removes and returns all rows, one side after the other and in order, in parts that split no key."""

    def compact_if_due(self) -> None:
        """Frees the memory of removed rows when it is worth it: constant work per row. Call it after each batch."""


class KeyedColumns(Protocol):
    """At most one row per key, read and replaced for many keys in one call, as columns.

    Slots of keys are valid until :meth:`compact_if_due`. The slots of a call are distinct.
    """

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        """The slot of each row's key."""

    def take(self, slots: AnyArray) -> list[pa.Array]:
        """The columns behind the key's, in the order of the slots; null for keys without a row. :meth:`put` follows."""

    def put(
        self, keys: list[pa.Array], slots: AnyArray, columns: list[pa.Array] | None, living: AnyArray | None = None
    ) -> None:
        """Replaces the rows of slots that were taken last or have none; with None, leaves those that were taken.

        ``living`` (bool) says which keys have a row from now on; all, if it is None.
        """

    def expired(self, bound: int) -> Iterator[list[pa.Array]]:
        """Removes rows whose event time is at most ``bound``; yields their columns, those of the key first.

        The caller takes all of them before it reads or replaces rows.
        """

    def compact_if_due(self) -> None:
        """Frees the memory of removed rows when it is worth it: constant work per row. Call it after each batch."""
