"""The in-memory keyed state backend: aggregate tables, Python states and timers of one operator in one subtask.

Snapshots are asynchronous and copy-on-write; several may be in flight. All calls but those on a snapshot come from the
subtask's thread. The backend opens no files: a snapshot writes to the stream that it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import (
    HASHMAP,
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedStateHandle,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties, SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import stored_rows, values
from ckpt_runtime.state.backend import KeyedSnapshot, SnapshotFiles, SnapshotReader
from ckpt_runtime.state.canonical import CanonicalWriter
from ckpt_runtime.state.errors import CorruptStateError, schema_mismatch
from ckpt_runtime.state.memory.aggregate_table import AggregateTable
from ckpt_runtime.state.memory.increments import Freezable, IncrementalSnapshot, Increments, NamedState, opened_parts
from ckpt_runtime.state.memory.keyed_columns import ColumnTable
from ckpt_runtime.state.memory.keyed_state import MemoryState, StoredRow
from ckpt_runtime.state.memory.keyed_states import TableBackend
from ckpt_runtime.state.memory.pages import SectionWriter, UnclaimedState, unclaimed_part_states, unclaimed_states
from ckpt_runtime.state.memory.row_buffer import RowBuffer, RowBuffers, check_ends, rows_descriptor, stored_schema
from ckpt_runtime.state.schema_evolution import check_evolution, evolve
from ckpt_runtime.state.states import AggregateColumn, KeyedColumns, RowBufferSpec
from ckpt_runtime.state.stored_rows import StateWriter

MAINTENANCE_BUDGET = 4_000
_State: TypeAlias = AggregateTable | MemoryState | RowBuffer | ColumnTable


@dataclass
class MemorySnapshot:
    """The asynchronous part of one snapshot."""

    uid: str
    frozen: list[Freezable]
    key_groups: KeyGroupRange
    max_parallelism: int
    canonical: bool

    def write(self, files: SnapshotFiles) -> Sequence[KeyedHandle]:
        """Writes all states into one private file, or in canonical form."""
        if not self.frozen:
            return ()
        if self.canonical:
            canonical = CanonicalWriter(files, self.uid, self.key_groups)
            self._write_to(canonical)
            return canonical.handles
        with files.private() as file:
            writer = SectionWriter(file.stream)
            self._write_to(writer)
            return (KeyedStateHandle(self.key_groups, file.finish(), tuple(writer.sections)),)

    def _write_to(self, writer: StateWriter) -> None:
        for frozen in self.frozen:
            frozen.write(writer, self.key_groups, self.max_parallelism)

    def release(self) -> None:
        for frozen in self.frozen:
            frozen.release()
        self.frozen = []


class MemoryKeyedStateBackend(TableBackend):
    """See the module docstring. ``uid`` is the operator's, for messages; with ``incremental`` changes are noted."""

    def __init__(
        self, key_groups: KeyGroupRange, max_parallelism: int, uid: str = "", *, incremental: bool = False
    ) -> None:
        self.key_groups = key_groups
        self.max_parallelism = max_parallelism
        self.uid = uid
        self._states: dict[str, _State] = {}
        self._unclaimed: dict[str, UnclaimedState] = {}
        self._increments = Increments() if incremental else None

    def restore(self, handles: Sequence[KeyedHandle], reader: SnapshotReader, *, owned: bool) -> None:
        """Reads this backend's key groups; states are decoded when they are asked for."""
        own = [each for each in handles if isinstance(each, IncrementalKeyedStateHandle) and each.backend == HASHMAP]
        opened = [opened_parts(self.uid, handle, reader, self.key_groups) for handle in own]
        stored = [[part for _, part in parts] for parts in opened]
        self._unclaimed = unclaimed_part_states(self.uid, own, stored, self.key_groups, self.max_parallelism)
        rest = [handle for handle in handles if not any(handle is each for each in own)]
        for name, state in unclaimed_states(self.uid, rest, reader, self.key_groups, self.max_parallelism).items():
            if name in self._unclaimed:
                raise CorruptStateError(f"operator {self.uid!r} has the state {name!r} in two forms")
            self._unclaimed[name] = state
        if self._increments is not None and owned and not rest:
            self._increments.continues([part for parts in opened for part, _ in parts])

    def aggregate_table(self, name: str, key_schema: pa.Schema, columns: Sequence[AggregateColumn]) -> AggregateTable:
        table = AggregateTable(self.uid, name, key_schema, columns)
        known = self._states.get(name)
        if known is not None:
            if not isinstance(known, AggregateTable) or not known.is_like(table):
                raise schema_mismatch(
                    self.uid, name, "it is in use for something else", known.stored_schema(), list(columns)
                )
            return known
        restored = self._claim(name, "aggregate")
        if restored is not None:
            table.check_compatible(restored.descriptor)
            for batch in restored.batches():
                table.load(restored.descriptor, batch)
            if restored.descriptor == table.descriptor():
                table.begin_changes()
        self._states[name] = table
        return table

    def row_buffers(self, specs: Sequence[RowBufferSpec]) -> RowBuffers:
        self.check_rows(specs)
        buffers = RowBuffers(specs)
        for spec, side in zip(specs, buffers.sides, strict=True):
            for batch in self._restored_rows(spec):
                buffers.load(side, batch)
            self._states[spec.name] = side
        return buffers

    def keyed_columns(self, spec: RowBufferSpec) -> KeyedColumns:
        if not ColumnTable.takes(spec):
            return super().keyed_columns(spec)
        self.check_rows([spec])
        table = ColumnTable(spec)
        for batch in self._restored_rows(spec):
            table.load(batch)
        self._states[spec.name] = table
        return table

    def _restored_rows(self, spec: RowBufferSpec) -> Iterator[pa.RecordBatch]:
        """The restored rows of a side, in its present schema. Raises StateSchemaError."""
        restored = self._claim(spec.name, "rows")
        if restored is not None:
            check_ends(self.uid, spec, restored.descriptor)
            wanted = stored_schema(spec)
            check_evolution(self.uid, spec.name, restored.schema, wanted)
            yield from (evolve(spec.name, batch, wanted) for batch in restored.batches())

    def restored_key_schema(self) -> pa.Schema | None:
        for state in self._unclaimed.values():
            return stored_rows.schema_from_json(state.descriptor.get("key_schema"))
        return None

    def is_restored(self, name: str) -> bool:
        return name in self._unclaimed

    def drop_state(self, name: str) -> None:
        self._states.pop(name, None)
        self._unclaimed.pop(name, None)

    def maintain(self) -> None:
        """Merges after snapshots and removes expired entries, a little at a time. Call it about once per buffer."""
        for state in self._states.values():
            if isinstance(state, MemoryState):
                state.maintain(MAINTENANCE_BUDGET)

    def snapshot(self, checkpoint_id: int, properties: CheckpointProperties) -> KeyedSnapshot:
        """The synchronous part: freezes all states in constant time, except for a byte per row of joins."""
        states = {**self._states, **self._unclaimed}
        frozen: dict[str, Freezable] = {name: state.freeze() for name, state in states.items()}
        canonical = properties.savepoint_format is SavepointFormat.CANONICAL
        if self._increments is not None:
            self._increments.sealed(checkpoint_id, {name: state.seal() for name, state in states.items()})
            if not properties.is_savepoint:
                self._increments.begun(checkpoint_id)
            if not canonical:
                named = {
                    name: NamedState(frozen[name], partial(_descriptor_of, state)) for name, state in states.items()
                }
                return IncrementalSnapshot(
                    named, self.key_groups, self.max_parallelism, self._increments, checkpoint_id, properties
                )
        return MemorySnapshot(self.uid, [*frozen.values()], self.key_groups, self.max_parallelism, canonical)

    def notify_complete(self, checkpoint_id: int) -> None:
        if self._increments is not None:
            self._increments.completed(checkpoint_id)

    def notify_aborted(self, checkpoint_id: int) -> None:
        if self._increments is not None:
            self._increments.aborted(checkpoint_id)

    def close(self) -> None:
        self._states.clear()
        self._unclaimed.clear()

    @property
    def states(self) -> Mapping[str, _State]:
        return self._states

    def open_state(self, state: MemoryState) -> None:
        restored = self._claim(state.name, state.kind)
        if restored is not None:
            wanted = state.stored_schema()
            check_evolution(self.uid, state.name, restored.schema, wanted)
            for batch in restored.batches():
                state.load(_rows_of(state, evolve(state.name, batch, wanted)))
            if restored.descriptor == state.descriptor():
                state.begin_changes()
        state.descriptor()  # now, because it takes milliseconds, which a snapshot must not
        self._states[state.name] = state

    def _claim(self, name: str, kind: str) -> UnclaimedState | None:
        restored = self._unclaimed.get(name)
        if restored is None:
            return None
        if restored.kind != kind:
            raise schema_mismatch(self.uid, name, "the snapshot has another kind of state", restored.kind, kind)
        return self._unclaimed.pop(name)


