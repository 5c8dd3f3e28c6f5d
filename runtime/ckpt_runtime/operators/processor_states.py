"""The state variables that a hosted StatefulProcessor gets: PySpark's ``ValueState``, ``ListState`` and ``MapState`` on
our keyed state.

All of them work on the key in :class:`KeyCursor`, which the host sets around each call of user code. What user code
reads is safe to change: containers are copied. Base-class constructors are not called, as they want a socket to a JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState

from ckpt_runtime.operators.errors import ProcessorUsageError
from ckpt_runtime.state.errors import StateValueError, StateValueTypeError
from ckpt_runtime.state.memory.keyed_states import ListStateTable, MapStateTable, ValueStateTable
from ckpt_runtime.state.values import canonical_key, row_coercer, row_copier

Key = tuple[Any, ...]
Value = tuple[Any, ...]


class KeyCursor:
    """The key that user code is being called for; None outside of such a call."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Key | None = None

    def require(self) -> Key:
        """The key, or an error for a use of state outside of a call that has one."""
        if self.key is None:
            raise ProcessorUsageError("state and timers can only be used in handleInputRows and handleExpiredTimer")
        return self.key


class HostedValueState(ValueState):
    """One tuple per key."""

    def __init__(self, cursor: KeyCursor, table: ValueStateTable) -> None:
        self._cursor = cursor
        self._read: Callable[[Key], Value | None] = table.get
        self._write = table.put
        self._table = table
        self._coerce = row_coercer(table.name, table.value_schema)
        self._copy = row_copier(table.value_schema)

    def exists(self) -> bool:
        return self._read(self._cursor.key or self._cursor.require()) is not None

    def get(self) -> Value | None:
        value = self._read(self._cursor.key or self._cursor.require())
        return value if value is None or self._copy is None else self._copy(value)

    def update(self, newValue: Value) -> None:
        self._write(self._cursor.key or self._cursor.require(), self._coerce(newValue))

    def clear(self) -> None:
        self._table.clear(self._cursor.require())


class HostedListState(ListState):
    """A list of tuples per key."""

    def __init__(self, cursor: KeyCursor, table: ListStateTable) -> None:
        self._cursor = cursor
        self._table = table
        self._coerce = row_coercer(table.name, table.value_schema)
        self._copy = row_copier(table.value_schema)

    def exists(self) -> bool:
        return bool(self._table.get(self._cursor.require()))

    def get(self) -> Iterator[Value]:
        elements = tuple(self._table.get(self._cursor.require()))
        return iter(elements) if self._copy is None else map(self._copy, elements)

    def put(self, newState: list[Value]) -> None:
        self._table.put(self._cursor.require(), self._elements(newState))

    def appendValue(self, newState: Value) -> None:
        self._table.append(self._cursor.require(), [self._coerce(newState)])

    def appendList(self, newState: list[Value]) -> None:
        self._table.append(self._cursor.require(), self._elements(newState))

    def clear(self) -> None:
        self._table.clear(self._cursor.require())

    def _elements(self, elements: Any) -> list[Value]:
        if not isinstance(elements, (list, tuple)) or hasattr(elements, "__fields__"):
            raise StateValueTypeError(
                f"state {self._table.name!r}: {elements!r} is a {type(elements).__name__}, allowed is a list of tuples"
            )
        if not elements:
            raise StateValueError(f"state {self._table.name!r}: an empty list cannot be stored, use clear()")
        return [self._coerce(element) for element in elements]


class HostedMapState(MapState):
    """A map from tuple to tuple per key. Iterates in order of first insertion, over a copy."""

    def __init__(self, cursor: KeyCursor, table: MapStateTable) -> None:
        self._cursor = cursor
        self._table = table
        self._coerce_key = row_coercer(table.name, table.user_key_schema)
        self._coerce = row_coercer(table.name, table.value_schema)
        self._copy = row_copier(table.value_schema)

    def exists(self) -> bool:
        return bool(self._table.get(self._cursor.require()))

    def getValue(self, key: Value) -> Value | None:
        value = self._table.get_value(self._cursor.require(), self._user_key(key))
        return value if value is None or self._copy is None else self._copy(value)

    def containsKey(self, key: Value) -> bool:
        return self._table.get_value(self._cursor.require(), self._user_key(key)) is not None

    def updateValue(self, key: Value, value: Value) -> None:
        self._table.put(self._cursor.require(), self._user_key(key), self._coerce(value))

    def iterator(self) -> Iterator[tuple[Value, Value]]:
        entries = list(self._table.get(self._cursor.require()).items())
        copy = self._copy
        return iter(entries) if copy is None else ((key, copy(value)) for key, value in entries)

    def keys(self) -> Iterator[Value]:
        return iter(list(self._table.get(self._cursor.require())))

    def values(self) -> Iterator[Value]:
        entries = list(self._table.get(self._cursor.require()).values())
        return iter(entries) if self._copy is None else map(self._copy, entries)

    def removeKey(self, key: Value) -> None:
        self._table.remove(self._cursor.require(), self._user_key(key))

    def clear(self) -> None:
        self._table.clear(self._cursor.require())

    def _user_key(self, key: Value) -> Value:
        return canonical_key(self._coerce_key(key))
