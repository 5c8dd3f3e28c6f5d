"""Buffered rows whose changes are written to the database with snapshots: the state of joins and of gathered rows.

The rows in use are in memory, as in the in-memory backend (``memory/row_buffer.py``): a join matches and removes rows
there. The database holds them in chunks (``columnar_rows.py``): a snapshot writes chunks of the new rows, and flags of
rows that have matched or were removed.

When there are more rows than the memory limit, the rows of keys that were not used lately are spilled: their chunks no
longer count them, and ``spilled_rows.py`` keeps them in the database until they are taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.arrays import distinct, read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.kernels.row_buffer_kernels import ALIVE, MATCHED
from ckpt_runtime.state.memory.key_index import capacity_for, grown
from ckpt_runtime.state.memory.row_buffer import RowBuffer, RowBuffers, to_stored
from ckpt_runtime.state.rocksdb.codec import state_prefix
from ckpt_runtime.state.rocksdb.columnar_rows import ChunkCodec, chunks_of, rows_by
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.spilled_rows import FrozenSpill, SpilledRows
from ckpt_runtime.state.states import Key, RowBufferSpec

_NEW = -1


@dataclass(slots=True)
class _Chunk:
    """``size`` counts the rows that it was made with, ``stored`` those in its entry, ``living`` the live ones."""

    key_group: int
    number: int
    size: int
    stored: int
    living: int


class StoredRowBuffer(RowBuffer):
    """One side, which records for each row whether the database has it, and in which chunk."""

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

    def refill(self, parts: list[tuple[pa.RecordBatch, AnyArray]], slots: AnyArray) -> None:
        """Rows that stay in memory keep their places in the database; without parts, all rows are removed."""
        self._note()
        living = np.flatnonzero(self._flags[: self._rows.rows] & ALIVE)
        homes, positions = self._homes[living], self._positions[living]
        if not parts:
            self._end(homes)
            homes, positions = homes[:0], positions[:0]
        super().refill(parts, slots)
        rows = self._rows.rows
        self._homes[:rows] = homes
        self._positions[:rows] = positions
        self._noted[:rows] = self._flags[:rows]

    def living_rows(self) -> tuple[AnyArray, pa.RecordBatch]:
        """The numbers and the columns of the live rows in memory."""
        numbers = np.flatnonzero(self._flags[: self._rows.rows] & ALIVE).astype(np.int32)
        arrays = self.take(numbers, range(len(self.spec.schema)))
        return numbers, pa.RecordBatch.from_arrays(arrays, schema=self.spec.schema)

    def stored(self) -> Iterator[pa.RecordBatch]:
        """Rows that are not in memory are read, and stay where they are."""
        return chain(super().stored(), (self.loaded(stored)[0] for stored in self.spilled.all_rows()))

    def spill(self, numbers: AnyArray, rows: pa.RecordBatch, slots: AnyArray) -> None:
        """Moves these rows, all rows of their keys, to the database. The next compaction frees their memory."""
        if not len(numbers):
            return
        # Stable: rows of one key stay in order of arrival.
        order = np.argsort(slots, kind="stable")
        slots, numbers = slots[order], numbers[order]
        matched = (self._flags[numbers] & MATCHED) >> 1
        stored = to_stored(self.spec, rows.take(arrow_from_numpy(pa.int64(), order)), matched)
        starts = np.flatnonzero(np.diff(slots, prepend=slots[0].astype(np.int64) - 1))
        self.spilled.put(stored, starts, self._times[numbers] if self.spec.event_time else self._times)
        self._flags[numbers] = 0
        self.dead += len(numbers)

    def expired(self, bound: int) -> Iterator[AnyArray]:
        """Rows that are not in memory are first taken back, some at a time."""
        yield self.expire(bound)
        for keys in self.spilled.due(bound):
            self.owner.slots_of(keys)
            yield self.expire(bound)
            self.owner.compact_if_due()

    def restore_chunk(self, key_group: int, number: int, positions: AnyArray, flags: AnyArray) -> None:
        """Records that the latest rows are those of this chunk."""
        rows = self._rows.rows
        first = rows - len(positions)
        size = max(len(flags), 1 + int(positions.max(initial=0)))  # a rewritten chunk has gaps and no flags
        chunk = self._add_chunk(_Chunk(key_group, number, size, size, len(positions)))
        self._homes[first:rows] = chunk
        self._positions[first:rows] = positions
        self._noted[first:rows] = self._flags[first:rows]
        self._next_number = max(self._next_number, number + 1)

    def restore_as_new(self, key_group: int, number: int) -> None:
        """Records that the latest rows were those of this chunk, and will be written in another one."""
        self._touched.add(self._add_chunk(_Chunk(key_group, number, 0, 0, 0)))
        self._next_number = max(self._next_number, number + 1)

    def _add_chunk(self, chunk: _Chunk) -> int:
        self._chunks[self._next_chunk] = chunk
        self._next_chunk += 1
        return self._next_chunk - 1

    def _note(self) -> None:
        """Finds the rows in the database that have matched or were removed since the last call."""
        rows = self._rows.rows
        changed = np.flatnonzero((self._flags[:rows] != self._noted[:rows]) & (self._homes[:rows] != _NEW))
        self._touched.update(distinct(self._homes[changed]).tolist())
        self._end(self._homes[changed[self._flags[changed] & ALIVE == 0]])
        self._noted[changed] = self._flags[changed]

    def _end(self, homes: AnyArray) -> None:
        """Counts down the live rows of these chunks, by one for each entry."""
        for chunk, rows in zip(*(part.tolist() for part in np.unique(homes, return_counts=True)), strict=True):
            if chunk != _NEW:
                self._chunks[chunk].living -= rows
                self._touched.add(chunk)

    def changes(self) -> list[FrozenChunks | FrozenSpill]:
        """The changes since the last call; it copies a byte per row and sorts the new rows."""
        return [*self._changed_chunks(), *self.spilled.changes()]

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Does nothing: rows are read when their slots are asked for."""

    def maintain(self, budget: int) -> None:
        """Does nothing: joins themselves call for compaction."""

    def _changed_chunks(self) -> list[FrozenChunks]:
        self._note()
        rows = self._rows.rows
        new = np.flatnonzero((self._homes[:rows] == _NEW) & ((self._flags[:rows] & ALIVE) != 0))
        if not len(new) and not self._touched:
            return []
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
            # If less than half is live, the chunk is rewritten. Otherwise only its flags are, which are a byte per row.
            elif 2 * chunk.living < chunk.stored:
                frozen.rewritten[number] = chunk
                chunk.stored = chunk.living
            else:
                frozen.flagged[number] = chunk
        self._touched.clear()
        return [frozen]

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


