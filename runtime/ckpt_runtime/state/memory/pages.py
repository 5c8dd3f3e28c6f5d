"""The native form of in-memory keyed state: the content of a snapshot's file and how it is located.

A file is a run of *sections*, one per named state. A section is a run of *key-group blocks* in key-group order, empty
groups left out. A block is a run of Arrow IPC record batch messages (encapsulated form: continuation marker, metadata
length, metadata, body; 8-byte aligned relative to the block) with stored rows, without schema messages and
uncompressed. Offsets of blocks count from the file's start and are stored in
:class:`~ckpt_runtime.checkpoint.state_handles.KeyedSection`, with the state's descriptor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ckpt_runtime.checkpoint.state_handles import KeyedSection
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import columns
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import reading
from ckpt_runtime.state.kernels.compiler import read_only
from ckpt_runtime.state.kernels.split_kernels import order_by_group
from ckpt_runtime.state.stored_rows import check_owned

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
        """See :class:`~ckpt_runtime.state.stored_rows.StateWriter`."""
        check_owned(name, groups, owned)
        self.write_batches(name, descriptor, table.schema, _by_group(table, groups, owned))

    def write_batches(
        self, name: str, descriptor: dict[str, Any], schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        """See :class:`~ckpt_runtime.state.stored_rows.StateWriter`."""
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


def read_block(name: str, schema: pa.Schema, block: bytes | memoryview | pa.Buffer) -> Iterator[pa.RecordBatch]:
    """The batches of one block, checked in full. Raises :class:`CorruptStateError`."""
    reader = pa.BufferReader(block)
    size = reader.size()
    while reader.tell() < size:
        with reading(f"a block of state {name!r}"):
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
            batch.validate(full=True)
        yield batch
