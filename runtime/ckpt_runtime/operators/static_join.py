"""Joins a stream with a stored table: the matches of each row are looked up in a hash index. Never blocks.

The index is built once for each process and table, however many subtasks use it. Keys are found by their hash, and then
compared by Spark's own equality. The operator has no state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Evaluator, Frame, broadcast, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Call, Column, Expression, moved
from ckpt_runtime.frontend.generators import columns_of
from ckpt_runtime.frontend.static_tables import read_table
from ckpt_runtime.graph.specs import StaticJoinKey, StaticJoinSpec
from ckpt_runtime.operators.bad_rows import LeavesOutBadRows, as_pair
from ckpt_runtime.operators.operator import OperatorContext, Output
from ckpt_runtime.state.columns import AnyArray

OUTPUT_ROWS = 32_768
"""Maximum number of row pairs that are compared at a time, and therefore of rows in a result batch."""
IntArray = npt.NDArray[np.int64]


class StaticTableIndex:
    """The rows of a table that pass the filters, and where the rows with each hash of their keys are.

    Without keys all rows are in one bucket. Rows whose keys have a null that matches nothing are in none.
    """

    def __init__(self, table: pa.Table, keys: Sequence[StaticJoinKey], filters: Sequence[Expression]) -> None:
        columns = [_flat(column) for column in table.columns]
        rows = table.num_rows
        for tree in filters:
            mask = evaluate(compile_expression(tree), Frame(columns, rows), pa.bool_()).fill_null(False)
            columns = [column.filter(mask) for column in columns]
            rows = mask.true_count
        self.names = table.column_names
        self.columns = columns
        frame = Frame(columns, rows)
        self.keys = [broadcast(compile_expression(key.table)(frame), rows) for key in keys]
        found = _matchable(self.keys, keys, rows)
        hashes = _hashes(self.keys, keys, rows)[found]
        self._shift = np.uint64(64 - max(len(hashes) - 1, 1).bit_length()) if keys else np.uint64(64)
        buckets = self._buckets(hashes)
        order = np.argsort(buckets, kind="stable")
        self.rows: IntArray = found[order]
        self.hashes = hashes[order]
        sizes = np.bincount(buckets, minlength=1 << (64 - int(self._shift)))
        self.ends: IntArray = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def candidates(self, hashes: npt.NDArray[np.uint64]) -> tuple[IntArray, IntArray]:
        """Returns where the candidates of each row begin in ``rows``, and how many there are."""
        buckets = self._buckets(hashes)
        starts = self.ends[buckets]
        return starts, self.ends[buckets + 1] - starts

    def _buckets(self, hashes: npt.NDArray[np.uint64]) -> IntArray:
        if int(self._shift) == 64:
            return np.zeros(len(hashes), np.int64)
        return (hashes >> self._shift).astype(np.int64)


class StaticJoinOperator(LeavesOutBadRows):
    """Built from a :class:`StaticJoinSpec`. Rows of the stream stay in order."""

    requires_final_checkpoint = False

    def __init__(self, spec: StaticJoinSpec) -> None:
        self._spec = spec
        self._keys = [compile_expression(key.stream) for key in spec.keys]
        self._equal = [_equality(key) for key in spec.keys]
        self._condition: Evaluator | None = None
        self._needed: list[int] = []
        if spec.condition is not None:
            self._needed = sorted(columns_of([spec.condition]))
            self._condition = compile_expression(moved(spec.condition, self._needed.index))

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._index = _index_of(self._spec)

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        for part, keys in self._parts(batch, self._keys_of):
            self._join(part, keys)

    def _keys_of(self, batch: pa.RecordBatch) -> list[pa.Array]:
        frame = Frame(batch.columns, batch.num_rows, moment=self.context.now_ms() * 1000)
        return [broadcast(key(frame), batch.num_rows) for key in self._keys]

    def _join(self, batch: pa.RecordBatch, keys: Sequence[pa.Array]) -> None:
        spec = self._spec
        hashes = _hashes(keys, spec.keys, batch.num_rows)
        starts, counts = self._index.candidates(hashes)
        matchable = _matchable(keys, spec.keys, batch.num_rows)
        if len(matchable) < batch.num_rows:
            unmatched = np.ones(batch.num_rows, bool)
            unmatched[matchable] = False
            counts[unmatched] = 0
        matched = np.zeros(batch.num_rows, bool)
        for rows, places in _pairs(starts, counts, outer=spec.how == "outer"):
            real = places >= 0
            kept = np.flatnonzero(real)
            if keys:
                kept = kept[self._index.hashes[places[kept]] == hashes[rows[kept]]]
            if len(kept):
                kept = kept[self._matching(batch, keys, rows[kept], places[kept])]
            matched[rows[kept]] = True
            if spec.how == "outer":
                # The last candidate of each row means "no match": it is kept if no earlier one has matched.
                kept = np.union1d(kept, np.flatnonzero(~real & ~matched[rows]))
            if spec.how in ("inner", "outer") and len(kept):
                self._emit(batch, rows[kept], places[kept])
        if spec.how == "existence":
            arrays = [*(batch.column(at) for at in spec.output), pa.array(matched)]
            self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=spec.schema))
        if spec.how in ("semi", "anti"):
            found = batch.filter(pa.array(matched if spec.how == "semi" else ~matched))
            if found.num_rows:
                arrays = [found.column(at) for at in spec.output]
                self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=spec.schema))

    def _matching(self, batch: pa.RecordBatch, keys: Sequence[pa.Array], rows: IntArray, places: IntArray) -> IntArray:
        """Returns which pairs match. ``places`` are positions in the index."""
        index = self._index
        kept = np.arange(len(rows))
        for equal, ours, theirs in zip(self._equal, keys, index.keys, strict=True):
            pair = Frame([ours.take(pa.array(rows[kept])), theirs.take(pa.array(index.rows[places[kept]]))], len(kept))
            kept = kept[_mask(evaluate(equal, pair, pa.bool_()))]
        if self._condition is not None and len(kept):
            kept = kept[self._holding(self._condition, batch, rows[kept], index.rows[places[kept]])]
        return kept

    def _holding(self, condition: Evaluator, batch: pa.RecordBatch, rows: IntArray, others: IntArray) -> AnyArray:
        """For which pairs of rows of the batch and of the table the condition holds."""
        index, width, moment = self._index, self._spec.width, self.context.now_ms() * 1000
        ours_at, theirs_at = pa.array(rows), pa.array(others)
        columns = [
            batch.column(at).take(ours_at) if at < width else index.columns[at - width].take(theirs_at)
            for at in self._needed
        ]

        def holds(first: int, last: int) -> AnyArray:
            parts = [column.slice(first, last - first) for column in columns]
            return _mask(evaluate(condition, Frame(parts, last - first, moment=moment), pa.bool_()))

        def pair(at: int) -> pa.RecordBatch:
            stored = [column.slice(int(others[at]), 1) for column in index.columns]
            return as_pair(("stream", "table"), (batch.slice(int(rows[at]), 1), pa.record_batch(stored, index.names)))

        return self._where(len(rows), holds, pair)

    def _emit(self, batch: pa.RecordBatch, rows: IntArray, places: IntArray) -> None:
        """Emits the pairs; a position below zero means that the row has no match."""
        spec, index = self._spec, self._index
        missing = places < 0
        at = pa.array(index.rows[places] if len(index.rows) else places, mask=missing if missing.any() else None)
        same = len(rows) == batch.num_rows and bool((rows == np.arange(len(rows))).all())
        ours = None if same else pa.array(rows)
        arrays = []
        for position in spec.output:
            if position >= spec.width:
                arrays.append(index.columns[position - spec.width].take(at))
            else:
                column = batch.column(position)
                arrays.append(column if ours is None else column.take(ours))
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=spec.schema))


_lock = threading.Lock()
_indexes: WeakValueDictionary[tuple[str, bytes], StaticTableIndex] = WeakValueDictionary()
"""The indexes in this process that are in use by an operator."""


def _index_of(spec: StaticJoinSpec) -> StaticTableIndex:
    parts = [[[key.table, key.nulls_match] for key in spec.keys], spec.filters]
    identity = (spec.path, msgspec.json.encode(parts))
    with _lock:
        index = _indexes.get(identity)
        if index is None:
            index = _indexes[identity] = StaticTableIndex(read_table(spec.path), spec.keys, spec.filters)
        return index


def _flat(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)


def _hashes(arrays: Sequence[pa.Array], keys: Sequence[StaticJoinKey], rows: int) -> npt.NDArray[np.uint64]:
    if not keys:
        return np.zeros(rows, np.uint64)
    columns = tuple(Column(at, key.stream.type) for at, key in enumerate(keys))
    hashed = compile_expression(Call("XxHash64", columns, "long", settings={"seed": 42}))
    numbers: npt.NDArray[np.int64] = evaluate(hashed, Frame(arrays, rows), pa.int64()).to_numpy(zero_copy_only=False)
    return numbers.view(np.uint64)


def _matchable(arrays: Sequence[pa.Array], keys: Sequence[StaticJoinKey], rows: int) -> IntArray:
    """Returns the rows without a null that matches nothing."""
    valid = np.ones(rows, bool)
    for array, key in zip(arrays, keys, strict=True):
        if array.null_count and not key.nulls_match:
            valid &= array.is_valid().to_numpy(zero_copy_only=False)
    return np.flatnonzero(valid)


def _equality(key: StaticJoinKey) -> Evaluator:
    sides = (Column(0, key.stream.type), Column(1, key.table.type))
    return compile_expression(Call("EqualNullSafe" if key.nulls_match else "EqualTo", sides, "boolean"))


def _mask(array: pa.Array) -> AnyArray:
    return np.asarray(array.fill_null(False))


def _pairs(starts: IntArray, counts: IntArray, *, outer: bool) -> Iterator[tuple[IntArray, IntArray]]:
    """Yields rows with the positions of their candidates, at most :data:`OUTPUT_ROWS` pairs at a time.

    With ``outer`` each row has one more candidate after the others, with position -1.
    """
    widths = counts + 1 if outer else counts
    ends = np.cumsum(widths)
    total = int(ends[-1]) if len(ends) else 0
    for first in range(0, total, OUTPUT_ROWS):
        flat = np.arange(first, min(first + OUTPUT_ROWS, total))
        rows = np.searchsorted(ends, flat, side="right")
        within = flat - (ends[rows] - widths[rows])
        places = starts[rows] + within
        if outer:
            places[within == counts[rows]] = -1
        yield rows, places
