"""Parts: the files of which an incremental snapshot of in-memory state consists, oldest first.

The first part has all of a state, each later one what has changed: all rows under the changed keys, and the keys that
are gone. So a key's rows are in the newest part that names the key. A join's rows are replaced and removed one by one,
by the row's number beside its key.

A part is a run of Arrow IPC record batch messages, as in ``pages.py``, and a footer in JSON, its length (8 bytes,
little endian) and :data:`MAGIC`. The footer has a *section* for each state with the places of its batches. Rows that
fill several batches are in key-group order. A batch has any number of key groups: small increments are a few batches.
Parts never change; an operator's snapshot lists them, each with the key groups for which it counts, because after a
rescaling it consists of parts of several subtasks, or shares them with others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import NonNegative, decoded
from ckpt_runtime.state import columns, stored_rows
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.errors import CorruptStateError, reading
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.kernels.hash_kernels import order_by_group
from ckpt_runtime.state.memory.key_index import key_index
from ckpt_runtime.state.stored_rows import KEY_PREFIX, ROW, check_owned

MAGIC = b"ckptpart"
ROWS_WRITTEN = 1 << 14
"""Rows of a batch at most: each call that takes rows releases the interpreter lock."""
_TAIL_BYTES = 8 + len(MAGIC)

Block: TypeAlias = bytes | memoryview | pa.Buffer


class Run(msgspec.Struct, frozen=True, array_like=True):
    """One batch: its place in the file, and the first and last key group of its rows."""

    offset: NonNegative
    length: NonNegative
    first: NonNegative
    last: NonNegative


class Section(msgspec.Struct):
    """What a part has of one state: ``whole`` if nothing of an older part counts any more."""

    name: str
    whole: bool
    rows: list[Run] = []
    removed: list[Run] = []


class Footer(msgspec.Struct):
    """The end of a part. ``keys`` counts the rows that it has of all states, ``removed`` the keys that are gone."""

    sections: list[Section]
    keys: NonNegative = 0
    removed: NonNegative = 0
    version: int = 1


class PartWriter:
    """Writes a part to a stream, section by section."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._offset = 0
        self.footer = Footer([])

    def begin(self, name: str, *, whole: bool) -> None:
        self.footer.sections.append(Section(name, whole, [], []))

    def write_table(
        self, name: str, descriptor: dict[str, Any], table: pa.Table, groups: AnyArray, owned: KeyGroupRange
    ) -> None:
        """See :class:`~ckpt_runtime.state.stored_rows.StateWriter`; writes to the present section."""
        check_owned(name, groups, owned)
        self.footer.keys += table.num_rows
        self._write(self.footer.sections[-1].rows, table, groups, owned)

    def write_batches(
        self, name: str, descriptor: dict[str, Any], schema: pa.Schema, batches: Iterable[tuple[int, pa.RecordBatch]]
    ) -> None:
        """See :class:`~ckpt_runtime.state.stored_rows.StateWriter`; writes to the present section."""
        for group, batch in batches:
            self.footer.keys += batch.num_rows
            self.footer.sections[-1].rows.append(self._written(batch, group, group))

    def write_rows(self, name: str, table: pa.Table, owned: KeyGroupRange, max_parallelism: int) -> None:
        """Writes rows in any order of their keys to the present section."""
        self.write_table(name, {}, table, _groups_of(table, max_parallelism), owned)

    def write_removed(self, name: str, table: pa.Table, owned: KeyGroupRange, max_parallelism: int) -> None:
        """Writes keys that are gone to the present section."""
        groups = _groups_of(table, max_parallelism)
        check_owned(name, groups, owned)
        self.footer.removed += table.num_rows
        self._write(self.footer.sections[-1].removed, table, groups, owned)

    def _write(self, runs: list[Run], table: pa.Table, groups: AnyArray, owned: KeyGroupRange) -> None:
        if 0 < len(groups) <= ROWS_WRITTEN:  # one batch, whose order would save no reader anything
            first, last = int(groups.min()), int(groups.max())
            runs.extend(self._written(batch, first, last) for batch in table.combine_chunks().to_batches())
            return
        order = np.empty(len(groups), dtype=np.int64)
        order_by_group(read_only(groups), owned.first, np.zeros(len(owned), dtype=np.int64), order)
        table = table.combine_chunks()  # each call that takes rows would do it
        for start in range(0, len(order), ROWS_WRITTEN):
            places = order[start : start + ROWS_WRITTEN]
            taken = table.take(columns.arrow_from_numpy(pa.int64(), places)).combine_chunks()
            first, last = int(groups[places[0]]), int(groups[places[-1]])
            runs.extend(self._written(batch, first, last) for batch in taken.to_batches())

    def _written(self, batch: pa.RecordBatch, first: int, last: int) -> Run:
        message = memoryview(batch.serialize())
        self._stream.write(message)
        run = Run(self._offset, len(message), first, last)
        self._offset += len(message)
        return run

    def end(self) -> None:
        footer = msgspec.json.encode(self.footer)
        self._stream.write(footer + len(footer).to_bytes(8, "little") + MAGIC)


def _groups_of(table: pa.Table | pa.RecordBatch, max_parallelism: int) -> AnyArray:
    """The key group of each row."""
    names = [name for name in table.schema.names if name.startswith(KEY_PREFIX)]
    batches = table.to_batches() if isinstance(table, pa.Table) else [table]
    hashes = [hash_arrays([batch.column(name) for name in names], names) for batch in batches]
    return key_groups_of(np.concatenate([np.empty(0, dtype=np.uint64), *hashes]), max_parallelism)


