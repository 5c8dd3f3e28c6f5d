"""Columnar state for built-in aggregates: one slot per key, one accumulator per aggregate.

The owner updates it a batch at a time. A snapshot freezes the columns in constant time and
shares the append-only keys. Keys are never evicted.

Until frozen columns are copied, the owner announces which slots it will change, and their old values are kept: once per
slot, so the cost of a batch depends on its rows and not on the number of slots.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import stored_rows
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, plain
from ckpt_runtime.state.errors import schema_mismatch
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.kernels.aggregate_kernels import first_touches, gather
from ckpt_runtime.state.kernels.hash_kernels import scatter
from ckpt_runtime.state.memory.accumulators import Accumulator, accumulator_for
from ckpt_runtime.state.memory.changes import Changed, SealedChanges, SlotNotes
from ckpt_runtime.state.memory.key_index import FrozenKeys, key_index
from ckpt_runtime.state.memory.parts import PartWriter
from ckpt_runtime.state.states import AggregateColumn
from ckpt_runtime.state.stored_rows import StateWriter


class FrozenColumns:
    """The first ``size`` slots. One thread owns the columns, another one copies or releases them."""

    def __init__(self, size: int, columns: Sequence[AnyArray]) -> None:
        self._size = size
        self._columns = [_bits(column) for column in columns]
        self._types = [column.dtype for column in columns]
        self._touched: AnyArray = np.zeros((size + 7) // 8, dtype=np.uint8)
        # Uses memory only as far as it is written: the system allocates pages when they are touched.
        self._slots: AnyArray = np.empty(size, dtype=np.uint32)
        self._kept: list[AnyArray] = [np.empty(size, dtype=column.dtype) for column in self._columns]
        self._known = 0
        self._lock = threading.Lock()
        self.open = True
        """Whether the owner has to announce its changes with :meth:`keep`."""

    def keep(self, slots: AnyArray) -> None:
        """Keeps the values of these slots, which the owner is about to change."""
        before = self._known
        known = int(first_touches(slots, self._size, self._touched, self._slots, before))
        places = read_only(self._slots[before:known])
        for column, kept in zip(self._columns, self._kept, strict=True):
            gather(read_only(column), places, kept[before:known])
        # Published before the slots change: a thread that copied a changed value finds the kept one under this lock.
        with self._lock:
            self._known = known

    def take(self, slots: AnyArray | None = None) -> list[AnyArray]:
        """Copies of the columns as they were when frozen, or of some ascending slots of them. To be called once."""
        copies = [column[: self._size].copy() if slots is None else column[slots] for column in self._columns]
        with self._lock:
            self.open = False
            known = self._known
        places, wanted = self._slots[:known], slice(None)
        if slots is not None and known:
            found = np.minimum(np.searchsorted(slots, places), len(slots) - 1).astype(np.uint32)
            wanted = slots[found] == places
            places = found[wanted]
        for copy, kept in zip(copies, self._kept, strict=True):
            scatter(read_only(kept[:known][wanted]), read_only(places), copy)
        return [copy.view(kind) for copy, kind in zip(copies, self._types, strict=True)]

    def release(self) -> None:
        """Ends the freeze without a copy."""
        self.open = False


def _bits(column: AnyArray) -> AnyArray:
    return column.view(np.uint64 if column.itemsize == 8 else np.uint8)


class AggregateTable:
    """Running aggregates per key."""

    def __init__(self, uid: str, name: str, key_schema: pa.Schema, aggregates: Sequence[AggregateColumn]) -> None:
        self.uid = uid
        self.name = name
        self.key_schema = key_schema
        self.aggregates = tuple(aggregates)
        self._index = key_index(key_schema)
        self._accumulators = [accumulator_for(column) for column in self.aggregates]
        self._frozen: list[FrozenColumns] = []
        self._notes = SlotNotes()

    def __len__(self) -> int:
        return self._index.size

    def update(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """Adds all rows; returns for each aggregate its value after each row.

        Raises :class:`~ckpt_runtime.state.errors.AggregateOverflowError`; the table is then unusable.
        """
        return self.add(self.slots_of([batch.column(name) for name in self.key_schema.names]), batch)

    def add(self, slots: AnyArray, batch: pa.RecordBatch) -> list[pa.Array]:
        """The same for rows whose slots are known."""
        self._keep(slots)
        return [
            accumulator.update(slots, None if column.column is None else batch.column(column.column))
            for column, accumulator in zip(self.aggregates, self._accumulators, strict=True)
        ]

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        """The slot of each row's key; new keys get the next ones."""
        before = self._index.size
        slots = self._index.slots_of(keys)
        size = self._index.size
        if size != before:
            for accumulator in self._accumulators:
                accumulator.make_room(size, before)
        return read_only(slots)

    def find(self, keys: list[pa.Array]) -> AnyArray:
        """The slot of each row's key as int64, -1 for an unknown key."""
        return self._index.find(keys)

    def hashes(self) -> AnyArray:
        """The stable hash of each slot's key."""
        return self._index.freeze().hashes()

    def hashes_of(self, keys: list[pa.Array]) -> AnyArray:
        """The stable hash of each row's key."""
        return hash_arrays(keys, self.key_schema.names)

    def _keep(self, slots: AnyArray) -> None:
        """Notes the slots, which are about to change, and lets frozen columns keep their values."""
        self._notes.mark(slots, self._index.size)
        if self._frozen:
            self._frozen = [frozen for frozen in self._frozen if frozen.open]
            for frozen in self._frozen:
                frozen.keep(slots)

    def freeze(self) -> FrozenAggregateTable:
        """The synchronous part of a snapshot."""
        parts = [_FrozenPart(accumulator) for accumulator in self._accumulators]
        frozen = FrozenColumns(self._index.size, [column for part in parts for column in part.columns.values()])
        self._frozen.append(frozen)
        return FrozenAggregateTable(self, self._index.freeze(), parts, frozen)

    def begin_changes(self) -> None:
        """Counts the present content as unchanged, and notes changes from now on."""
        self._notes.begin(self._index.size)

    def seal(self) -> SealedChanges | None:
        """The changes since the last seal."""
        return self._notes.seal(self._index.size)

    def keys_of(self, slots: AnyArray) -> list[pa.Array]:
        """The key columns of some slots."""
        return self._index.freeze().arrays(slots)

    def rows(self, slots: AnyArray) -> pa.RecordBatch:
        """Stored rows of some slots, as of this call."""
        arrays = self.keys_of(slots)
        for accumulator in self._accumulators:
            columns = {name: column[slots] for name, column in accumulator.columns.items()}
            arrays += accumulator.to_arrow(accumulator.shared() | columns)
        return pa.RecordBatch.from_arrays(arrays, schema=self.stored_schema())

    def descriptor(self) -> dict[str, Any]:
        """Descriptor of the stored state."""
        aggregates = [
            {**column.describe(), "stored": [field.name for field in accumulator.stored]}
            for column, accumulator in zip(self.aggregates, self._accumulators, strict=True)
        ]
        return stored_rows.descriptor_of("aggregate", self.key_schema, self.stored_schema(), aggregates=aggregates)

    def stored_schema(self) -> pa.Schema:
        """Schema of stored batches."""
        decoded = pa.schema([pa.field(f.name, plain(pa.nulls(0, f.type)).type) for f in self.key_schema])
        fields = stored_rows.prefixed(decoded, stored_rows.KEY_PREFIX)
        return pa.schema(fields + [field for accumulator in self._accumulators for field in accumulator.stored])

    def load(self, descriptor: dict[str, Any], batch: pa.RecordBatch) -> None:
        """Adds restored rows, leaving aggregates that the snapshot does not have at their neutral values."""
        keys = stored_rows.without_prefix(self.stored_schema(), stored_rows.KEY_PREFIX).names
        slots = self.slots_of([batch.column(stored_rows.KEY_PREFIX + name) for name in keys])
        stored = {entry["alias"]: entry["stored"] for entry in descriptor["aggregates"]}
        for column, accumulator in zip(self.aggregates, self._accumulators, strict=True):
            if column.alias in stored:
                accumulator.load(slots, [batch.column(name) for name in stored[column.alias]])
            else:
                accumulator.load_nothing()

    def load_nothing(self) -> None:
        """Called when the latest keys have no values yet; they may stay without."""
        for accumulator in self._accumulators:
            accumulator.load_nothing()

    def check_compatible(self, descriptor: dict[str, Any]) -> None:
        """Raises StateSchemaError when the key or an aggregate of the same alias differs in the snapshot."""
        stored = {entry["alias"]: entry for entry in descriptor["aggregates"]}
        for column in self.aggregates:
            entry = stored.get(column.alias)
            wanted = column.describe()
            if entry is not None and any(entry.get(key) != value for key, value in wanted.items()):
                reason = f"aggregate {column.alias!r} changed its meaning"
                kept = {key: entry.get(key) for key in wanted}
                raise schema_mismatch(self.uid, self.name, reason, kept, wanted)
        schemas = stored_rows.schema_from_json(descriptor.get("schema")), self.stored_schema()
        before, asked = (stored_rows.without_prefix(schema, stored_rows.KEY_PREFIX) for schema in schemas)
        if before.names != asked.names or before.types != asked.types:
            raise schema_mismatch(self.uid, self.name, "the key changed", before, asked)

    def is_like(self, other: AggregateTable) -> bool:
        """Whether both have the same key and aggregates."""
        return self.aggregates == other.aggregates and self.key_schema.equals(other.key_schema)


