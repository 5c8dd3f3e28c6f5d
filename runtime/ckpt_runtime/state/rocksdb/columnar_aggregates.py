"""Aggregates whose rows are in the database, with a write-back cache that is updated like the in-memory table.

The cache is two tables. The younger one takes all updates; keys that it lacks are moved from the older one, copied from
a file, or all read from the database in one call. When the younger table reaches the capacity, it becomes the older
one, and the previous older one becomes a file: its changed rows are in the database by then, because each batch writes
some of them, so that no batch has to write all of them. The latest files are kept, and hold nothing that the database
does not hold. They are mapped into memory, where a row is found in a tenth of the time that RocksDB needs. A key may be
in several files; the latest one has its present row. A filter of the keys that left both tables identifies most new
keys, which need no read. Keys that the database has from a restored snapshot are added to the filter step by step: a
few for each read that found nothing. A job without new keys pays nothing for this. The subtask's thread owns the cache.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

import numpy as np
import pyarrow as pa

from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.memory.aggregate_table import AggregateTable, FrozenAggregateTable
from ckpt_runtime.state.memory.key_index import capacity_for, grown
from ckpt_runtime.state.rocksdb.catalog import StateEntry
from ckpt_runtime.state.rocksdb.columnar_rows import ColumnarCodec
from ckpt_runtime.state.rocksdb.database import Database, KeyFilter, UnknownKeys
from ckpt_runtime.state.states import Key

_WRITTEN_PER_NEW_KEY = 2
"""Speed at which changed rows of the older table are written, relative to the speed at which the younger one fills."""
_LEARNED_PER_READ = 2
"""Keys of a snapshot that are added to the filter per read that found nothing; they cost about as much as that read."""
_LEAST_LEARNED = 256
"""Minimum number of keys per step: a seek in the database costs as much as some dozens of keys."""
_FILES = 16
"""How many files of evicted rows are kept. Each costs a look at its filter for every key that may be in one."""
_FILTER_BYTES_PER_KEY = 1.25
"""One key in a hundred is looked up in vain."""
_PATIENCE = 1.5
"""The younger table may grow to this multiple of its capacity before it waits for snapshots that are not written."""


class _Generation:
    """A table, and which of its rows (1) are neither in the database nor in a pending snapshot."""

    def __init__(self, table: AggregateTable) -> None:
        self.table = table
        self.dirty: AnyArray = np.zeros(1024, dtype=np.uint8)

    def __len__(self) -> int:
        return len(self.table)

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        """The slots of keys; keys that are not in the table yet get new ones."""
        before = len(self)
        slots = self.table.slots_of(keys)
        capacity = capacity_for(len(self.dirty), len(self))
        if capacity != len(self.dirty):
            self.dirty = grown(self.dirty, capacity, before)
        return slots

    def take_dirty(self) -> AnyArray:
        """The slots of changed rows; ownership passes to the caller."""
        slots = np.flatnonzero(self.dirty)
        self.dirty[slots] = 0
        return slots


class _TableFile:
    """A table of which only a filter of its keys, made of ``hashes``, is in memory.

    The file has no name, and is deleted with this object.
    """

    def __init__(self, table: AggregateTable, hashes: AnyArray, directory: Path) -> None:
        self._filter = KeyFilter(int(_FILTER_BYTES_PER_KEY * len(table)))
        self._filter.add(hashes)
        self._table = table
        with TemporaryFile(dir=directory) as file:
            # A full disk is an error here. It would end the process if the mapped pages had no place yet.
            os.posix_fallocate(file.fileno(), 0, table.nbytes)
            self._mapped = mmap.mmap(file.fileno(), 0)
            self._mapped.madvise(mmap.MADV_RANDOM)  # from the disk, a row needs no more than its own pages
            self._used = 0
            table.finish(self._moved)
            file.truncate(self._used)

    def _moved(self, array: AnyArray) -> AnyArray:
        moved: AnyArray = np.ndarray(array.shape, array.dtype, self._mapped, self._used)
        moved[:] = array
        self._used += -(-array.nbytes // 8) * 8  # with room for further keys, each array has a multiple of 8 bytes
        return moved

    def rows(self, keys: list[pa.Array], hashes: AnyArray, places: AnyArray) -> tuple[AnyArray, pa.RecordBatch]:
        """Those places of keys at which there is a key that it has, and the keys' stored rows."""
        places = places[self._filter.may_hold(hashes[places])]
        taken = pa.array(places)
        slots = self._table.find([key.take(taken) for key in keys])
        found = slots >= 0
        return places[found], self._table.rows(slots[found])


class FrozenAggregates:
    """Changed rows as of one moment."""

    def __init__(self, codec: ColumnarCodec, parts: Sequence[tuple[FrozenAggregateTable, AnyArray]]) -> None:
        self._codec = codec
        self._parts = parts
        self._rows: list[pa.RecordBatch] | None = None

    def puts(self) -> Iterator[tuple[bytes, bytes]]:
        """Entries for the database; a retry yields the same ones."""
        if self._rows is None:
            rows = pa.concat_tables(frozen.rows(slots) for frozen, slots in self._parts)
            # All at once: RocksDB adds entries that are ordered as a whole in a third of the time.
            self._rows = rows.combine_chunks().to_batches()
        for rows in self._rows:
            yield from self._codec.entries(rows)

    def deletes(self) -> Iterable[bytes]:
        """No keys: aggregates are never removed."""
        return ()

    def release(self) -> None:
        for frozen, _ in self._parts:
            frozen.release()
        self._parts, self._rows = (), []


