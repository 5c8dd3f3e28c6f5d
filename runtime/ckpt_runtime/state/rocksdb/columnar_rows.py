"""Buffered rows whose changes go to the database with snapshots: the state of joins, and rows that are gathered.

The rows themselves stay in memory, as in the backend there (``memory/row_buffer.py``): what a join matches and forgets
does so at once. The database has them in *chunks*: the rows of one key group that came between two snapshots, in order,
as one entry, and beside it, once some of them have matched or ended, a byte for each. A chunk without living rows goes,
and one with less than half of its rows is written anew. So a snapshot writes what has changed, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.kernels.row_buffer_kernels import ALIVE, MATCHED
from ckpt_runtime.state.memory.key_index import KeyIndex, grown
from ckpt_runtime.state.memory.row_buffer import RowBuffer, RowBuffers, to_stored
from ckpt_runtime.state.rocksdb.codec import ID_BYTES, state_prefix
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.schema_evolution import evolve
from ckpt_runtime.state.states import Key, RowBufferSpec
from ckpt_runtime.state.stored_rows import KEY_PREFIX, check_owned
from ckpt_runtime.state.stored_rows import MATCHED as IS_MATCHED

POSITION = "position"
"""The column of a stored chunk that says which of the chunk's flags is a row's."""

_NUMBER_BYTES = 8
_ROWS, _FLAGS = b"\0", b"\1"
_NEW = -1


@dataclass(slots=True)
class _Chunk:
    """``size`` counts the rows that it was made with, ``stored`` those in its entry, ``living`` those that are left."""

    key_group: int
    number: int
    size: int
    stored: int
    living: int


Decoded: TypeAlias = tuple[int, pa.RecordBatch, AnyArray, AnyArray]
"""A chunk's number, its living rows in the current schema, their positions, and its flags if there are any."""


class ChunkCodec:
    """Chunks of one state as entries: ``schemas`` of stored rows by their ids, of which ``current`` is written."""

    def __init__(self, name: str, state_id: int, schemas: Mapping[int, pa.Schema], current: int) -> None:
        self._name = name
        self.id = state_id
        self._schemas = schemas
        self._header = current.to_bytes(ID_BYTES, "big")
        self.schema = schemas[current]

    def keys(self, key_group: int, number: int) -> tuple[bytes, bytes]:
        """Of a chunk's rows, and of its flags."""
        key = state_prefix(key_group, self.id) + number.to_bytes(_NUMBER_BYTES, "big")
        return key + _ROWS, key + _FLAGS

    def encode_rows(self, rows: pa.RecordBatch, positions: AnyArray) -> bytes:
        """Stored rows with their positions in the chunk."""
        batch = rows.append_column(POSITION, arrow_from_numpy(pa.uint32(), positions))
        return b"".join((self._header, memoryview(batch.serialize())))

    def encode_flags(self, flags: AnyArray) -> bytes:
        """A byte for each row that the chunk was made with."""
        return self._header + flags.tobytes()

    def decode(self, entries: Iterable[tuple[bytes, bytes]]) -> Iterator[Decoded]:
        """The chunks, in order. Raises CorruptStateError."""
        waiting: tuple[int, bytes] | None = None
        for key, value in entries:
            number, kind = int.from_bytes(key[-1 - _NUMBER_BYTES : -1], "big"), key[-1:]
            if kind == _ROWS:
                if waiting is not None:
                    yield self._chunk(*waiting, None)
                waiting = (number, value)
            elif kind != _FLAGS or waiting is None or waiting[0] != number:
                raise CorruptStateError(f"state {self._name!r} has the entry {key!r}, which belongs to no rows")
            else:
                yield self._chunk(*waiting, value)
                waiting = None
        if waiting is not None:
            yield self._chunk(*waiting, None)

    def _chunk(self, number: int, rows: bytes, flags: bytes | None) -> Decoded:
        batch = self._read(rows)
        positions = batch.column(POSITION).to_numpy()
        stored = evolve(self._name, batch.drop_columns([POSITION]), self.schema)
        if flags is None:
            return number, stored, positions, np.empty(0, dtype=np.uint8)
        known = np.frombuffer(flags, dtype=np.uint8, offset=ID_BYTES)
        if len(positions) and int(positions.max()) >= len(known):
            raise CorruptStateError(f"state {self._name!r} has a chunk of rows with {len(known)} flags")
        own = known[positions]
        matched = arrow_from_numpy(pa.uint8(), own & MATCHED).cast(pa.bool_())
        place = stored.schema.get_field_index(IS_MATCHED)
        stored = stored.set_column(place, stored.schema.field(place), matched)
        alive = (own & ALIVE).astype(bool)
        return number, stored.filter(pa.array(alive)), positions[alive], known

    def _read(self, rows: bytes) -> pa.RecordBatch:
        schema = self._schemas.get(int.from_bytes(rows[:ID_BYTES], "big"))
        if schema is None:
            raise CorruptStateError(f"state {self._name!r} has an entry with an unknown schema")
        try:
            message = pa.ipc.read_message(pa.py_buffer(rows)[ID_BYTES:])
            batch = pa.ipc.read_record_batch(message, schema.append(pa.field(POSITION, pa.uint32())))
            batch.validate(full=True)
        except (pa.ArrowException, OSError, EOFError, ValueError, TypeError) as error:
            raise CorruptStateError(f"an entry of state {self._name!r} cannot be read: {error}") from error
        return batch


