"""Buffered rows per key, for several inputs that are joined by key: the state of a join.

Each side keeps its rows in order of arrival, as columns. The sides share the index from keys to slots, so that the keys
of a batch are looked up once, both for finding matches and for storing. Rows are removed by event time, or when they
match. A snapshot shares all columns and copies one byte per row. Memory is compacted when removed rows outnumber the
live ones. One thread owns the buffers; frozen ones may go to another.

Columns are appended a batch at a time, read by row number, and never changed. Small batches are merged as they
accumulate, eight at a time. Larger ones are kept as they arrive: copying their text costs more than all the rest of
adding rows that are never read, such as the bids that wait for an auction. They are merged when reading from many
segments has cost about as much as that. A snapshot shares the segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import stored_rows
from ckpt_runtime.state.arrays import distinct, read_only
from ckpt_runtime.state.columns import (
    AnyArray,
    arrow_from_numpy,
    bytes_array,
    bytes_column,
    int64_column,
    is_bytes_like,
    plain,
    unsigned_values,
)
from ckpt_runtime.state.errors import StateError, StateSchemaError, schema_mismatch
from ckpt_runtime.state.kernels import row_buffer_kernels as kernels
from ckpt_runtime.state.memory.changes import Changed, SealedChanges, changed_rows
from ckpt_runtime.state.memory.key_index import capacity_for, grown, key_index
from ckpt_runtime.state.memory.keyed_state import write_batches
from ckpt_runtime.state.memory.parts import PartWriter
from ckpt_runtime.state.states import RowBufferSpec
from ckpt_runtime.state.stored_rows import ROW, StateWriter

_MERGED_ROWS = 1 << 16
_MERGED_BYTES = 1 << 28
_SMALL_ROWS, _SMALL_BYTES = 1 << 13, 1 << 18
"""A segment of fewer rows and bytes is merged with others of its size without being read. A full buffer is larger."""
_AT_ONCE = 8
_READS_OF_COPY = 16
"""Reading from so many segments costs about as much as copying one of 1 MiB."""


@dataclass(frozen=True, slots=True)
class _Part:
    """The wanted rows of one segment: their numbers inside of it, and their places in the result."""

    segment: pa.RecordBatch
    places: AnyArray
    inside: AnyArray


class RowSegments:
    """Rows ``0 .. rows - 1`` of ``schema``."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.rows = 0
        self._segments: list[pa.RecordBatch] = []
        self._levels: list[int | None] = []
        self._ends: AnyArray = read_only(np.empty(0, dtype=np.int64))
        self._reads = 0

    @property
    def segments(self) -> tuple[pa.RecordBatch, ...]:
        return tuple(self._segments)

    def append(self, batch: pa.RecordBatch) -> None:
        """Adds rows; the batch is kept or copied."""
        size = batch.nbytes
        if batch.get_total_buffer_size() > size + size // 2:
            batch = pa.concat_batches([batch])  # a part would keep the memory of the whole
        self.rows += batch.num_rows
        segments, levels = self._segments, self._levels
        segments.append(batch)
        levels.append(_level(batch.num_rows, size))
        merges = False
        while (level := levels[-1]) is not None:
            first = len(segments) - 1
            while first and (before := levels[first - 1]) is not None and before <= level:
                first -= 1
            if len(segments) - first < _AT_ONCE:
                break
            merged = pa.concat_batches(segments[first:])
            segments[first:], levels[first:] = [merged], [_level(merged.num_rows, merged.nbytes)]
            merges = True
        if merges:
            self._number()
        else:
            self._ends = read_only(np.append(self._ends, np.int64(self.rows)))

    def _number(self) -> None:
        self._ends = read_only(np.cumsum([segment.num_rows for segment in self._segments], dtype=np.int64))

    def _merge(self) -> None:
        """Merges segments up to the greatest size."""
        merged: list[pa.RecordBatch] = []
        run: list[pa.RecordBatch] = []
        rows = size = 0
        for segment in self._segments:
            if run and (rows + segment.num_rows > _MERGED_ROWS or size + segment.nbytes > _MERGED_BYTES):
                merged.append(run[0] if len(run) == 1 else pa.concat_batches(run))
                run, rows, size = [], 0, 0
            run.append(segment)
            rows += segment.num_rows
            size += segment.nbytes
        self._segments = [*merged, run[0] if len(run) == 1 else pa.concat_batches(run)]
        self._levels = [_level(segment.num_rows, segment.nbytes) for segment in self._segments]
        self._number()

    def take(self, rows: AnyArray, wanted: Sequence[int]) -> list[pa.Array]:
        """The columns at the positions ``wanted``, for row numbers in any order."""
        if len(self._segments) == 1:
            indices = arrow_from_numpy(pa.int32(), rows)
            return [pc.take(self._segments[0].column(index), indices, boundscheck=False) for index in wanted]
        bounds = np.zeros(len(self._segments) + 1, dtype=np.int64)
        places, inside = np.empty(len(rows), dtype=np.int32), np.empty(len(rows), dtype=np.int32)
        kernels.order_by_segment(read_only(rows.astype(np.int32, copy=False)), self._ends, bounds, places, inside)
        parts = [
            _Part(segment, read_only(places[start:end]), read_only(inside[start:end]))
            for segment, start, end in zip(self._segments, bounds[:-1], bounds[1:], strict=True)
            if start < end
        ]
        taken = [self._gathered(index, parts, len(rows)) for index in wanted]
        self._reads += len(parts)
        if self._reads > _READS_OF_COPY * len(self._segments):
            self._reads = 0
            self._merge()
        return taken

    def _gathered(self, index: int, parts: list[_Part], rows: int) -> pa.Array:
        """One column: plain numbers and bytes are written to their places; other values are taken, then reordered."""
        kind = self.schema.field(index).type
        found = [part.segment.column(index) for part in parts]
        views = [unsigned_values(column) for column in found]
        if parts and all(view is not None for view in views):
            out = np.empty(rows, dtype=views[0].dtype)  # type: ignore[union-attr]
            for view, part in zip(views, parts, strict=True):
                kernels.gather(view, part.inside, part.places, out)
            return arrow_from_numpy(kind, out)
        if parts and is_bytes_like(kind) and not any(column.null_count for column in found):
            return self._gathered_bytes(kind, found, parts, rows)
        taken = [
            pc.take(column, arrow_from_numpy(pa.int32(), part.inside), boundscheck=False)
            for column, part in zip(found, parts, strict=True)
        ]
        whole = pa.concat_arrays(taken) if taken else pa.nulls(0, kind)
        if len(taken) < 2:
            return whole
        inverse = np.empty(rows, dtype=np.int32)
        inverse[np.concatenate([part.places for part in parts])] = np.arange(rows, dtype=np.int32)
        return pc.take(whole, arrow_from_numpy(pa.int32(), inverse), boundscheck=False)

    @staticmethod
    def _gathered_bytes(kind: pa.DataType, found: list[pa.Array], parts: list[_Part], rows: int) -> pa.Array:
        views = [bytes_column(plain(column)) for column in found]
        ends = np.zeros(rows + 1, dtype=np.int64)
        for view, part in zip(views, parts, strict=True):
            kernels.gather_lengths(view.offsets, part.inside, part.places, ends)
        np.cumsum(ends, out=ends)
        out = np.empty(int(ends[-1]), dtype=np.uint8)
        for view, part in zip(views, parts, strict=True):
            kernels.gather_bytes(view.offsets, view.data, part.inside, part.places, read_only(ends), out)
        return bytes_array(kind, ends, out)


