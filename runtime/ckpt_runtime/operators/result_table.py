"""The results of aggregations as sinks get them with each checkpoint: the latest row of each group, or all of them.

In output mode ``complete`` it is the whole result, sorted and limited as the query requests.

The aggregation emits the rows of groups that have changed. :class:`ResultTableOperator`, in one subtask, keeps the
latest row of each group as keyed state. Before a barrier, if a row has changed since the last emission, it emits all
rows and then the end of a range. The operators up to the sink run in the same thread and forward the table in one step,
so that a whole table is between two barriers:

* After an aborted checkpoint, its sink has prepared a whole table, which the next checkpoint commits as a batch of its
  own, or no table at all. No commit gets parts of two tables, or the same table twice.
* A barrier may overtake changed rows on their way to this operator. They are in-flight data of that checkpoint, and
  part of the table of the next one.
* After a restore no row counts as changed: the sink's state holds the table that belongs to the checkpoint.
* At the end of data, the last table is emitted with the final checkpoint.

The aggregation itself may run in many subtasks and be rescaled. Never blocks.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.graph.specs import REMOVED, LatestSpec, LimitSpec, SortOrder, SortSpec, TableSpec
from ckpt_runtime.operators.group_state import OUTPUT_ROWS, GroupStateOperator
from ckpt_runtime.operators.groups import row_of_none
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray, plain

_NO_TIMES: AnyArray = read_only(np.empty(0, dtype=np.int64))


class ResultTableOperator(GroupStateOperator):
    """Built from a :class:`TableSpec`."""

    requires_final_checkpoint = True

    def __init__(self, spec: TableSpec) -> None:
        super().__init__(spec.group.output_schema, spec.keys, None)
        self._table_schema = spec.schema
        self._group = spec.group
        self._total = spec.total
        self._changed = False

    @property
    def stored_schema(self) -> pa.Schema:
        return self._table_schema

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._changed = self._total and context.restored_checkpoint_id is None

    def add(self, batch: pa.RecordBatch) -> None:
        groups, slots, _ = self.numbered([batch.column(name) for name in self._keys])
        for _ in self._buffer.matches(slots, _NO_TIMES, 0, 0, np.zeros(len(slots), dtype=np.uint8)):
            pass  # each match removes the row that the group had
        latest = np.empty(len(slots), dtype=np.int64)
        latest[groups] = np.arange(batch.num_rows)  # of several rows of a group, the last one stays
        if REMOVED in batch.schema.names:
            stays = ~np.asarray(batch.column(REMOVED))[latest]
            latest, slots = latest[stays], slots[stays]
        rows = batch.select(self._table_schema.names).take(pa.array(latest))
        self.store(rows.columns, None, slots)
        self._changed = True

    def process_end_of_range(self) -> None:
        """Ignores it: downstream of a result table, only the table's own ends of ranges count."""

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        super().prepare_snapshot(checkpoint_id)
        if self._changed:
            self._changed = False
            for batch in self._rows():
                self.output.emit(batch)
            self.output.emit_end_of_range()

    def _rows(self) -> Iterator[pa.RecordBatch]:
        if self._total and not len(self._buffer):
            yield row_of_none(self._group, self._table_schema)
            return
        held: list[pa.RecordBatch] = []
        for batch in self._buffer.stored():
            held.append(batch.select(self._table_schema.names))
            if sum(part.num_rows for part in held) >= OUTPUT_ROWS:
                yield pa.concat_batches(held)
                held = []
        if held:
            yield pa.concat_batches(held)