class StoredRowBuffer(RowBuffer):
    """One side, which knows of each row whether the database has it, and in which chunk."""

    def __init__(self, spec: RowBufferSpec, codec: ChunkCodec, max_parallelism: int) -> None:
        self.codec = codec
        self._max_parallelism = max_parallelism
        self._chunks: dict[int, _Chunk] = {}
        self._next_chunk = 0
        self._next_number = 0
        self._touched: set[int] = set()
        super().__init__(spec)

    def _clear(self) -> None:
        super()._clear()
        rows = len(self._flags)
        self._groups: AnyArray = np.zeros(rows, dtype=np.int32)
        self._homes: AnyArray = np.zeros(rows, dtype=np.int32)
        self._positions: AnyArray = np.zeros(rows, dtype=np.uint32)
        self._noted: AnyArray = np.zeros(rows, dtype=np.uint8)
        self._first_new = 0

    def _make_rows(self, rows: int) -> None:
        used = self._rows.rows
        super()._make_rows(rows)
        capacity = len(self._flags)
        if capacity != len(self._homes):
            self._groups = grown(self._groups, capacity, used)
            self._homes = grown(self._homes, capacity, used)
            self._positions = grown(self._positions, capacity, used)
            self._noted = grown(self._noted, capacity, used)

    def append(self, batch: pa.RecordBatch, slots: AnyArray, matched: AnyArray) -> None:
        first = self._rows.rows
        super().append(batch, slots, matched)
        last = self._rows.rows
        hashes = hash_arrays([batch.column(key) for key in self.spec.keys], self.spec.keys)
        self._groups[first:last] = key_groups_of(hashes, self._max_parallelism)
        self._homes[first:last] = _NEW

    def refill(self, parts: list[tuple[pa.RecordBatch, AnyArray]], index: KeyIndex) -> None:
        """Rows that stay in memory keep their places in the database; with no parts, all end."""
        self._note()
        living = np.flatnonzero(self._flags[: self._rows.rows] & ALIVE)
        homes, positions = self._homes[living], self._positions[living]
        if not parts:
            self._end(homes)
            homes, positions = homes[:0], positions[:0]
        super().refill(parts, index)
        rows = self._rows.rows
        self._homes[:rows] = homes
        self._positions[:rows] = positions
        self._noted[:rows] = self._flags[:rows]
        self._first_new = int(np.count_nonzero(homes != _NEW))

    def restore_chunk(self, key_group: int, number: int, positions: AnyArray, flags: AnyArray) -> None:
        """The latest rows are those of this chunk."""
        rows = self._rows.rows
        first = rows - len(positions)
        size = max(len(flags), 1 + int(positions.max(initial=0)))  # written anew, a chunk has gaps and no flags
        chunk = self._add_chunk(_Chunk(key_group, number, size, size, len(positions)))
        self._homes[first:rows] = chunk
        self._positions[first:rows] = positions
        self._noted[first:rows] = self._flags[first:rows]
        self._first_new = rows
        self._next_number = max(self._next_number, number + 1)

    def _add_chunk(self, chunk: _Chunk) -> int:
        self._chunks[self._next_chunk] = chunk
        self._next_chunk += 1
        return self._next_chunk - 1

    def _note(self) -> None:
        """Sees which rows that the database has have matched or ended since the last time."""
        known = self._first_new
        changed = np.flatnonzero(self._flags[:known] != self._noted[:known])
        self._touched.update(np.unique(self._homes[changed]).tolist())
        self._end(self._homes[changed[self._flags[changed] & ALIVE == 0]])
        self._noted[changed] = self._flags[changed]

    def _end(self, homes: AnyArray) -> None:
        """Of one row each."""
        for chunk, rows in zip(*(part.tolist() for part in np.unique(homes, return_counts=True)), strict=True):
            if chunk != _NEW:
                self._chunks[chunk].living -= rows
                self._touched.add(chunk)

    def freeze_changes(self) -> FrozenChunks | None:
        """What the database has to learn."""
        self._note()
        rows, first = self._rows.rows, self._first_new
        new = first + np.flatnonzero(self._flags[first:rows] & ALIVE)
        if not len(new) and not self._touched:
            return None
        made = self._new_chunks(new)
        self._noted[first:rows] = self._flags[first:rows]
        self._first_new = rows
        frozen = FrozenChunks(
            self.spec, self.codec, self._rows.segments, self._flags[:rows].copy(), self._homes[:rows],
            self._positions[:rows], made,
        )  # fmt: skip
        for number in sorted(self._touched):
            chunk = self._chunks[number]
            if not chunk.living:
                frozen.ended.append(self._chunks.pop(number))
            elif 2 * chunk.living < chunk.stored:
                frozen.rewritten[number] = chunk
                chunk.stored = chunk.living
            else:
                frozen.flagged[number] = chunk
        self._touched.clear()
        return frozen

    def _new_chunks(self, new: AnyArray) -> list[tuple[_Chunk, AnyArray]]:
        """Chunks of rows that the database does not have, each with the numbers of its rows."""
        made = []
        for group, numbers in _by(self._groups, new):
            size = len(numbers)
            chunk = _Chunk(group, self._next_number, size, size, size)
            self._homes[numbers] = self._add_chunk(chunk)
            self._positions[numbers] = np.arange(size)
            made.append((chunk, numbers))
        self._next_number += 1
        return made