def _level(rows: int, size: int) -> int | None:
    """The logarithm of the rows of a small segment; None for larger ones. Arrow takes 8 µs to tell the bytes of one."""
    if rows >= _SMALL_ROWS or size >= _SMALL_BYTES:
        return None
    return (rows.bit_length() - 1) // 3


PAIRS_PER_CALL = 16_384
_FIRST_CAPACITY = 1024
_SPARE_ROWS = 16_384
_MOST_ROWS = (1 << 31) - 2
_MAX = (1 << 63) - 1
_NO_TIMES: AnyArray = read_only(np.empty(0, dtype=np.int64))
_NO_SLOTS: AnyArray = read_only(np.empty(0, dtype=np.uint32))


def stored_schema(spec: RowBufferSpec) -> pa.Schema:
    """Schema of stored batches: keys first, then the other columns."""
    values = pa.schema([field for field in spec.schema if field.name not in spec.keys])
    keys = stored_rows.prefixed(spec.key_schema, stored_rows.KEY_PREFIX)
    matched = pa.field(stored_rows.MATCHED, pa.bool_(), nullable=False)
    return pa.schema([*keys, *stored_rows.prefixed(values, stored_rows.VALUE_PREFIX), matched])


def _stored_columns(spec: RowBufferSpec) -> list[str]:
    return [*spec.keys, *(name for name in spec.schema.names if name not in spec.keys)]


