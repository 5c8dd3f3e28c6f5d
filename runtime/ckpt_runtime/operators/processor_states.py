"""The state variables that a hosted StatefulProcessor gets: PySpark's ``ValueState``, ``ListState`` and ``MapState`` on
our keyed state.

All of them work on the key in :class:`KeyCursor`, which the host sets around each call of user code. User code may
modify the values that it reads: containers are copied. An iterator reads the state when its first element is taken, as
in Spark. A value that does not fit raises PySpark's errors and changes nothing. Base-class constructors are not called,
as they need a socket to a JVM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

from pyspark.sql.streaming.stateful_processor import ListState, MapState, ValueState
from pyspark.sql.types import Row

from ckpt_runtime.operators.errors import ProcessorTypeError, ProcessorUsageError, ProcessorValueError
from ckpt_runtime.operators.rows import row_class
from ckpt_runtime.state.errors import StateError, StateValueTypeError
from ckpt_runtime.state.states import Key, KeyedLists, KeyedMaps, KeyedValues, Value
from ckpt_runtime.state.values import row_coercer, row_copier, user_key_maker, user_key_reader


class KeyCursor:
    """The key that user code is being called for; None outside of such a call."""

    __slots__ = ("key",)

    def __init__(self) -> None:
        self.key: Key | None = None

    def require(self) -> Key:
        """Returns the key; raises an error if state is used outside of a call that has a key."""
        if self.key is None:
            raise ProcessorUsageError("state and timers can only be used in handleInputRows and handleExpiredTimer")
        return self.key


class HostedState:
    """A state variable. It is unusable once ``deleteIfExists`` has deleted it.

    ``unusable`` are the beginnings of PySpark's messages then, by the names of the methods.
    """

    unusable: ClassVar[Mapping[str, str]]
    _cursor: KeyCursor
    _table: Any

    @property
    def name(self) -> str:
        return str(self._table.name)

    def delete(self) -> None:
        """Deletes the state variable: every later use is an error, but iterators have no elements, as in Spark."""
        for method, message in self.unusable.items():
            setattr(self, method, partial(_fail, f"{message}: state {self.name!r} is not initialized: deleteIfExists"))
        for method in {"get", "keys", "values", "iterator"} - self.unusable.keys():
            setattr(self, method, lambda: iter(()))


def _fail(message: str, *_arguments: Any, **_named: Any) -> None:
    raise ProcessorUsageError(f"{message} has removed it")


def _refused(error: StateError) -> ProcessorTypeError | ProcessorValueError:
    """Converts a state error to PySpark's error."""
    return (ProcessorTypeError if isinstance(error, StateValueTypeError) else ProcessorValueError)(str(error))


def _checked(coerce: Callable[[Any], Value]) -> Callable[[Any], Value]:
    def checked(value: Any) -> Value:
        try:
            return coerce(value)
        except StateError as error:
            raise _refused(error) from None

    return checked


class HostedValueState(HostedState, ValueState):
    """One tuple per key. Its methods are the hot path of user code, so the functions that they call are bound once."""

    unusable: ClassVar = {
        "exists": "Error checking value state exists",
        "get": "Error getting value state",
        "update": "Error updating value state",
        "clear": "Error clearing value state",
    }

    def __init__(self, cursor: KeyCursor, table: KeyedValues) -> None:
        self._cursor = cursor
        self._coerce = row_coercer(table.name, table.value_schema)
        self._copy = row_copier(table.value_schema)
        self._table = table
        self._read: Callable[[Key], Value | None] = table.get
        self._write: Callable[[Key, Value], None] = table.put

    def exists(self) -> bool:
        return self._read(self._cursor.key or self._cursor.require()) is not None

    def get(self) -> Value | None:
        value = self._read(self._cursor.key or self._cursor.require())
        return value if value is None or self._copy is None else self._copy(value)

    def update(self, newValue: Value) -> None:
        try:
            value = self._coerce(newValue)
        except StateError as error:
            raise _refused(error) from None
        self._write(self._cursor.key or self._cursor.require(), value)

    def clear(self) -> None:
        self._table.clear(self._cursor.require())