class LatestOperator(Operator):
    """Built from a :class:`LatestSpec`: what an aggregation in output mode ``update`` emits between two checkpoints, as
    one row for each group, as in one of Spark's batches.

    It has no state, because it emits all rows before a barrier. Rows that wait are reduced to the last ones whenever
    their number has doubled.
    """

    requires_final_checkpoint = False

    def __init__(self, spec: LatestSpec) -> None:
        self._keys = list(spec.keys)
        self._waiting: list[pa.RecordBatch] = []
        self._rows_waiting = 0
        self._most_waiting = OUTPUT_ROWS

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        self._waiting.append(batch)
        self._rows_waiting += batch.num_rows
        if self._rows_waiting > self._most_waiting:
            latest = self._latest()
            self._waiting, self._rows_waiting = [latest], latest.num_rows
            self._most_waiting = max(OUTPUT_ROWS, 2 * latest.num_rows)

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self._emit_waiting()

    def finish(self) -> None:
        self._emit_waiting()

    def _emit_waiting(self) -> None:
        if self._waiting:
            latest = self._latest()
            self._waiting, self._rows_waiting = [], 0
            for start in range(0, latest.num_rows, OUTPUT_ROWS):
                self.output.emit(latest.slice(start, OUTPUT_ROWS))

    def _latest(self) -> pa.RecordBatch:
        """The last waiting row of each key, in the order in which they came."""
        whole = pa.concat_batches(self._waiting)
        keys = {str(at): plain(whole.column(name)) for at, name in enumerate(self._keys)}
        numbered = pa.table({**keys, "row": pa.array(np.arange(whole.num_rows))})
        grouped = numbered.group_by([*keys], use_threads=False).aggregate([("row", "max")])
        return whole.take(grouped.column("row_max").combine_chunks().sort())


class SortOperator(Operator):
    """Built from a :class:`SortSpec`: collects a table, and emits its rows in order when it is complete."""

    requires_final_checkpoint = False

    def __init__(self, spec: SortSpec) -> None:
        self._spec = spec
        self._gathered: list[pa.RecordBatch] = []

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        self._gathered.append(batch)

    def process_end_of_range(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered:
            whole = pa.concat_batches(gathered)
            # The first order is the most significant one, which ``lexsort`` expects last.
            keys = [_ranks(whole.column(order.position), order) for order in reversed(self._spec.orders)]
            rows = pa.array(np.lexsort(keys))
            for start in range(0, len(rows), OUTPUT_ROWS):
                part = rows.slice(start, OUTPUT_ROWS)
                columns = [column.take(part) for column in whole.columns[: len(self._spec.schema)]]
                self.output.emit(pa.RecordBatch.from_arrays(columns, schema=self._spec.schema))
        self.output.emit_end_of_range()


def _ranks(column: pa.Array, order: SortOrder) -> AnyArray:
    """Numbers that order rows as Spark does: NaN is greater than all numbers, and 0.0 equals -0.0."""
    column = plain(column)
    if pa.types.is_floating(column.type):
        column = pc.add(column, pa.scalar(0.0, column.type))
    if pa.types.is_null(column.type):
        return np.zeros(len(column), dtype=np.int64)
    encoded = column.dictionary_encode()
    places = pc.sort_indices(encoded.dictionary).to_numpy()
    ranks = np.empty(len(places), dtype=np.int64)
    ranks[places] = np.arange(len(places))
    found = ranks[pc.fill_null(encoded.indices, 0).to_numpy()] if len(ranks) else np.zeros(len(column), dtype=np.int64)
    found = -found if order.descending else found
    missing = np.asarray(column.is_null())
    return np.where(missing, -len(ranks) - 1 if order.nulls_first else len(ranks) + 1, found)


PASSED = "passed"
"""The operator state of a limit: how many rows it has passed."""


class LimitOperator(Operator):
    """Built from a :class:`LimitSpec`: passes the first rows of each table, or of the stream, in its one subtask.

    The rest of the rows of a stream is part of the state.
    """

    requires_final_checkpoint = False

    def __init__(self, spec: LimitSpec) -> None:
        self._most = self._left = spec.rows
        self._in_all = spec.in_all

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        if self._in_all:
            passed = sum(context.operator_state.restored(PASSED, int))
            self._left = max(0, self._most - passed)

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        part = batch.slice(0, self._left)
        self._left -= part.num_rows
        if part.num_rows:
            self.output.emit(part)

    def process_end_of_range(self) -> None:
        if not self._in_all:
            self._left = self._most
        self.output.emit_end_of_range()

    def snapshot(self, checkpoint_id: int) -> None:
        if self._in_all:
            self.context.operator_state.put(PASSED, [self._most - self._left], OperatorStateMode.SPLIT)