def evolved_rows(descriptor: dict[str, Any], rows: pa.RecordBatch) -> pa.RecordBatch:
    """Converts stored rows of an earlier descriptor of the same state: missing aggregates get their neutral values.

    The state need not be in use, and no memory is needed beyond the batch's.
    """
    zeros: dict[str, int] = {}
    for entry in descriptor["aggregates"]:
        if entry["function"] in ("count", "avg"):  # all other aggregates of nothing are null
            zeros |= dict.fromkeys(entry["stored"], 0)
    schema = stored_rows.schema_from_json(descriptor.get("schema"))
    arrays = [
        rows.column(field.name) if field.name in rows.schema.names else _neutral(field, zeros, rows.num_rows)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _neutral(field: pa.Field, zeros: dict[str, int], rows: int) -> pa.Array:
    if field.name in zeros:
        return pa.repeat(pa.scalar(zeros[field.name], field.type), rows)
    return pa.nulls(rows, field.type)


class _FrozenPart:
    """The columns of one aggregate at the moment of freezing, by name."""

    def __init__(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator
        self._shared = accumulator.shared()
        self.columns = accumulator.columns

    def to_arrow(self, taken: Iterator[AnyArray]) -> list[pa.Array]:
        """The stored arrays, made from copies of its columns."""
        return self._accumulator.to_arrow(self._shared | {name: next(taken) for name in self.columns})


class FrozenAggregateTable:
    """A table as of one moment."""

    def __init__(
        self, table: AggregateTable, keys: FrozenKeys, parts: Sequence[_FrozenPart], columns: FrozenColumns
    ) -> None:
        self._table = table
        self._keys = keys
        self._parts = parts
        self._columns = columns

    def rows(self, slots: AnyArray | None = None) -> pa.Table:
        """Stored rows of all slots, or of some ascending ones. To be called once."""
        taken = iter(self._columns.take(slots))
        arrays = [*self._keys.arrays(slots), *(array for part in self._parts for array in part.to_arrow(taken))]
        return pa.Table.from_arrays(arrays, schema=self._table.stored_schema())

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None:
        """The asynchronous part: sorts by key group and writes."""
        groups = key_groups_of(np.ascontiguousarray(self._keys.hashes()), max_parallelism)
        writer.write_table(self._table.name, self._table.descriptor(), self.rows(), groups, owned)

    def write_part(
        self, writer: PartWriter, changed: Changed | None, owned: KeyGroupRange, max_parallelism: int
    ) -> None:
        """Writes the changed slots, or all; keys are never removed."""
        if changed is None:
            self.write(writer, owned, max_parallelism)
        elif len(changed):
            assert isinstance(changed, np.ndarray)
            writer.write_rows(self._table.name, self.rows(changed), owned, max_parallelism)

    def release(self) -> None:
        """Releases the frozen columns, so that the table no longer keeps old values for them."""
        self._columns.release()
