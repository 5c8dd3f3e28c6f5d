"""Buffered rows whose changes go to the database with snapshots: the state of joins, and rows that are gathered.

The rows in use are in memory, as in the backend there (``memory/row_buffer.py``): what a join matches and forgets does
so at once. The database has them in chunks (``columnar_rows.py``): a snapshot writes those of new rows, and flags of
rows that have matched or ended.

When there are more rows than memory shall hold, those of keys that have not come lately leave it: they end here, and
are in the database as ``spilled_rows.py`` says, until they are taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.kernels.compiler import read_only
from ckpt_runtime.state.kernels.row_buffer_kernels import ALIVE, MATCHED
from ckpt_runtime.state.memory.key_index import KeyIndex, capacity_for, grown
from ckpt_runtime.state.memory.row_buffer import RowBuffer, RowBuffers, to_stored
from ckpt_runtime.state.rocksdb.codec import state_prefix
from ckpt_runtime.state.rocksdb.columnar_rows import ChunkCodec, chunks_of, rows_by
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.spilled_rows import FrozenSpill, SpilledRows
from ckpt_runtime.state.states import Key, RowBufferSpec

_NEW = -1


@dataclass(slots=True)
class _Chunk:
    """``size`` counts the rows that it was made with, ``stored`` those in its entry, ``living`` those that are left."""

    key_group: int
    number: int
    size: int
    stored: int
    living: int


class StoredRowBuffer(RowBuffer):
    """One side, which knows of each row whether the database has it, and in which chunk."""

    owner: SpillingRowBuffers

    def __init__(self, spec: RowBufferSpec, codec: ChunkCodec, spilled: SpilledRows, max_parallelism: int) -> None:
        self.codec = codec
        self.spilled = spilled
        self._max_parallelism = max_parallelism
        self._chunks: dict[int, _Chunk] = {}
        self._next_chunk = 0
        self._next_number = 0
        self._touched: set[int] = set()
        super().__init__(spec)

    def __len__(self) -> int:
        return self.at_hand + len(self.spilled)

    def _clear(self) -> None:
        super()._clear()
        rows = len(self._flags)
        self._groups: AnyArray = np.zeros(rows, dtype=np.int32)
        self._homes: AnyArray = np.zeros(rows, dtype=np.int32)
        self._positions: AnyArray = np.zeros(rows, dtype=np.uint32)
        self._noted: AnyArray = np.zeros(rows, dtype=np.uint8)

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

    def living_rows(self) -> tuple[AnyArray, pa.RecordBatch]:
        """Numbers and columns."""
        numbers = np.flatnonzero(self._flags[: self._rows.rows] & ALIVE).astype(np.int32)
        arrays = self.take(numbers, range(len(self.spec.schema)))
        return numbers, pa.RecordBatch.from_arrays(arrays, schema=self.spec.schema)

    def spill(self, numbers: AnyArray, rows: pa.RecordBatch, slots: AnyArray) -> None:
        """These rows, all of their keys, leave memory. What they were in it is removed by the next compaction."""
        if not len(numbers):
            return
        # Stable: rows of one key stay in the order in which they came.
        order = np.argsort(slots, kind="stable")
        slots, numbers = slots[order], numbers[order]
        matched = (self._flags[numbers] & MATCHED) >> 1
        stored = to_stored(self.spec, rows.take(arrow_from_numpy(pa.int64(), order)), matched)
        starts = np.flatnonzero(np.diff(slots, prepend=slots[0].astype(np.int64) - 1))
        self.spilled.put(stored, starts, self._times[numbers] if self.spec.event_time else self._times)
        self._flags[numbers] = 0
        self.dead += len(numbers)

    def expired(self, bound: int) -> Iterator[AnyArray]:
        """What is not in memory is taken there, some at a time."""
        yield self.expire(bound)
        for keys in self.spilled.due(bound):
            self.owner.slots_of(keys)
            yield self.expire(bound)
            self.owner.compact_if_due()

    def restore_chunk(self, key_group: int, number: int, positions: AnyArray, flags: AnyArray) -> None:
        """The latest rows are those of this chunk."""
        rows = self._rows.rows
        first = rows - len(positions)
        size = max(len(flags), 1 + int(positions.max(initial=0)))  # written anew, a chunk has gaps and no flags
        chunk = self._add_chunk(_Chunk(key_group, number, size, size, len(positions)))
        self._homes[first:rows] = chunk
        self._positions[first:rows] = positions
        self._noted[first:rows] = self._flags[first:rows]
        self._next_number = max(self._next_number, number + 1)

    def restore_as_new(self, key_group: int, number: int) -> None:
        """The latest rows were those of this chunk, and will be in another one."""
        self._touched.add(self._add_chunk(_Chunk(key_group, number, 0, 0, 0)))
        self._next_number = max(self._next_number, number + 1)

    def _add_chunk(self, chunk: _Chunk) -> int:
        self._chunks[self._next_chunk] = chunk
        self._next_chunk += 1
        return self._next_chunk - 1

    def _note(self) -> None:
        """Sees which rows that the database has have matched or ended since the last time."""
        rows = self._rows.rows
        changed = np.flatnonzero((self._flags[:rows] != self._noted[:rows]) & (self._homes[:rows] != _NEW))
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
        rows = self._rows.rows
        new = np.flatnonzero((self._homes[:rows] == _NEW) & ((self._flags[:rows] & ALIVE) != 0))
        if not len(new) and not self._touched:
            return None
        made = self._new_chunks(new)
        self._noted[new] = self._flags[new]
        # Flags change in place, so they are copied; homes and positions of these rows never change.
        frozen = FrozenChunks(
            self.spec, self.codec, self._rows.segments, self._flags[:rows].copy(), self._homes[:rows],
            self._positions[:rows], made,
        )  # fmt: skip
        for number in sorted(self._touched):
            chunk = self._chunks[number]
            if not chunk.living:
                frozen.ended.append(self._chunks.pop(number))
            # Less than half is left: it is written anew. Of others only the flags are, which are a byte per row.
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
        for group, numbers in rows_by(self._groups, new):
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
        for home, own in rows_by(self._homes, rows):
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


class FrozenRowChanges:
    """Of chunks, and of what is not in memory."""

    def __init__(self, chunks: FrozenChunks | None, spilled: FrozenSpill | None) -> None:
        self._chunks = chunks
        self._spilled = spilled

    def puts(self) -> Iterator[tuple[bytes, bytes]]:
        if self._chunks is not None:
            yield from self._chunks.puts()
        if self._spilled is not None:
            yield from self._spilled.counts

    def deletes(self) -> Iterator[bytes]:
        if self._chunks is not None:
            yield from self._chunks.deletes()
        if self._spilled is not None:
            yield from self._spilled.gone

    def release(self) -> None:
        if self._chunks is not None:
            self._chunks.release()
        if self._spilled is not None:
            self._spilled.is_stored = True


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

    def freeze(self) -> FrozenRowChanges | None:
        """What has changed since the last call, in the time of a byte per row and of the new rows' order."""
        chunks, spilled = self._side.freeze_changes(), self._side.spilled.freeze()
        return None if chunks is None and spilled is None else FrozenRowChanges(chunks, spilled)

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Nothing has to be read."""

    def maintain(self, budget: int) -> None:
        """Joins say themselves when to compact."""


class SpillingRowBuffers(RowBuffers):
    """All sides; about ``capacity`` rows of them are in memory, and those of the keys of a batch."""

    sides: list[StoredRowBuffer]  # type: ignore[assignment]

    def __init__(
        self,
        specs: Sequence[RowBufferSpec],
        make: Callable[[RowBufferSpec], StoredRowBuffer],
        database: Database,
        capacity: int,
    ) -> None:
        super().__init__(specs, make)
        self._database = database
        self._capacity = capacity
        self._used: AnyArray = np.zeros(1024, dtype=np.uint8)
        """Slots of keys that have come since rows were spilled last."""
        self._has_spilled = False
        for side in self.sides:
            side.owner = self

    def restore(self, owned: KeyGroupRange) -> None:
        """Loads what the database has in chunks. Raises CorruptStateError."""
        for side in self.sides:
            side.spilled.restore()
        for side in self.sides:
            for group in range(owned.first, owned.last + 1):
                entries = chunks_of(self._database.scan(state_prefix(group, side.codec.id)))
                for number, rows, positions, flags in side.codec.decode(entries):
                    self.load(side, rows)
                    if self._has_spilled:  # earlier rows of these keys may have been taken back, and come first
                        side.restore_as_new(group, number)
                    else:
                        side.restore_chunk(group, number, positions, flags)
                    self.compact_if_due()

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        known = self._index.size
        slots = super().slots_of(keys)
        size = self._index.size
        if size > len(self._used):
            self._used = grown(self._used, capacity_for(len(self._used), size), known)
        self._used[slots] = 1
        if size > known and any(len(side.spilled) for side in self.sides):
            self._take_back(np.arange(known, size, dtype=np.uint32))
        return slots

    def _take_back(self, slots: AnyArray) -> None:
        """The rows of keys that are new in memory."""
        keys = self._index.freeze().arrays(slots)
        for side in self.sides:
            if len(side.spilled):
                for places, stored in side.spilled.take(keys):
                    batch, matched = side.loaded(stored)
                    side.append(batch, read_only(slots[places]), matched)

    def take_all(self) -> Iterator[pa.RecordBatch]:
        at_hand = super().take_all()
        spilled = [(side, side.spilled.take_all()) for side in self.sides if len(side.spilled)]
        return chain(at_hand, (side.loaded(stored)[0] for side, parts in spilled for stored in parts))

    def compact_if_due(self) -> None:
        super().compact_if_due()
        rows = sum(side.at_hand for side in self.sides)
        # Behind a snapshot whose writer has not come to it, a write would have to do that work first.
        if rows > self._capacity and (not self._database.pending or rows > 2 * self._capacity):
            self._spill()

    def _spill(self) -> None:
        """Rows of keys that have not come lately leave memory; of all keys, when too many have come."""
        self._has_spilled = True
        living = []
        for side in self.sides:
            numbers, rows = side.living_rows()
            living.append((side, numbers, rows, self._index.slots_of([rows.column(key) for key in side.spec.keys])))
        if 2 * sum(int(self._used[slots].sum()) for _, _, _, slots in living) > self._capacity:
            self._used[:] = 0
        for side, numbers, rows, slots in living:
            cold = self._used[slots] == 0
            side.spill(numbers[cold], rows.filter(pa.array(cold)), slots[cold])
        self._compact()

    def _compact(self) -> None:
        super()._compact()
        self._used = np.zeros(capacity_for(1024, self._index.size), dtype=np.uint8)