def _ends(spec: RowBufferSpec) -> dict[str, Any]:
    """The descriptor's entry about when rows are removed."""
    return {"event_time": spec.event_time, "keeps_matched": spec.keeps_matched}


def rows_descriptor(spec: RowBufferSpec) -> dict[str, Any]:
    """The descriptor of one side."""
    return stored_rows.descriptor_of("rows", spec.key_schema, stored_schema(spec), rows=_ends(spec))


def to_stored(spec: RowBufferSpec, batch: pa.RecordBatch, matched: AnyArray) -> pa.RecordBatch:
    """Rows, and whether they have matched (0 or 1), in the stored form."""
    arrays = [batch.column(name) for name in _stored_columns(spec)]
    arrays.append(arrow_from_numpy(pa.uint8(), matched).cast(pa.bool_()))
    return pa.RecordBatch.from_arrays(arrays, schema=stored_schema(spec))


class RowBuffer:
    """The rows of one side. Slots come from :class:`RowBuffers`."""

    def __init__(self, spec: RowBufferSpec) -> None:
        self.spec = spec
        self._clear()

    def __len__(self) -> int:
        return self.at_hand

    @property
    def at_hand(self) -> int:
        """The number of live rows in memory."""
        return self._rows.rows - self.dead

    @property
    def nbytes(self) -> int:
        """The size of the rows in memory, those that are removed but not freed among them."""
        return sum(segment.nbytes for segment in self._rows.segments)

    def _clear(self) -> None:
        self.dead = 0
        self._latest: AnyArray | None = None
        self._sealed: AnyArray | None = None
        self._rows = RowSegments(self.spec.schema)
        self._heads: AnyArray = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self._tails: AnyArray = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self._nexts: AnyArray = np.zeros(_FIRST_CAPACITY, dtype=np.int32)
        self._flags: AnyArray = np.zeros(_FIRST_CAPACITY, dtype=np.uint8)
        self._times: AnyArray = np.zeros(_FIRST_CAPACITY if self.spec.event_time else 0, dtype=np.int64)
        self._block_least: AnyArray = np.full(1, _MAX, dtype=np.int64)

    def stored_schema(self) -> pa.Schema:
        return stored_schema(self.spec)

    def times_of(self, batch: pa.RecordBatch) -> AnyArray:
        """Event times of a batch in their own unit; empty when rows do not expire by time."""
        if self.spec.event_time is None:
            return _NO_TIMES
        return int64_column(batch.column(self.spec.event_time)).values

    def make_slots(self, slots: int) -> None:
        capacity = capacity_for(len(self._heads), slots)
        if capacity != len(self._heads):
            self._heads = grown(self._heads, capacity, len(self._heads))
            self._tails = grown(self._tails, capacity, len(self._tails))

    def append(self, batch: pa.RecordBatch, slots: AnyArray, matched: AnyArray) -> None:
        """Adds rows. Raises StateError when there would be more than 2**31 - 2 rows."""
        first = self._rows.rows
        self._make_rows(first + batch.num_rows)
        kernels.append_rows(
            read_only(slots), self.times_of(batch), read_only(matched), first,
            self._heads, self._tails, self._nexts, self._times, self._flags, self._block_least,
        )  # fmt: skip
        self._rows.append(batch)

    def _make_rows(self, rows: int) -> None:
        if rows > _MOST_ROWS:
            raise StateError(f"state {self.spec.name!r} cannot hold more than {_MOST_ROWS} rows in one subtask")
        used = self._rows.rows
        capacity = capacity_for(len(self._flags), rows)
        if capacity == len(self._flags):
            return
        self._nexts = grown(self._nexts, capacity, used)
        self._flags = grown(self._flags, capacity, used)
        if self.spec.event_time is not None:
            self._times = grown(self._times, capacity, used)
            blocks = np.full(-(-capacity // kernels.BLOCK), _MAX, dtype=np.int64)
            blocks[: len(self._block_least)] = self._block_least
            self._block_least = blocks

    def matches(
        self, slots: AnyArray, times: AnyArray, lower: int, upper: int, found: AnyArray
    ) -> Iterator[tuple[AnyArray, AnyArray]]:
        """Yields at most :data:`PAIRS_PER_CALL` pairs at a time."""
        mode = kernels.PAIRS if self.spec.keeps_matched else kernels.CONSUME
        cursor = _new_cursor()
        while cursor[kernels.POSITION] < len(slots):
            probes = np.empty(PAIRS_PER_CALL, dtype=np.int32)
            rows = np.empty(PAIRS_PER_CALL, dtype=np.int32)
            self._probe(slots, times, lower, upper, mode, found, cursor, probes, rows)
            pairs = int(cursor[kernels.FOUND])
            if not self.spec.keeps_matched:
                self.dead += pairs
            if pairs:
                yield probes[:pairs], rows[:pairs]

    def consume(self, slots: AnyArray) -> AnyArray:
        rows = np.empty(len(slots), dtype=np.int32)
        self.dead += int(
            kernels.consume_rows(read_only(slots), self._heads, self._tails, self._nexts, self._flags, rows)
        )
        return rows

    def candidates(
        self, slots: AnyArray, times: AnyArray, lower: int, upper: int
    ) -> Iterator[tuple[AnyArray, AnyArray]]:
        cursor, found = _new_cursor(), np.empty(1, dtype=np.uint8)
        while cursor[kernels.POSITION] < len(slots):
            probes, rows = (np.empty(PAIRS_PER_CALL, dtype=np.int32) for _ in range(2))
            self._probe(slots, times, lower, upper, kernels.CANDIDATES, found, cursor, probes, rows)
            if pairs := int(cursor[kernels.FOUND]):
                yield probes[:pairs], rows[:pairs]

    def accept(self, rows: AnyArray) -> AnyArray:
        rows = distinct(rows)
        rows = rows[self._flags[rows] & kernels.ALIVE != 0]
        if self.spec.keeps_matched:
            self._flags[rows] |= kernels.MATCHED
        else:
            self._flags[rows] = kernels.MATCHED
            self.dead += len(rows)
        return rows

    def mark_found(self, slots: AnyArray, times: AnyArray, lower: int, upper: int, found: AnyArray) -> None:
        nothing = np.empty(1, dtype=np.int32)
        self._probe(slots, times, lower, upper, kernels.FIRST, found, _new_cursor(), nothing, nothing)

    def _probe(
        self, slots: AnyArray, times: AnyArray, lower: int, upper: int, mode: int, found: AnyArray,
        cursor: AnyArray, probes: AnyArray, rows: AnyArray,
    ) -> None:  # fmt: skip
        kernels.probe_rows(
            read_only(slots), read_only(times), lower, upper, mode, self._times,
            self._heads, self._tails, self._nexts, self._flags, found, cursor, probes, rows,
        )  # fmt: skip

    def expire(self, bound: int) -> AnyArray:
        """Removes rows whose event time is at most ``bound`` (own unit); returns numbers of those without a match."""
        unmatched = np.empty(self._rows.rows, dtype=np.int32)
        result = np.zeros(2, dtype=np.int64)
        kernels.expire_rows(bound, self._rows.rows, self._times, self._flags, self._block_least, unmatched, result)
        self.dead += int(result[kernels.EXPIRED])
        return unmatched[: int(result[kernels.UNMATCHED])]

    def expired(self, bound: int) -> Iterator[AnyArray]:
        """The same in several parts for all rows: numbers are valid until the next part is asked for."""
        yield self.expire(bound)

    def take(self, rows: AnyArray, wanted: Sequence[int]) -> list[pa.Array]:
        """Columns of rows by number. Numbers are valid until :meth:`RowBuffers.compact_if_due`."""
        return self._rows.take(rows, wanted)

    def stored(self) -> Iterator[pa.RecordBatch]:
        return (batch for batch, _ in self.living())

    def living(self) -> list[tuple[pa.RecordBatch, AnyArray]]:
        """The live rows, in order, with whether they have matched (0 or 1)."""
        return _living(self._rows.segments, self._flags)

    def living_slots(self) -> AnyArray:
        """The slots of the live rows, in order."""
        rows = self._rows.rows
        slots = np.empty(rows, dtype=np.uint32)
        kernels.slots_of_rows(self._heads, self._nexts, slots)
        living: AnyArray = slots[self._flags[:rows] & kernels.ALIVE != 0]
        return living

    def refill(self, parts: list[tuple[pa.RecordBatch, AnyArray]], slots: AnyArray) -> None:
        """Replaces the content by these rows; ``slots`` has those of all parts."""
        self._clear()
        self.make_slots(int(slots.max(initial=0)) + 1)
        start = 0
        for batch, matched in parts:
            end = start + batch.num_rows
            self.append(batch, slots[start:end], matched)
            start = end

    def loaded(self, stored: pa.RecordBatch) -> tuple[pa.RecordBatch, AnyArray]:
        """Splits a stored batch into its rows and whether they have matched."""
        columns = dict(zip(_stored_columns(self.spec), stored.columns, strict=False))
        arrays = [columns[name] for name in self.spec.schema.names]
        matched = stored.column(stored_rows.MATCHED).cast(pa.uint8()).to_numpy()
        return pa.RecordBatch.from_arrays(arrays, schema=self.spec.schema), matched

    def freeze(self) -> FrozenRows:
        """The synchronous part of a snapshot: columns are shared, flags copied."""
        self._latest = self._flags[: self._rows.rows].copy()
        return FrozenRows(self.spec, self._rows.segments, self._latest)

    def begin_changes(self) -> None:
        """Does nothing: restored rows get new numbers, and the next increment has all of them."""

    def seal(self) -> SealedChanges | None:
        """The changes between the two latest calls of :meth:`freeze`; all, if rows got new numbers in between."""
        before, self._sealed = self._sealed, self._latest
        return None if before is None or self._latest is None else partial(changed_rows, before, self._latest)


class FrozenRows:
    """One side as of one moment."""

    def __init__(self, spec: RowBufferSpec, segments: tuple[pa.RecordBatch, ...], flags: AnyArray) -> None:
        self._spec = spec
        self._segments = segments
        self._flags = flags

    @property
    def numbers(self) -> int | None:
        return len(self._flags)

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None:
        """The asynchronous part: leaves out removed rows, sorts by key group, writes."""
        spec = self._spec
        batches = [to_stored(spec, batch, matched) for batch, matched in _living(self._segments, self._flags)]
        write_batches(writer, spec.name, rows_descriptor(spec), stored_schema(spec), batches, owned, max_parallelism)

    def write_part(
        self, writer: PartWriter, changed: Changed | None, owned: KeyGroupRange, max_parallelism: int
    ) -> None:
        """Writes the changed rows, or all, with their numbers, by which a later increment replaces or removes them."""
        start = 0
        for segment in self._segments:
            end = start + segment.num_rows
            if changed is None:
                numbers = np.arange(start, end)
            else:
                assert isinstance(changed, np.ndarray)
                numbers = changed[slice(*np.searchsorted(changed, (start, end)))].astype(np.int64)
            self._write_some(writer, segment, start, numbers, owned, max_parallelism, removed=changed is not None)
            start = end

    def _write_some(
        self, writer: PartWriter, segment: pa.RecordBatch, start: int, numbers: AnyArray, owned: KeyGroupRange,
        max_parallelism: int, *, removed: bool,
    ) -> None:  # fmt: skip
        flags = self._flags[numbers]
        alive = (flags & kernels.ALIVE).astype(bool)
        name = self._spec.name
        if alive.any():
            rows = _rows_at(segment, numbers[alive] - start)
            stored = to_stored(self._spec, rows, (flags[alive] & kernels.MATCHED) >> 1)
            numbered = stored.append_column(ROW, arrow_from_numpy(pa.int64(), numbers[alive]))
            writer.write_rows(name, pa.Table.from_batches([numbered]), owned, max_parallelism)
        if removed and not alive.all():
            rows = _rows_at(segment.select(self._spec.keys), numbers[~alive] - start)
            schema = pa.schema(stored_rows.prefixed(self._spec.key_schema, stored_rows.KEY_PREFIX))
            gone = pa.RecordBatch.from_arrays(rows.columns, schema=schema)
            gone = gone.append_column(ROW, arrow_from_numpy(pa.int64(), numbers[~alive]))
            writer.write_removed(name, pa.Table.from_batches([gone]), owned, max_parallelism)

    def release(self) -> None:
        self._segments = ()


def _rows_at(segment: pa.RecordBatch, places: AnyArray) -> pa.RecordBatch:
    """Rows at ascending places. They are not copied if they follow each other, as new rows do."""
    first, rows = int(places[0]), len(places)
    if int(places[-1]) - first == rows - 1:
        return segment.slice(first, rows)
    return segment.take(arrow_from_numpy(pa.int64(), places))


class RowBuffers:
    """All sides with the index that they share. ``index`` columns are the first side's key columns."""

    def __init__(
        self, specs: Sequence[RowBufferSpec], make: Callable[[RowBufferSpec], RowBuffer] | None = None
    ) -> None:
        self.sides = [(make or RowBuffer)(spec) for spec in specs]
        self._key_schema = specs[0].key_schema
        self._index = key_index(self._key_schema)

    def slots_of(self, keys: list[pa.Array]) -> AnyArray:
        """The slot of each row's key; makes room for it in all sides."""
        slots = self._index.slots_of(keys)
        for side in self.sides:
            side.make_slots(self._index.size)
        return slots

    def load(self, side: RowBuffer, stored: pa.RecordBatch) -> None:
        batch, matched = side.loaded(stored)
        side.append(batch, self.slots_of([batch.column(key) for key in side.spec.keys]), matched)

    def take_all(self) -> Iterator[pa.RecordBatch]:
        taken = [[batch for batch, _ in side.living()] for side in self.sides]
        self._index = key_index(self._key_schema)
        for side in self.sides:
            side.refill([], _NO_SLOTS)
        return (pa.concat_batches(batches) for batches in taken if batches)

    def compact_if_due(self) -> None:
        """Frees removed rows and keys without rows, when they outnumber the live ones: constant work per row."""
        living = sum(side.at_hand for side in self.sides)
        dead = sum(side.dead for side in self.sides)
        many_keys = self._index.size > 2 * living + _SPARE_ROWS
        if many_keys or dead > living + _SPARE_ROWS:
            self._compact(keeps_keys=not many_keys)

    def _compact(self, *, keeps_keys: bool = False) -> None:
        """Frees removed rows. With ``keeps_keys`` the index stays: to fill another one costs more than all the rest."""
        if not keeps_keys:
            self._index = key_index(self._key_schema)
        for side in self.sides:
            parts = side.living()
            side.refill(parts, side.living_slots() if keeps_keys else self._indexed(side, parts))
        for side in self.sides:
            side.make_slots(self._index.size)

    def _indexed(self, side: RowBuffer, parts: list[tuple[pa.RecordBatch, AnyArray]]) -> AnyArray:
        """The slots of rows whose keys the index may not have."""
        slots = [self._index.slots_of([batch.column(key) for key in side.spec.keys]) for batch, _ in parts]
        return np.concatenate(slots) if slots else _NO_SLOTS


def check_same_keys(uid: str, specs: Sequence[RowBufferSpec]) -> None:
    """Raises StateSchemaError unless the keys of all sides have equal types."""
    key_types = {tuple(spec.key_schema.types) for spec in specs}
    if len(key_types) != 1:
        raise StateSchemaError(f"operator {uid!r}: keys differ in type: {sorted(map(str, key_types))}")


def check_ends(uid: str, spec: RowBufferSpec, descriptor: dict[str, Any]) -> None:
    """Raises StateSchemaError when stored rows were removed by other rules: rows that are needed now may be missing."""
    stored = descriptor.get("rows")
    if stored != _ends(spec):
        raise schema_mismatch(uid, spec.name, "its rows end at an unexpected position", stored, _ends(spec))


def _living(segments: Sequence[pa.RecordBatch], flags: AnyArray) -> list[tuple[pa.RecordBatch, AnyArray]]:
    parts = []
    start = 0
    for segment in segments:
        own = flags[start : start + segment.num_rows]
        start += segment.num_rows
        alive = (own & kernels.ALIVE).astype(bool)
        if alive.all():
            parts.append((segment, (own & kernels.MATCHED) >> 1))
        elif alive.any():
            parts.append((segment.filter(pa.array(alive)), (own[alive] & kernels.MATCHED) >> 1))
    return parts


def _new_cursor() -> AnyArray:
    return np.array([0, kernels.NOT_STARTED, 0, 0], dtype=np.int64)