@dataclass(slots=True)
class FrozenChunks:
    """The changes of one side up to one moment. ``homes`` and ``positions`` of these rows never change.

    ``made`` are new chunks with the numbers of their rows.
    """

    spec: RowBufferSpec
    codec: ChunkCodec
    segments: Sequence[pa.RecordBatch]
    flags: AnyArray
    homes: AnyArray
    positions: AnyArray
    made: list[tuple[_Chunk, AnyArray]]
    ended: list[_Chunk] = field(default_factory=list)
    rewritten: dict[int, _Chunk] = field(default_factory=dict)
    flagged: dict[int, _Chunk] = field(default_factory=dict)

    def puts(self) -> Iterator[tuple[bytes, bytes]]:
        """Entries for the database."""
        table = pa.Table.from_batches(self.segments, self.spec.schema)
        for chunk, rows in self.made:
            yield self.codec.keys(chunk.key_group, chunk.number)[0], self._encoded(table, rows)
        changed = {**self.rewritten, **self.flagged}
        rows = np.flatnonzero((self.flags & ALIVE).astype(bool) & np.isin(self.homes, list(changed)))
        for home, own in rows_by(self.homes, rows):
            chunk = changed[home]
            key, flags_key = self.codec.keys(chunk.key_group, chunk.number)
            if home in self.rewritten:
                yield key, self._encoded(table, own)
            else:
                flags = np.zeros(chunk.size, dtype=np.uint8)
                flags[self.positions[own]] = self.flags[own]
                yield flags_key, self.codec.encode_flags(flags)

    def _encoded(self, table: pa.Table, rows: AnyArray) -> bytes:
        taken = table.take(arrow_from_numpy(pa.int64(), rows)).combine_chunks().to_batches()
        batch = taken[0] if len(taken) == 1 else pa.concat_batches(taken)
        stored = to_stored(self.spec, batch, (self.flags[rows] & MATCHED) >> 1)
        return self.codec.encode_rows(stored, self.positions[rows])

    def deletes(self) -> Iterator[bytes]:
        """Keys to delete from the database."""
        for chunk in self.ended:
            yield from self.codec.keys(chunk.key_group, chunk.number)
        for chunk in self.rewritten.values():
            yield self.codec.keys(chunk.key_group, chunk.number)[1]

    def release(self) -> None:
        """Releases the columns."""
        self.segments = ()


class SpillingRowBuffers(RowBuffers):
    """All sides; about ``capacity`` of their rows are in memory, plus the rows of a batch's keys."""

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
        """1 for the slots of keys that were used since rows were last spilled."""
        self._has_spilled = False
        for side in self.sides:
            side.owner = self

    def restore(self, owned: KeyGroupRange) -> None:
        """Loads the chunks of the database. Raises CorruptStateError."""
        for side in self.sides:
            side.spilled.restore()
        for side in self.sides:
            for group in range(owned.first, owned.last + 1):
                entries = chunks_of(self._database.scan(state_prefix(group, side.codec.id)))
                for number, rows, positions, flags in side.codec.decode(entries):
                    self.load(side, rows)
                    if self._has_spilled:  # earlier rows of these keys may have been taken back, and precede these
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
        """Takes back the spilled rows of keys that are new in memory."""
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
        # While a snapshot waits for its writer, a write would have to do that writer's work first.
        if rows > self._capacity and (not self._database.pending or rows > 2 * self._capacity):
            self._spill()

    def _spill(self) -> None:
        """Spills the rows of keys that were not used lately; the rows of all keys, when too many were used."""
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

    def _compact(self, *, keeps_keys: bool = False) -> None:
        super()._compact(keeps_keys=keeps_keys)
        self._used = np.zeros(capacity_for(1024, self._index.size), dtype=np.uint8)