class FrozenChunks:
    """What has changed in one side until one moment. ``homes`` and ``positions`` of these rows never change."""

    def __init__(
        self,
        spec: RowBufferSpec,
        codec: ChunkCodec,
        segments: Sequence[pa.RecordBatch],
        flags: AnyArray,
        homes: AnyArray,
        positions: AnyArray,
        made: list[tuple[_Chunk, AnyArray]],
    ) -> None:
        self._spec = spec
        self._codec = codec
        self._segments = segments
        self._flags = flags
        self._homes = homes
        self._positions = positions
        self._made = [(chunk.key_group, chunk.number, numbers) for chunk, numbers in made]
        self.ended: list[_Chunk] = []
        self.rewritten: dict[int, _Chunk] = {}
        self.flagged: dict[int, _Chunk] = {}

    def puts(self) -> Iterator[tuple[bytes, bytes]]:
        """Entries for the database."""
        table = pa.Table.from_batches(self._segments, self._spec.schema)
        for group, number, rows in self._made:
            yield self._codec.keys(group, number)[0], self._encoded(table, rows)
        changed = {**self.rewritten, **self.flagged}
        rows = np.flatnonzero((self._flags & ALIVE).astype(bool) & np.isin(self._homes, list(changed)))
        for home, own in _by(self._homes, rows):
            chunk = changed[home]
            key, flags_key = self._codec.keys(chunk.key_group, chunk.number)
            if home in self.rewritten:
                yield key, self._encoded(table, own)
            else:
                flags = np.zeros(chunk.size, dtype=np.uint8)
                flags[self._positions[own]] = self._flags[own]
                yield flags_key, self._codec.encode_flags(flags)

    def _encoded(self, table: pa.Table, rows: AnyArray) -> bytes:
        taken = table.take(arrow_from_numpy(pa.int64(), rows)).combine_chunks().to_batches()
        batch = taken[0] if len(taken) == 1 else pa.concat_batches(taken)
        stored = to_stored(self._spec, batch, (self._flags[rows] & MATCHED) >> 1)
        return self._codec.encode_rows(stored, self._positions[rows])

    def deletes(self) -> Iterator[bytes]:
        """Keys that are no more."""
        for chunk in self.ended:
            yield from self._codec.keys(chunk.key_group, chunk.number)
        for chunk in self.rewritten.values():
            yield self._codec.keys(chunk.key_group, chunk.number)[1]

    def release(self) -> None:
        """The columns go."""
        self._segments = ()