class CachedAggregates:
    """The state ``entry`` of a database; the ``capacity`` keys used last stay in memory, and up to twice as many more.

    ``forgotten`` is an empty filter, and ``unknown`` are the keys that the database already has.
    """

    def __init__(
        self,
        table: AggregateTable,
        entry: StateEntry,
        codec: ColumnarCodec,
        database: Database,
        capacity: int,
        forgotten: KeyFilter,
        unknown: UnknownKeys | None = None,
    ) -> None:
        self._descriptors = entry.descriptors
        self._current = entry.descriptor
        self._codec = codec
        self._database = database
        self._capacity = capacity
        self._young = _Generation(table)
        self._old: _Generation | None = None
        self._files: deque[_TableFile] = deque(maxlen=_FILES)
        """From the latest to the earliest."""
        self._forgotten = forgotten
        self._unknown = unknown
        self._in_vain = 0
        self._unwritten: AnyArray = np.empty(0, dtype=np.int64)

    def _new_table(self) -> AggregateTable:
        """An empty table of these aggregates."""
        table = self._young.table
        return AggregateTable(table.uid, table.name, table.key_schema, table.aggregates)

    def stored_schema(self) -> pa.Schema:
        """Schema of stored rows."""
        return self._young.table.stored_schema()

    def is_like(self, table: AggregateTable) -> bool:
        """Whether both have the same key and aggregates."""
        return self._young.table.is_like(table)

    @property
    def nbytes(self) -> int:
        """The size of the tables in memory, without the database's own."""
        return sum(each.table.nbytes for each in (self._young, self._old) if each is not None)

    def update(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """See :class:`~ckpt_runtime.state.states.KeyedAggregates`."""
        young = self._young
        known = len(young)
        slots = young.slots_of([batch.column(name) for name in young.table.key_schema.names])
        new = len(young) - known
        if new:
            self._fetch(np.arange(known, known + new))
        young.dirty[slots] = 1
        result = young.table.add(slots, batch)
        # While a snapshot waits for its writer, a write would have to do that writer's work first.
        if new and not self._database.pending:
            self._write_old(_WRITTEN_PER_NEW_KEY * len(self._unwritten) * new // max(1, self._capacity - known))
        keys = len(young)
        if keys >= self._capacity and (not self._database.pending or keys >= _PATIENCE * self._capacity):
            self._age()
        return result

    def _fetch(self, new: AnyArray) -> None:
        """Fills the latest slots of the younger table with the existing rows of their keys."""
        young = self._young
        young.table.load_nothing()
        keys = young.table.keys_of(new)
        absent = np.ones(len(new), dtype=np.bool_)
        if self._old is not None:
            absent = self._move_from(self._old, keys, new)
        hashes = young.table.hashes_of(keys)
        if self._unknown is None:
            absent &= self._forgotten.may_hold(hashes)
        for file in self._files:
            found_at, rows = file.rows(keys, hashes, np.flatnonzero(absent))
            if len(found_at):
                young.table.load(self._current, rows)
                absent[found_at] = False
        if not absent.any():
            return
        # In key order, neighbours in the database are read together.
        keys, encoded = self._codec.ordered_keys([key.filter(pa.array(absent)) for key in keys])
        found = self._database.multi_get(encoded)
        for schema_id, rows in self._codec.rows(keys, found):
            young.table.load(self._descriptors[schema_id], rows)
        if self._unknown is not None:
            self._learn(self._unknown, found.count(None))

    def _learn(self, unknown: UnknownKeys, in_vain: int) -> None:
        self._in_vain += in_vain
        wanted = _LEARNED_PER_READ * self._in_vain
        if wanted < _LEAST_LEARNED:
            return
        self._in_vain = 0
        self._forgotten.add(unknown.hashes(wanted))
        if not unknown:
            self._unknown = None

    def _move_from(self, old: _Generation, keys: list[pa.Array], new: AnyArray) -> AnyArray:
        """Moves the rows that the older table has; returns which keys it lacks."""
        slots = old.table.find(keys)
        absent = slots < 0
        moved = slots[~absent]
        if len(moved):
            self._young.table.load(self._current, old.table.rows(moved))
            self._young.dirty[new[~absent]] = old.dirty[moved]
            old.dirty[moved] = 0
        return absent

    def _age(self) -> None:
        """Makes the younger table the older one, after all rows of the previous older one are in the database."""
        self._write_old(len(self._unwritten))
        # Snapshots' frozen rows of it are written, too: from here on reads of these keys go to the database.
        self._database.settle()
        if self._old is not None:
            hashes = self._old.table.hashes()
            self._forgotten.add(hashes)
            self._files.appendleft(_TableFile(self._old.table, hashes, self._database.directory))
        self._old = self._young
        self._unwritten = np.flatnonzero(self._old.dirty)
        self._young = _Generation(self._new_table())

    def _write_old(self, most: int) -> None:
        """Writes some of the older table's changed rows to the database."""
        if self._old is None or not len(self._unwritten):
            return
        slots, self._unwritten = self._unwritten[:most], self._unwritten[most:]
        slots = slots[self._old.dirty[slots] == 1]
        if len(slots):
            self._database.write(self._codec.entries(self._old.table.rows(slots)))
            self._old.dirty[slots] = 0

    def changes(self) -> list[FrozenAggregates]:
        """Takes the changed rows, in constant time except for a byte per key in memory."""
        generations = [self._young] if self._old is None else [self._old, self._young]
        parts = [(known.table.freeze(), slots) for known in generations if len(slots := known.take_dirty())]
        return [FrozenAggregates(self._codec, parts)] if parts else []

    def prefetch(self, keys: Iterable[Key]) -> None:
        """Does nothing: :meth:`update` reads the keys of its batch."""

    def maintain(self, budget: int) -> None:
        """Does nothing: :meth:`update` does the housekeeping."""
