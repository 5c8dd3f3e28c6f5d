"""The common part of value, list and map state: entries by key in a freezable dict, time to live, column conversion.

Keys are tuples of Python values, one per key column, made canonical by the caller (``values.canonical_key``). With a
time to live, every stored tuple ends with the time at which it expires (ms since epoch); expired entries are never
returned, and removed step by step in :meth:`MemoryState.maintain`. One thread owns a state; another thread may use
frozen ones.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import stored_rows, values
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.memory.layered_dict import CHUNK, FrozenView, LayeredDict
from ckpt_runtime.state.states import Key, TimeToLive, Value
from ckpt_runtime.state.stored_rows import EXPIRES_AT, KEY_PREFIX, VALUE_PREFIX, StateWriter

StoredRow: TypeAlias = tuple[Key, ...]


class Entries(Protocol):
    """The entries of a state by key. Values are never None."""

    def get(self, key: Key) -> Any:
        """The value, or None."""

    def put(self, key: Key, value: Any) -> None:
        """Sets the value."""

    def remove(self, key: Key) -> None:
        """Removes the entry if there is one."""

    def writable(self, key: Key, copy: Callable[[Any], Any]) -> Any:
        """The value, to be changed in place; copied first when a snapshot still shows it."""

    def freeze(self) -> Any:
        """The view of the entries for a snapshot."""

    def maintain(self, budget: int) -> object:
        """Housekeeping of up to ``budget`` steps."""


class MemoryState(ABC):
    """Base of the kinds of state; ``kind`` is their name in descriptors."""

    kind: str
    make_entries: ClassVar[Callable[[], Entries]] = LayeredDict

    def __init__(
        self, uid: str, name: str, key_schema: pa.Schema, value_schema: pa.Schema, ttl: TimeToLive | None = None
    ) -> None:
        self.uid = uid
        self.name = name
        self.key_schema = key_schema
        self.value_schema = value_schema
        self.ttl = ttl
        self._entries = type(self).make_entries()
        self._checks: list[tuple[int, int, Key]] = []
        self._watched: set[Key] = set()
        self._sequence = 0
        self._stored_schema: pa.Schema | None = None
        self._descriptor: dict[str, Any] | None = None

    def parts(self) -> list[tuple[str, pa.Schema]]:
        """Prefix and schema of each part of a stored row: the key first, the value last."""
        return [(KEY_PREFIX, self.key_schema), (VALUE_PREFIX, self.value_schema)]

    def stored_schema(self) -> pa.Schema:
        """Schema of stored batches."""
        if self._stored_schema is None:
            fields = [field for prefix, schema in self.parts() for field in stored_rows.prefixed(schema, prefix)]
            if self.ttl is not None:
                fields.append(pa.field(EXPIRES_AT, pa.int64()))
            self._stored_schema = pa.schema(fields)
        return self._stored_schema

    def descriptor(self) -> dict[str, Any]:
        """Descriptor of the stored state; made once, since each snapshot asks for it while no row is processed."""
        if self._descriptor is None:
            self._descriptor = stored_rows.descriptor_of(self.kind, self.key_schema, self.stored_schema())
        return self._descriptor

    def clear(self, key: Key) -> None:
        """Removes everything under ``key``."""
        self._entries.remove(key)

    def freeze(self) -> FrozenState:
        """The synchronous part of a snapshot, in constant time."""
        return FrozenState(self, self._entries.freeze())

    def maintain(self, budget: int) -> None:
        """Does up to ``budget`` steps of merging after snapshots and of removing expired entries."""
        self._entries.maintain(budget)
        if self.ttl is None:
            return
        now = self.ttl.now_ms()
        while self._checks and self._checks[0][0] <= now and budget > 0:
            _, _, key = heapq.heappop(self._checks)
            self._watched.discard(key)
            expires_at = self.expire(key, now)
            if expires_at is not None:
                self.watch(key, expires_at)
            budget -= 1

    def watch(self, key: Key, expires_at: int) -> None:
        """Schedules a check of ``key`` for the time when a value under it may have expired."""
        if key not in self._watched:
            self._watched.add(key)
            self._sequence += 1
            heapq.heappush(self._checks, (expires_at, self._sequence, key))

    def stamped(self, key: Key, value: Value) -> Value:
        """The stored form of a value that is written now."""
        if self.ttl is None:
            return value
        expires_at = self.ttl.now_ms() + self.ttl.duration_ms
        self.watch(key, expires_at)
        return (*value, expires_at)

    @abstractmethod
    def rows(self, chunk: list[tuple[Key, Any]]) -> Iterable[StoredRow]:
        """The stored rows of some entries: a tuple of one tuple per part."""

    @abstractmethod
    def expire(self, key: Key, now: int) -> int | None:
        """Removes expired values under ``key``; returns the rest's earliest expiry time, or None if nothing is left."""

    @abstractmethod
    def load(self, rows: Iterable[StoredRow]) -> None:
        """Adds restored rows, with expiry times if there is a time to live."""


class FrozenState:
    """A state as of one moment."""

    def __init__(self, state: MemoryState, view: FrozenView[Key, Any]) -> None:
        self._state = state
        self._view = view
        self._descriptor = state.descriptor()
        self._schema = state.stored_schema()

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None:
        """The asynchronous part: converts to columns in chunks, sorts by key group, writes."""
        batches = [
            rows_to_batch(rows, self._schema)
            for chunk in self._view.chunks()
            for rows in _pieces(list(self._state.rows(chunk)))
        ]
        write_batches(writer, self._state.name, self._descriptor, self._schema, batches, owned, max_parallelism)

    def release(self) -> None:
        """Releases the view, so that the owner can merge again."""
        self._view.release()


def _pieces(rows: list[StoredRow]) -> Iterator[list[StoredRow]]:
    for start in range(0, len(rows), CHUNK):
        yield rows[start : start + CHUNK]


def rows_to_batch(rows: list[StoredRow], schema: pa.Schema) -> pa.RecordBatch:
    """Columns of some stored rows, of which there must be at least one."""
    arrays: list[pa.Array] = []
    for part in zip(*rows, strict=True):
        for column in zip(*part, strict=True):
            arrays.append(values.to_arrow(column, schema.field(len(arrays)).type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def write_batches(
    writer: StateWriter,
    name: str,
    descriptor: dict[str, Any],
    schema: pa.Schema,
    batches: list[pa.RecordBatch],
    owned: KeyGroupRange,
    max_parallelism: int,
) -> None:
    """Writes a section from batches of ``schema`` in any key order."""
    keys = [field.name for field in schema if field.name.startswith(KEY_PREFIX)]
    groups = [
        key_groups_of(hash_arrays([batch.column(key) for key in keys], keys), max_parallelism) for batch in batches
    ]
    table = pa.Table.from_batches(batches, schema=schema)
    merged = np.concatenate(groups) if groups else np.empty(0, dtype=np.int32)
    writer.write_table(name, descriptor, table, merged, owned)