Read: TypeAlias = Callable[[int, int], Block]


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that counts for ``key_groups``. ``read`` returns a part of its content."""

    key_groups: KeyGroupRange
    read: Read
    footer: Footer = field(repr=False)

    @classmethod
    def opened(cls, name: str, key_groups: KeyGroupRange, length: int, read: Read) -> StoredPart:
        """Reads the footer. Raises CorruptStateError."""
        tail = bytes(read(max(0, length - _TAIL_BYTES), min(length, _TAIL_BYTES)))
        size = int.from_bytes(tail[:8], "little")
        if not tail.endswith(MAGIC) or len(tail) != _TAIL_BYTES or size > length - _TAIL_BYTES:
            raise CorruptStateError(f"the file {name!r} is no part of an incremental snapshot")
        with reading(f"the footer of part {name!r}"):
            footer = decoded(bytes(read(length - _TAIL_BYTES - size, size)), Footer)
        if footer.version != 1:
            raise CorruptStateError(f"part {name!r} has version {footer.version}, this release reads 1")
        for run in (run for section in footer.sections for run in (*section.rows, *section.removed)):
            if run.first > run.last:
                raise CorruptStateError(f"part {name!r} has a batch of the key groups {run.first} to {run.last}")
        return cls(key_groups, read, footer)

    def share_of(self, key_groups: KeyGroupRange) -> float:
        """About which share of the content is in these key groups."""
        runs = [run for section in self.footer.sections for run in (*section.rows, *section.removed)]
        if not runs:
            return 1.0
        own = KeyGroupRange(min(run.first for run in runs), max(run.last for run in runs))
        return len(own.intersection(key_groups)) / len(own)

    def batches(
        self, name: str, runs: Sequence[Run], schema: pa.Schema, wanted: KeyGroupRange
    ) -> Iterator[pa.RecordBatch]:
        """The batches of some runs that have key groups in ``wanted``, checked in full."""
        for run in runs:
            if run.first <= wanted.last and run.last >= wanted.first:
                block = self.read(run.offset, run.length)
                if len(block) != run.length:
                    raise CorruptStateError(f"state {name!r}: {len(block)} bytes at {run.offset}, not {run.length}")
                yield from read_block(name, schema, block)


def read_block(name: str, schema: pa.Schema, block: Block) -> Iterator[pa.RecordBatch]:
    """The batches of one block, checked in full. Raises :class:`CorruptStateError`."""
    reader = pa.BufferReader(block)
    size = reader.size()
    while reader.tell() < size:
        with reading(f"a block of state {name!r}"):
            batch = pa.ipc.read_record_batch(pa.ipc.read_message(reader), schema)
            batch.validate(full=True)
        yield batch


def merged(
    name: str, descriptor: dict[str, Any], parts: Sequence[StoredPart], owned: KeyGroupRange, max_parallelism: int
) -> tuple[pa.Table, AnyArray]:
    """The rows of a state in the key groups ``owned`` of all parts, and each row's key group."""
    schema = stored_rows.schema_from_json(descriptor.get("schema"))
    numbered = pa.schema([*schema, pa.field(ROW, pa.int64())]) if descriptor["kind"] == "rows" else schema
    identity = pa.schema([each for each in numbered if each.name.startswith(KEY_PREFIX) or each.name == ROW])
    if not identity.names:
        raise CorruptStateError(f"state {name!r} has a schema without keys")
    # Key groups of which an older part may have more.
    open_groups = np.zeros(max_parallelism, dtype=bool)
    open_groups[owned.first : owned.last + 1] = True
    index = key_index(identity)
    found: list[tuple[pa.RecordBatch, AnyArray]] = []
    for part in reversed(parts):
        wanted = part.key_groups.intersection(owned)
        section = next((each for each in part.footer.sections if each.name == name), None)
        if section is None or not len(wanted) or not open_groups[wanted.first : wanted.last + 1].any():
            continue
        counts = np.zeros(max_parallelism, dtype=bool)
        counts[wanted.first : wanted.last + 1] = open_groups[wanted.first : wanted.last + 1]
        own = []
        for batch in part.batches(name, section.rows, numbered, wanted):
            groups = _groups_of(batch, max_parallelism)
            kept = counts[groups]
            if index.size:
                kept &= index.find([batch.column(each) for each in identity.names]) < 0
            own.append((batch, groups) if kept.all() else (batch.filter(pa.array(kept)), groups[kept]))
        found[:0] = own
        if section.whole:
            open_groups[wanted.first : wanted.last + 1] = False
            continue
        gone = [
            batch.filter(pa.array(counts[_groups_of(batch, max_parallelism)]))
            for batch in part.batches(name, section.removed, identity, wanted)
        ]
        for batch in [*(batch for batch, _ in own), *gone]:
            index.slots_of([batch.column(each) for each in identity.names])
    rows = pa.Table.from_batches([batch for batch, _ in found], schema=numbered)
    groups = np.concatenate([np.empty(0, dtype=np.int32), *(groups for _, groups in found)])
    if ROW in numbered.names:
        order = np.argsort(rows.column(ROW).to_numpy(), kind="stable")
        rows, groups = rows.drop_columns([ROW]).take(pa.array(order)), groups[order]
    return rows, groups
