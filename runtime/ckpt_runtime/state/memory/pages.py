"""The native form of in-memory keyed state: the content of a snapshot's file and how it is located.

A file is a run of *sections*, one per named state. A section is a run of *key-group blocks* in key-group order, empty
groups left out. A block is a run of Arrow IPC record batch messages (encapsulated form: continuation marker, metadata
length, metadata, body; 8-byte aligned relative to the block) with stored rows, without schema messages and
uncompressed. Offsets of blocks count from the file's start and are stored in
:class:`~ckpt_runtime.checkpoint.completed_checkpoint.KeyedSection`, with the state's descriptor.

The restored content of states that are not in use yet stays in key-group blocks of the backend's range. Blocks are
read once at restore (clipped to the range), decoded when a state is claimed, and until then written to each snapshot,
so that a state survives a run of the job that does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedSection,
    KeyedStateHandle,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import columns, stored_rows
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.backend import SnapshotReader
from ckpt_runtime.state.canonical import canonical_states
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError, UnsupportedBackendError, schema_mismatch
from ckpt_runtime.state.kernels.hash_kernels import order_by_group
from ckpt_runtime.state.memory.changes import NOTHING, Changed, SealedChanges
from ckpt_runtime.state.memory.increments import described
from ckpt_runtime.state.memory.parts import Block, PartWriter, StoredPart, merged, read_block
from ckpt_runtime.state.stored_rows import ROW, StateWriter, check_owned

ROWS_TAKEN = 1 << 14
"""Each call that takes rows releases the interpreter lock, and a busy task gives it back only after a while."""


class SectionWriter:
    """Writes sections to a stream one after another and remembers where each block went."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._offset = 0
        self.sections: list[KeyedSection] = []

    def write_table(
        self, name: str, descriptor: dict[str, Any], table: pa.Table, groups: AnyArray, owned: KeyGroupRange
    ) -> None:
        check_owned(name, groups, owned)
        self.write_batches(name, descriptor, table.schema, _by_group(table, groups, owned))

    def write_batches(
        self, name: str, descriptor: dict[str, Any], schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        blocks: dict[int, tuple[int, int]] = {}
        for key_group, batch in batches:
            message = memoryview(batch.serialize())
            self._stream.write(message)
            start, length = blocks.get(key_group, (self._offset, 0))
            blocks[key_group] = start, length + len(message)
            self._offset += len(message)
        self.sections.append(KeyedSection(name, descriptor, tuple((group, *place) for group, place in blocks.items())))


def _by_group(table: pa.Table, groups: AnyArray, owned: KeyGroupRange) -> Iterator[tuple[int, pa.RecordBatch]]:
    if table.num_rows == 0:
        return
    counted = np.zeros(len(owned), dtype=np.int64)
    order = np.empty(len(groups), dtype=np.int64)
    # The kernel checks no bounds: a row of another key group would be counted outside of the array.
    order_by_group(read_only(groups), owned.first, counted, order)
    ends = counted.tolist()
    table = table.combine_chunks()  # each call that takes rows would do it
    start = 0
    for first, last in _runs(ends):
        # A bounded number of rows at a time: all of them in order would be a second table.
        rows = table.take(columns.arrow_from_numpy(pa.int64(), order[start : ends[last - 1]]))
        taken_from = start
        for index in range(first, last):
            for batch in rows.slice(start - taken_from, ends[index] - start).to_batches():
                yield owned.first + index, batch
            start = ends[index]


def _runs(ends: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of groups whose rows are taken together: each has at least :data:`ROWS_TAKEN` rows, except the last."""
    first = start = 0
    for last, end in enumerate(ends, 1):
        if end - start >= ROWS_TAKEN or last == len(ends):
            yield first, last
            first, start = last, end


class UnclaimedState:
    """One unclaimed state. The blocks of a key group usually come from one subtask; several are accepted, too."""

    def __init__(self, uid: str, name: str, descriptor: dict[str, Any]) -> None:
        stored_rows.check_descriptor(name, descriptor)
        self.uid = uid
        self.name = name
        self.descriptor = descriptor
        self.schema = stored_rows.schema_from_json(descriptor.get("schema"))
        self._blocks: dict[int, list[Block]] = {}

    @property
    def kind(self) -> str:
        return str(self.descriptor["kind"])

    def check_same(self, descriptor: dict[str, Any]) -> None:
        """Raises StateSchemaError when another part of the snapshot has another descriptor for it."""
        if descriptor != self.descriptor:
            other = stored_rows.schema_from_json(descriptor.get("schema"))
            raise schema_mismatch(self.uid, self.name, "parts of the snapshot differ", self.schema, other)

    def add(self, section: KeyedSection, read: Callable[[int, int], Block], owned: KeyGroupRange) -> None:
        """Reads the blocks inside ``owned``."""
        self.check_same(section.descriptor)
        for key_group, offset, length in section.key_group_offsets:
            if key_group in owned:
                block = read(offset, length)
                if len(block) != length:
                    raise CorruptStateError(
                        f"state {self.name!r}: key group {key_group} has {len(block)} bytes at {offset}, not {length}"
                    )
                self._blocks.setdefault(key_group, []).append(block)

    def add_rows(self, key_group: int, batch: pa.RecordBatch) -> None:
        """Adds rows that were read from another form."""
        self._blocks.setdefault(key_group, []).append(batch.serialize())

    def batches(self) -> Iterator[pa.RecordBatch]:
        return (batch for _, batch in self._by_group())

    def _by_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        for key_group in sorted(self._blocks):
            for block in self._blocks[key_group]:
                for batch in read_block(self.name, self.schema, block):
                    yield key_group, batch

    def freeze(self) -> UnclaimedState:
        """Returns the state itself, because blocks never change."""
        return self

    @property
    def numbers(self) -> int | None:
        return None

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None:
        """Copies the rows into a new snapshot; there are none outside ``owned``."""
        writer.write_batches(self.name, self.descriptor, self.schema, self._by_group())

    def seal(self) -> SealedChanges:
        """Nothing has changed since the last seal."""
        return lambda: NOTHING

    def write_part(
        self, writer: PartWriter, changed: Changed | None, owned: KeyGroupRange, max_parallelism: int
    ) -> None:
        """Copies the rows, all of them; those of a join get numbers, by which they stay in order."""
        assert changed is None, "nothing of it changes"
        if self.kind != "rows":
            self.write(writer, owned, max_parallelism)
            return
        start = 0
        for batch in self.batches():
            numbers = columns.arrow_from_numpy(pa.int64(), np.arange(start, start + batch.num_rows))
            start += batch.num_rows
            table = pa.Table.from_batches([batch.append_column(ROW, numbers)])
            writer.write_rows(self.name, table, owned, max_parallelism)

    def release(self) -> None:
        """Does nothing: a snapshot holds nothing of its own."""


def unclaimed_part_states(
    uid: str,
    handles: Sequence[IncrementalKeyedStateHandle],
    opened: Sequence[Sequence[StoredPart]],
    owned: KeyGroupRange,
    max_parallelism: int,
) -> dict[str, UnclaimedState]:
    """The same for snapshots that consist of parts, which are those of each handle."""
    found: dict[str, UnclaimedState] = {}
    for handle, parts in zip(handles, opened, strict=True):
        for name, descriptor in described(uid, handle.description).states.items():
            state = found.setdefault(name, UnclaimedState(uid, name, descriptor))
            state.check_same(descriptor)
            own = owned.intersection(handle.key_groups)
            rows, groups = merged(name, descriptor, parts, own, max_parallelism)
            for key_group, batch in _by_group(rows, groups, own):
                state.add_rows(key_group, batch)
    return found


def unclaimed_states(
    uid: str, handles: Iterable[KeyedHandle], reader: SnapshotReader, owned: KeyGroupRange, max_parallelism: int
) -> dict[str, UnclaimedState]:
    """States by name from all parts of a snapshot that overlap ``owned``."""
    found: dict[str, UnclaimedState] = {}
    canonical = []
    for handle in handles:
        if isinstance(handle, CanonicalKeyedStateHandle):
            canonical.append(handle)
            continue
        if not isinstance(handle, KeyedStateHandle):
            raise UnsupportedBackendError(
                f"operator {uid!r}: its state was written by the backend {handle.backend!r}, which state.backend.type "
                "must name"
            )
        for section in handle.sections:
            state = found.get(section.name)
            if state is None:
                state = found[section.name] = UnclaimedState(uid, section.name, section.descriptor)
            state.add(section, partial(reader.read, handle.file), owned)
    for stored in canonical_states(uid, canonical):
        state = found[stored.name] = UnclaimedState(uid, stored.name, stored.descriptor)
        for key_group, batch in stored.batches(reader, owned, max_parallelism):
            state.add_rows(key_group, batch)
    return found