class ChunksForm:
    """Chunks as stored rows and back, whether somebody has asked for the state or not."""

    def __init__(self, name: str, codec: ChunkCodec, owned: KeyGroupRange, max_parallelism: int) -> None:
        self._name = name
        self._codec = codec
        self._owned = owned
        self._max_parallelism = max_parallelism

    def batches(self, entries: Iterable[tuple[bytes, bytes]]) -> Iterator[pa.RecordBatch]:
        """Living rows in the present schema, in the order of the entries."""
        return (rows for _, rows, _, _ in self._codec.decode(entries))

    def entries(self, batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[bytes, bytes]]:
        """Chunks of stored rows in the present schema, in which the rows of a key are in order."""
        names = [name for name in self._codec.schema.names if name.startswith(KEY_PREFIX)]
        for number, batch in enumerate(batches):
            hashes = hash_arrays(batch.columns[: len(names)], names)
            groups = key_groups_of(hashes, self._max_parallelism)
            check_owned(self._name, groups, self._owned)
            for group, rows in _by(groups, np.arange(batch.num_rows)):
                own = batch.take(arrow_from_numpy(pa.int64(), rows))
                positions = np.arange(len(rows), dtype=np.uint32)
                yield self._codec.keys(group, number)[0], self._codec.encode_rows(own, positions)


def _by(values: AnyArray, rows: AnyArray) -> Iterator[tuple[int, AnyArray]]:
    """The numbers of rows by the rows' values, in order."""
    ordered = rows[np.argsort(values[rows], kind="stable")]
    found, starts = np.unique(values[ordered], return_index=True)
    ends = [*starts[1:].tolist(), len(ordered)]
    for value, start, end in zip(found.tolist(), starts.tolist(), ends, strict=False):
        yield value, ordered[start:end]


class RowsState:
    """One side as a state of the backend."""

    def __init__(self, side: StoredRowBuffer) -> None:
        self._side = side

    def stored_schema(self) -> pa.Schema:
        """Schema of stored rows."""
        return self._side.stored_schema()

    @property
    def cache(self) -> RowsState:
        """All of it is at hand."""
        return self

    def freeze(self) -> FrozenChunks | None:
        """What has changed since the last call, in the time of a byte per row and of the new rows' order."""
        return self._side.freeze_changes()

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Nothing has to be read."""

    def maintain(self, budget: int) -> None:
        """Joins say themselves when to compact."""


def restore_rows(buffers: RowBuffers, side: StoredRowBuffer, database: Database, owned: KeyGroupRange) -> None:
    """Loads what the database has of one side. Raises CorruptStateError."""
    for group in range(owned.first, owned.last + 1):
        for number, rows, positions, flags in side.codec.decode(database.scan(state_prefix(group, side.codec.id))):
            buffers.load(side, rows)
            side.restore_chunk(group, number, positions, flags)
