"""At most one row per key, read and replaced for many keys in one call: the state of processors in Arrow.

:class:`ColumnTable` keeps columns of fixed width by the slot of their key: one take reads, one scatter writes, and no
row is moved or linked. A snapshot freezes the columns in constant time; until it has copied them, the old values of
slots that change are kept. Keys whose rows are removed keep their slots until they outnumber the others; then all rows
get new slots. :class:`SingleRows` does the same with row buffers, for columns of variable width and for RocksDB.

Both have the stored form of row buffers, so that each restores what the other has written. A snapshot's part numbers
all rows of a table 0, because a key has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import stored_rows
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy, int64_column
from ckpt_runtime.state.hashing import key_groups_of
from ckpt_runtime.state.kernels.aggregate_kernels import gather
from ckpt_runtime.state.kernels.hash_kernels import scatter
from ckpt_runtime.state.memory.changes import Changed, FrozenColumns, SealedChanges, SlotNotes
from ckpt_runtime.state.memory.key_index import FrozenKeys, capacity_for, grown, key_index
from ckpt_runtime.state.memory.parts import PartWriter
from ckpt_runtime.state.memory.row_buffer import rows_descriptor, stored_schema
from ckpt_runtime.state.states import KeyedRows, RowBufferSpec
from ckpt_runtime.state.stored_rows import ROW, StateWriter, fixed_array, fixed_value, is_fixed

_FIRST_CAPACITY = 1024
_SPARE_SLOTS = 16_384
_BLOCK = 4096
"""Slots for which one time is kept: no row of theirs expires earlier."""
_NEVER = (1 << 63) - 1
_NO_FLAGS: AnyArray = np.empty(0, dtype=np.uint8)


class ColumnTable:
    """See the module docstring. Make one for a spec of which :meth:`takes` is true. One thread owns it."""

    def __init__(self, spec: RowBufferSpec) -> None:
        self.spec = spec
        self._fields = [field for field in spec.schema if field.name not in spec.keys]
        names = [field.name for field in self._fields]
        self._timer = None if spec.event_time is None else names.index(spec.event_time)
        self._renumber(0)

    @staticmethod
    def takes(spec: RowBufferSpec) -> bool:
        """Whether all columns but the key's have a fixed width."""
        return all(is_fixed(field.type) for field in spec.schema if field.name not in spec.keys)

    def _renumber(self, rows: int) -> None:
        """Begins with an empty table with room for some rows; frozen ones keep the columns that were there."""
        capacity = capacity_for(_FIRST_CAPACITY, rows)
        self._index = key_index(self.spec.key_schema)
        self._values: list[AnyArray] = [np.zeros(capacity, dtype=np.int64) for _ in self._fields]
        self._nulls: list[AnyArray] = [_NO_FLAGS for _ in self._fields]
        self._alive: AnyArray = np.zeros(capacity, dtype=np.uint8)
        self._living = 0
        self._earliest: AnyArray = np.full(-(-capacity // _BLOCK), _NEVER, dtype=np.int64)
        self._notes = SlotNotes()

    def __len__(self) -> int:
        return self._living

    def stored_schema(self) -> pa.Schema:
        return stored_schema(self.spec)

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        before = self._index.size
        slots = read_only(self._index.slots_of(keys))
        size = self._index.size
        capacity = capacity_for(len(self._alive), size)
        if capacity != len(self._alive):
            self._alive = grown(self._alive, capacity, before)
            self._values = [grown(values, capacity, before) for values in self._values]
            self._nulls = [grown(nulls, capacity, before) if nulls.size else nulls for nulls in self._nulls]
            earliest = np.full(-(-capacity // _BLOCK), _NEVER, dtype=np.int64)
            earliest[: len(self._earliest)] = self._earliest
            self._earliest = earliest
        return slots

    def take(self, slots: AnyArray) -> list[pa.Array]:
        alive: AnyArray = np.empty(len(slots), dtype=np.uint8)
        gather(read_only(self._alive), slots, alive)
        all_alive = bool(alive.all())
        found = []
        for field, values, nulls in zip(self._fields, self._values, self._nulls, strict=True):
            taken = np.empty(len(slots), dtype=np.uint64)
            gather(read_only(values.view(np.uint64)), slots, taken)
            valid = None if all_alive else alive
            if nulls.size:
                valid = np.empty(len(slots), dtype=np.uint8)
                gather(read_only(nulls), slots, valid)
                valid = alive & (valid ^ 1)
            found.append(fixed_array(field.type, taken.view(np.int64), valid))
        return found

    def put(
        self, keys: list[pa.Array], slots: AnyArray, columns: list[pa.Array] | None, living: AnyArray | None = None
    ) -> None:
        if columns is None:
            return
        self._notes.mark(slots, self._index.size)
        for at, column in enumerate(columns):
            values = fixed_value(column).values
            scatter(read_only(values.view(np.uint64)), slots, self._values[at].view(np.uint64))
            if column.null_count and not self._nulls[at].size:
                self._nulls[at] = np.zeros(len(self._alive), dtype=np.uint8)
            if self._nulls[at].size:
                self._nulls[at][slots] = np.asarray(column.is_null())
        self._living -= int(np.count_nonzero(self._alive[slots]))
        self._alive[slots] = 1 if living is None else living
        self._living += len(slots) if living is None else int(np.count_nonzero(living))
        if self._timer is not None:
            np.minimum.at(self._earliest, slots // _BLOCK, int64_column(columns[self._timer]).values)

    def expired(self, bound: int) -> Iterator[list[pa.Array]]:
        assert self._timer is not None
        times, found = self._values[self._timer], []
        for block in np.flatnonzero(self._earliest <= bound).tolist():
            first, last = block * _BLOCK, min((block + 1) * _BLOCK, self._index.size)
            alive = self._alive[first:last] == 1
            due = alive & (times[first:last] <= bound)
            self._earliest[block] = times[first:last][alive & ~due].min(initial=_NEVER)
            found.append(np.flatnonzero(due) + first)
        slots = read_only(np.concatenate([np.empty(0, dtype=np.int64), *found]).astype(np.uint32))
        if len(slots):
            columns = [*self._index.freeze().arrays(slots), *self.take(slots)]
            self._notes.mark(slots, self._index.size)
            self._alive[slots] = 0
            self._living -= len(slots)
            yield columns

    def compact_if_due(self) -> None:
        if self._index.size <= 2 * self._living + _SPARE_SLOTS:
            return
        slots = read_only(np.flatnonzero(self._alive[: self._index.size]).astype(np.uint32))
        keys, values, nulls = self._index.freeze().arrays(slots), self._values, self._nulls
        self._renumber(len(slots))
        if len(slots):
            self.slots_of(keys)  # in the order of the keys, because all are new
        for at, column in enumerate(values):
            self._values[at][: len(slots)] = column[slots]
            if nulls[at].size:
                self._nulls[at] = np.zeros(len(self._alive), dtype=np.uint8)
                self._nulls[at][: len(slots)] = nulls[at][slots]
        self._alive[: len(slots)] = 1
        self._living = len(slots)
        if self._timer is not None and len(slots):
            starts = np.arange(0, len(slots), _BLOCK)
            self._earliest[: len(starts)] = np.minimum.reduceat(self._values[self._timer][: len(slots)], starts)

    def load(self, stored: pa.RecordBatch) -> None:
        """Adds restored rows of :meth:`stored_schema`."""
        width = len(self.spec.keys)
        keys = stored.columns[:width]
        self.put(keys, self.slots_of(keys), stored.columns[width:-1])

    def freeze(self) -> FrozenColumnTable:
        """The synchronous part of a snapshot, in constant time."""
        nullable = [at for at, nulls in enumerate(self._nulls) if nulls.size]
        arrays = [self._alive, *self._values, *(self._nulls[at] for at in nullable)]
        frozen = self._notes.freeze(self._index.size, arrays)
        return FrozenColumnTable(self.spec, self._fields, nullable, self._index.freeze(), frozen)

    def seal(self) -> SealedChanges | None:
        """The changes since the last seal; None after a restore and after slots were renumbered."""
        return self._notes.seal(self._index.size)


@dataclass(frozen=True, slots=True)
class FrozenColumnTable:
    """A table as of one moment."""

    spec: RowBufferSpec
    fields: Sequence[pa.Field]
    nullable: Sequence[int]
    keys: FrozenKeys
    columns: FrozenColumns

    def _taken(self, slots: AnyArray | None = None) -> tuple[pa.Table, AnyArray]:
        """Stored rows of all slots, or of some ascending ones, and which of them there are. To be called once."""
        alive, *taken = self.columns.take(slots)
        nulls = dict(zip(self.nullable, taken[len(self.fields) :], strict=True))
        arrays = self.keys.arrays(slots)
        for at, field in enumerate(self.fields):
            arrays.append(fixed_array(field.type, taken[at], nulls[at] ^ 1 if at in nulls else None))
        arrays.append(pa.repeat(pa.scalar(False), len(alive)))
        return pa.Table.from_arrays(arrays, schema=stored_schema(self.spec)), alive.astype(bool)

    @property
    def numbers(self) -> int | None:
        return self.keys.size

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None:
        """The asynchronous part: leaves out removed rows, sorts by key group, writes."""
        rows, alive = self._taken()
        groups = key_groups_of(np.ascontiguousarray(self.keys.hashes()), max_parallelism)
        if not alive.all():
            rows, groups = rows.filter(pa.array(alive)), groups[alive]
        writer.write_table(self.spec.name, rows_descriptor(self.spec), rows, groups, owned)

    def write_part(
        self, writer: PartWriter, changed: Changed | None, owned: KeyGroupRange, max_parallelism: int
    ) -> None:
        """Writes the rows of changed slots, or all, and which keys have none any more."""
        # Parts before the latest renumbering have numbers of other slots. What they have has been written again.
        slots = None if changed is None else changed[changed < self.keys.size]  # type: ignore[index,operator]
        rows, alive = self._taken(slots)
        rows = rows.append_column(ROW, arrow_from_numpy(pa.int64(), np.zeros(rows.num_rows, dtype=np.int64)))
        name, some = self.spec.name, not alive.all()
        living = rows.filter(pa.array(alive)) if some else rows
        if living.num_rows:
            writer.write_rows(name, living, owned, max_parallelism)
        if some and slots is not None:
            keys = [each for each in rows.schema.names if each.startswith(stored_rows.KEY_PREFIX)]
            gone = rows.filter(pa.array(~alive)).select([*keys, ROW])
            writer.write_removed(name, gone, owned, max_parallelism)

    def release(self) -> None:
        """Releases the frozen columns, so that the table no longer keeps old values for them."""
        self.columns.release()


class SingleRows:
    """The same with a row buffer: reading removes the rows of keys, and writing adds them again."""

    def __init__(self, buffers: KeyedRows) -> None:
        self._buffers = buffers
        self._buffer = buffers.sides[0]
        schema, keys = self._buffer.spec.schema, self._buffer.spec.keys
        self._places = [schema.get_field_index(key) for key in keys]
        self._wanted = [at for at, name in enumerate(schema.names) if name not in keys]
        self._taken: tuple[list[pa.Array], AnyArray] = [], _NO_FLAGS

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        return read_only(self._buffers.slots_of(keys))

    def take(self, slots: AnyArray) -> list[pa.Array]:
        rows = self._buffer.consume(slots)
        known = rows >= 0
        columns = self._buffer.take(rows[known], self._wanted)
        if not known.all():
            places = pa.array(np.cumsum(known) - 1, mask=~known)
            columns = [column.take(places) for column in columns]
        self._taken = columns, known
        return columns

    def put(
        self, keys: list[pa.Array], slots: AnyArray, columns: list[pa.Array] | None, living: AnyArray | None = None
    ) -> None:
        if columns is None:
            columns, living = self._taken
        if living is not None and not living.all():
            mask = pa.array(living, pa.bool_())
            keys, columns = ([column.filter(mask) for column in part] for part in (keys, columns))
            slots = slots[living]
        if len(slots):
            schema = self._buffer.spec.schema
            arrays = dict(zip([*self._places, *self._wanted], [*keys, *columns], strict=True))
            rows = pa.RecordBatch.from_arrays([arrays[at] for at in range(len(schema))], schema=schema)
            self._buffer.append(rows, read_only(slots), np.zeros(len(slots), dtype=np.uint8))

    def expired(self, bound: int) -> Iterator[list[pa.Array]]:
        for rows in self._buffer.expired(bound):
            yield self._buffer.take(rows, [*self._places, *self._wanted])

    def compact_if_due(self) -> None:
        self._buffers.compact_if_due()