class HostedListState(HostedState, ListState):
    """A list of tuples per key."""

    unusable: ClassVar = {
        "exists": "Error checking value state exists",
        **dict.fromkeys(("put", "appendValue", "appendList"), "Error updating value state"),
        "clear": "Error clearing value state",
    }

    def __init__(self, cursor: KeyCursor, table: KeyedLists) -> None:
        self._cursor = cursor
        self._table = table
        self._coerce = _checked(row_coercer(table.name, table.value_schema))
        self._copy = row_copier(table.value_schema)

    def exists(self) -> bool:
        return bool(self._table.exists(self._cursor.require()))

    def get(self) -> Iterator[Value]:
        return self._elements_of(self._cursor.require())

    def _elements_of(self, key: Key) -> Iterator[Value]:
        elements: Iterator[Value] = self._table.elements(key)
        yield from elements if self._copy is None else map(self._copy, elements)

    def put(self, newState: list[Value]) -> None:
        self._table.put(self._cursor.require(), self._elements(newState))

    def appendValue(self, newState: Value) -> None:
        self._table.append(self._cursor.require(), [self._coerce(newState)])

    def appendList(self, newState: list[Value]) -> None:
        self._table.append(self._cursor.require(), self._elements(newState))

    def clear(self) -> None:
        self._table.clear(self._cursor.require())

    def _elements(self, elements: Any) -> list[Value]:
        if hasattr(elements, "__fields__") or not hasattr(elements, "__iter__"):
            raise ProcessorTypeError(
                f"state {self.name!r}: {elements!r} is a {type(elements).__name__}, allowed is a list of tuples"
            )
        coerced = [self._coerce(element) for element in elements]
        if not coerced:
            raise ProcessorValueError(f"state {self.name!r}: an empty list cannot be stored, use clear()")
        return coerced


class HostedMapState(HostedState, MapState):
    """A map from tuple to tuple per key. Iteration sees the map as it was at the first entry."""

    unusable: ClassVar = {
        "exists": "Error checking map state exists",
        "getValue": "Error getting value",
        "containsKey": "Error checking if map state contains key",
        "updateValue": "Error updating map state value",
        "removeKey": "Error removing key from map state",
        "clear": "Error clearing map state",
    }

    def __init__(self, cursor: KeyCursor, table: KeyedMaps) -> None:
        self._cursor = cursor
        self._table = table
        self._coerce_key = _checked(row_coercer(table.name, table.user_key_schema))
        self._coerce = _checked(row_coercer(table.name, table.value_schema))
        self._make_key = user_key_maker(table.user_key_schema)
        self._copy_key = user_key_reader(table.user_key_schema)
        self._copy = row_copier(table.value_schema) or _unchanged
        self._new_row: Callable[[Value], Row] = partial(tuple.__new__, row_class(tuple(table.value_schema.names)))

    def exists(self) -> bool:
        return bool(self._table.exists(self._cursor.require()))

    def getValue(self, key: Value) -> Row | None:
        value = self._table.get_value(self._cursor.require(), self._user_key(key))
        return None if value is None else self._new_row(self._copy(value))

    def containsKey(self, key: Value) -> bool:
        return self._table.get_value(self._cursor.require(), self._user_key(key)) is not None

    def updateValue(self, key: Value, value: Value) -> None:
        self._table.put(self._cursor.require(), self._user_key(key), self._coerce(value))

    def iterator(self) -> Iterator[tuple[Value, Value]]:
        return ((self._copy_key(key), self._copy(value)) for key, value in self._entries())

    def keys(self) -> Iterator[Value]:
        return (self._copy_key(key) for key, _ in self._entries())

    def values(self) -> Iterator[Value]:
        return (self._copy(value) for _, value in self._entries())

    def _entries(self) -> Iterator[tuple[Value, Value]]:
        return self._entries_of(self._cursor.require())

    def _entries_of(self, key: Key) -> Iterator[tuple[Value, Value]]:
        yield from self._table.items(key)

    def removeKey(self, key: Value) -> None:
        self._table.remove(self._cursor.require(), self._user_key(key))

    def clear(self) -> None:
        self._table.clear(self._cursor.require())

    def _user_key(self, key: Value) -> Value:
        return self._make_key(self._coerce_key(key))


def _unchanged(value: Value) -> Value:
    return value