def _descriptor_of(state: _State | UnclaimedState) -> dict[str, Any]:
    match state:
        case UnclaimedState():
            return state.descriptor
        case RowBuffer() | ColumnTable():
            return rows_descriptor(state.spec)
        case _:
            return state.descriptor()


def _rows_of(state: MemoryState, batch: pa.RecordBatch) -> list[StoredRow]:
    """Rows of a batch as tuples of one tuple per part; rows without an expiry time get one."""
    parts = []
    start = 0
    schemas = [schema for _, schema in state.parts()]
    for index, schema in enumerate(schemas):
        # Keys have the form of input rows; all other parts have the form that user code writes.
        decode = values.state_from_arrow if index else values.from_arrow
        cells = [decode(batch.column(start + column)) for column in range(len(schema))]
        start += len(schema)
        if index == len(schemas) - 1:
            parts.append(list(zip(*cells, *_stamps(state, batch), strict=True)))
        else:
            make_key = values.user_key_maker(schema)
            parts.append([make_key(row) for row in zip(*cells, strict=True)])
    return list(zip(*parts, strict=True))


def _stamps(state: MemoryState, batch: pa.RecordBatch) -> list[list[int]]:
    """The column of the rows' expiry times, if the state has one."""
    if state.ttl is None:
        return []
    fresh = state.ttl.now_ms() + state.ttl.duration_ms
    return [[fresh if stamp is None else stamp for stamp in batch.column(batch.num_columns - 1).to_pylist()]]
