"""The common part of value, list and map state: entries by key in a freezable dict, time to live, column conversion.

Keys are tuples of Python values, one per key column, made canonical by the caller (``values.canonical_key``). With a
time to live, every stored tuple ends with the time at which it expires (ms since epoch); expired entries are never
returned, and removed step by step in :meth:`MemoryState.maintain`. One thread owns a state; another thread may use
frozen ones.

:class:`LayeredDict` is a dict that can be frozen in constant time: frozen layers below, one writable layer on top.
Reads look from the top down; a deletion in an upper layer is a tombstone. Once no frozen view is in use, upper layers
are merged back into the lowest one a few entries at a time.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Generic, Protocol, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import stored_rows, values
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.memory.changes import Changed, SealedChanges
from ckpt_runtime.state.memory.parts import PartWriter
from ckpt_runtime.state.states import Key, TimeToLive, Value
from ckpt_runtime.state.stored_rows import EXPIRES_AT, KEY_PREFIX, VALUE_PREFIX, StateWriter

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

CHUNK = 10_000
# A read may have to look at each of them.
_MAX_LAYERS = 4
_TOMBSTONE: Any = object()


class FrozenView(Generic[K, V]):
    """The entries as of one moment. ``release`` may be called from any thread."""

    def __init__(self, layers: tuple[dict[K, V], ...]) -> None:
        self._layers = layers
        self.released = False

    def chunks(self, size: int = CHUNK) -> Iterator[list[tuple[K, V]]]:
        """All entries, up to ``size`` at a time, so that the interpreter lock is released in between."""
        for position in range(len(self._layers)):
            entries = iter(self._layers[position].items())
            above = self._layers[position + 1 :]
            while chunk := list(islice(entries, size)):
                if len(self._layers) > 1:
                    chunk = [
                        (key, value)
                        for key, value in chunk
                        if value is not _TOMBSTONE and not any(key in layer for layer in above)
                    ]
                if chunk:
                    yield chunk

    def get(self, key: K) -> V | None:
        for layer in reversed(self._layers):
            value = layer.get(key)
            if value is not None:
                return None if value is _TOMBSTONE else value
        return None

    def release(self) -> None:
        """Releases the layers, which the owner may change again."""
        self._layers = ()
        self.released = True


class LayeredDict(Generic[K, V]):
    """See the module docstring."""

    def __init__(self) -> None:
        self._layers: list[dict[K, V]] = [{}]
        self._views: list[FrozenView[K, V]] = []
        self.changed: set[K] | None = None
        """Keys that were written or removed since the last seal; None before the first one."""

    def get(self, key: K) -> V | None:
        layers = self._layers
        if len(layers) == 1:
            return layers[0].get(key)
        for layer in reversed(layers):
            value = layer.get(key)
            if value is not None:
                return None if value is _TOMBSTONE else value
        return None

    def put(self, key: K, value: V) -> None:
        if self.changed is not None:
            self.changed.add(key)
        layers = self._layers
        if len(layers) == 1:
            layers[0][key] = value
        elif self._views:
            layers[-1][key] = value
        else:
            # No view shows the layers: write to the bottom layer, and remove entries above that would hide it.
            for layer in layers[1:]:
                layer.pop(key, None)
            layers[0][key] = value

    def remove(self, key: K) -> None:
        if self.changed is not None:
            self.changed.add(key)
        if self._views:
            if self.get(key) is not None:
                self._layers[-1][key] = _TOMBSTONE
            return
        for layer in self._layers:
            layer.pop(key, None)

    def writable(self, key: K, copy: Callable[[V], V]) -> V | None:
        """The value, to be changed in place; copied first when a frozen view still shows it."""
        if self.changed is not None:
            self.changed.add(key)
        layers = self._layers
        if len(layers) == 1 or not self._views:
            return self.get(key)
        value = layers[-1].get(key)
        if value is not None:
            return None if value is _TOMBSTONE else value
        value = self.get(key)
        if value is None:
            return None
        value = copy(value)
        layers[-1][key] = value
        return value

    def freeze(self) -> FrozenView[K, V]:
        """A view of the present entries, in constant time."""
        self._forget_released()
        # Nothing has changed since the last view: do not add a second empty layer.
        if len(self._layers) > 1 and not self._layers[-1]:
            view = FrozenView(tuple(self._layers[:-1]))
        else:
            view = FrozenView(tuple(self._layers))
            if len(self._layers) >= _MAX_LAYERS:
                # Overlapping snapshots do not pile up layers; old layers stay.
                merged: dict[K, V] = {}
                for layer in self._layers[1:]:
                    merged.update(layer)
                self._layers = [self._layers[0], merged]
            self._layers.append({})
        self._views.append(view)
        return view

    def maintain(self, budget: int) -> bool:
        """Merges up to ``budget`` entries back; returns True when there is more to merge."""
        if len(self._layers) == 1:
            return False
        self._forget_released()
        if self._views:
            return False
        base = self._layers[0]
        while len(self._layers) > 1 and budget > 0:
            layer = self._layers[1]
            while layer and budget > 0:
                # The entry is removed as it is moved, so that each is in one layer wherever the budget ends.
                key, value = layer.popitem()
                if value is _TOMBSTONE:
                    base.pop(key, None)
                else:
                    base[key] = value
                budget -= 1
            if not layer:
                del self._layers[1]
        return len(self._layers) > 1

    def _forget_released(self) -> None:
        self._views = [view for view in self._views if not view.released]


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
        self._entries.remove(key)

    def freeze(self) -> FrozenState:
        """The synchronous part of a snapshot, in constant time."""
        return FrozenState(self, self._entries.freeze())

    def begin_changes(self) -> None:
        """Counts the present content as unchanged, and notes changes from now on."""
        assert isinstance(self._entries, LayeredDict)
        self._entries.changed = set()

    def seal(self) -> SealedChanges | None:
        assert isinstance(self._entries, LayeredDict)
        changed = self._entries.changed
        self._entries.changed = set()
        return None if changed is None else partial(frozenset, changed)

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

    @property
    def numbers(self) -> int | None:
        return None

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None:
        """The asynchronous part: converts to columns in chunks, sorts by key group, writes."""
        batches = [
            rows_to_batch(rows, self._schema)
            for chunk in self._view.chunks()
            for rows in _pieces(list(self._state.rows(chunk)))
        ]
        write_batches(writer, self._state.name, self._descriptor, self._schema, batches, owned, max_parallelism)

    def write_part(
        self, writer: PartWriter, changed: Changed | None, owned: KeyGroupRange, max_parallelism: int
    ) -> None:
        """Writes all that there is under the changed keys, or under all."""
        if changed is None:
            self.write(writer, owned, max_parallelism)
            return
        name, keys = self._state.name, iter(changed)
        key_schema = pa.schema(stored_rows.prefixed(self._state.key_schema, KEY_PREFIX))
        while chunk := list(islice(keys, CHUNK)):
            entries = [(key, self._view.get(key)) for key in chunk]
            for rows in _pieces(list(self._state.rows([entry for entry in entries if entry[1] is not None]))):
                table = pa.Table.from_batches([rows_to_batch(rows, self._schema)])
                writer.write_rows(name, table, owned, max_parallelism)
            removed: list[StoredRow] = [(key,) for key, value in entries if value is None]
            if removed:
                batch = rows_to_batch(removed, key_schema)
                writer.write_removed(name, pa.Table.from_batches([batch]), owned, max_parallelism)

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
