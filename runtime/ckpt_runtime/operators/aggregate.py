"""Operators over keys: running aggregates, the first row of each key, aggregates of sessions. They never block.

For the first row of each key, a key is kept until the watermark has reached its own event time or, within a watermark,
the end of the delay after its first row. Without event time among the keys, a key is kept forever.

Sessions are intervals of one key; those that overlap or touch become one. A row opens an interval from its event time
to the end of its gap. State has a row per open session; rows that connect several of them merge them. A session ends
when the watermark reaches its end; never in mode complete, in which changed sessions and removed sessions are emitted.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.graph.output_schemas import aggregate_output_schema, aggregate_type
from ckpt_runtime.graph.specs import AggregateSpec, DeduplicateSpec, GroupSpec
from ckpt_runtime.operators.aggregates.accumulator import Rows
from ckpt_runtime.operators.errors import OperatorError, output_schema_error
from ckpt_runtime.operators.group_state import TIME, GroupStateOperator
from ckpt_runtime.operators.groups import RUNNING, GroupOperator, check_form, normal_key
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output
from ckpt_runtime.state.arrays import distinct, read_only
from ckpt_runtime.state.columns import AnyArray, arrow_from_numpy, decoded_type, int64_column
from ckpt_runtime.state.kernels.group_kernels import merge_sessions
from ckpt_runtime.state.states import AggregateColumn, KeyedAggregates

_NO_TIMES: AnyArray = read_only(np.empty(0, dtype=np.int64))


class AggregateOperator(Operator):
    """Built from an :class:`AggregateSpec`.

    With ``input_schema`` its state is restored in ``open``; otherwise with the first batch (until then a snapshot
    passes the restored state on unchanged).
    """

    requires_final_checkpoint = False
    state_operator = "stateStoreSave"

    def __init__(self, spec: AggregateSpec, input_schema: pa.Schema | None = None) -> None:
        self._spec = spec
        self._input_schema = input_schema
        self._table: KeyedAggregates | None = None
        self._schema: pa.Schema | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        if context.keyed_state is None:
            raise OperatorError(f"operator {context.uid!r} aggregates by key but has no keyed state")
        check_form(context, RUNNING)
        if self._input_schema is not None:
            self._table = self._open_table(self._input_schema)

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        table = self._table
        if table is None:
            table = self._table = self._open_table(batch.schema)
        keys = [batch.column(name) for name in self._spec.keys]
        try:
            result = pa.RecordBatch.from_arrays(keys + table.update(batch), schema=self._schema)
        except pa.ArrowInvalid as error:
            assert self._schema is not None
            raise output_schema_error(self.context.uid, batch.schema, self._schema) from error
        self.rows_updated += batch.num_rows
        self.output.emit(result)

    def measured(self) -> OperatorMeasures:
        table = self._table
        rows, size = len(table) if isinstance(table, Sized) else None, None if table is None else table.nbytes
        return replace(super().measured(), stored_rows=rows, stored_bytes=size)

    def _open_table(self, input_schema: pa.Schema) -> KeyedAggregates:
        self._schema = aggregate_output_schema(input_schema, self._spec)
        columns = []
        for aggregate in self._spec.aggregates:
            column = aggregate.column
            input_type = None if column is None else decoded_type(input_schema.field(column).type)
            result_type = aggregate_type(input_schema, aggregate)
            columns.append(AggregateColumn(aggregate.function, column, aggregate.alias, input_type, result_type))
        key_schema = pa.schema([input_schema.field(name) for name in self._spec.keys])
        assert self.context.keyed_state is not None
        return self.context.keyed_state.aggregate_table(RUNNING, key_schema, columns)


class DeduplicateOperator(GroupStateOperator):
    """Built from a :class:`DeduplicateSpec`."""

    waits = False
    keeps_matched = True

    def __init__(self, spec: DeduplicateSpec) -> None:
        super().__init__(spec.schema, spec.keys, spec.event_time)
        self.state_operator = "dedupe" if spec.within_ms is None else "dedupeWithinWatermark"
        self._spec = spec

    @property
    def stored_schema(self) -> pa.Schema:
        return pa.schema([self._schema.field(name) for name in self._keys])

    def add(self, batch: pa.RecordBatch) -> None:
        keys = [normal_key(batch.column(name)) for name in self._keys]
        _, slots, firsts = self.numbered(keys)
        found = np.zeros(len(slots), dtype=np.uint8)
        self._buffer.mark_found(slots, np.empty(0, dtype=np.int64), 0, 0, found)
        new = found == 0
        if not new.any():
            return
        rows = pa.array(firsts[new])
        passed = batch.take(rows)
        self.store([key.take(rows) for key in keys], self._ends(passed), slots[new])
        self.output.emit(passed)

    def _ends(self, rows: pa.RecordBatch) -> pa.Array | None:
        """The times at which the keys of these rows are removed from state."""
        spec = self._spec
        if spec.within_ms is not None:
            assert spec.event_time is not None
            times = pc.fill_null(rows.column(spec.event_time).cast(pa.int64()), 0)  # as Spark reads a null
            return pc.add_checked(times, spec.within_ms * 1000).cast(TIME)
        return None if spec.forget_by is None else rows.column(spec.forget_by)


class SessionOperator(GroupOperator):
    """Built from a :class:`GroupSpec` with a session."""

    def __init__(self, spec: GroupSpec) -> None:
        super().__init__(spec)
        assert spec.session is not None
        self._session = spec.session
        self.affects = spec.session[0]  # a row may extend a session that ends where the row begins

    def add(self, batch: pa.RecordBatch) -> None:
        keys = [normal_key(batch.column(name)) for name in self._keys]
        numbers, slots, firsts = self.numbered(keys)
        old = self._taken(slots, range(len(self._row_schema) - 1))
        known = len(old.groups)
        key_numbers = np.concatenate([old.groups, numbers]).astype(np.int64)
        bounds = [
            np.concatenate([int64_column(stored).values, int64_column(batch.column(name)).values])
            for stored, name in zip(old.columns[:2], self._session, strict=True)
        ]
        order = np.lexsort((bounds[0], key_numbers))
        in_order = np.empty(len(order), dtype=np.uint32)
        starts, ends = np.empty(len(order), dtype=np.int64), np.empty(len(order), dtype=np.int64)
        keyed, opened, closed = (read_only(column[order]) for column in (key_numbers, *bounds))
        count = int(merge_sessions(keyed, opened, closed, in_order, starts, ends))
        sessions = np.empty(len(order), dtype=np.uint32)
        sessions[order] = in_order
        of_session = np.empty(count, dtype=np.int64)
        of_session[sessions] = key_numbers
        stored = self._aggregates.combined(
            count,
            Rows(read_only(sessions[:known]), old.columns[2 + len(keys) :]),
            Rows(read_only(sessions[known:]), batch.columns),
        )
        first_rows = arrow_from_numpy(pa.int64(), firsts[of_session].astype(np.int64))
        grouped = [
            arrow_from_numpy(self._schema.field(name).type, np.ascontiguousarray(part[:count]))
            for name, part in zip(self._session, (starts, ends), strict=True)
        ]
        columns = [*grouped, *(key.take(first_rows) for key in keys), *stored]
        if self._spec.mode != "complete":
            self.store(columns, grouped[1], slots[of_session])
            return
        self.store(columns, None, slots[of_session])
        merged = np.flatnonzero(starts[sessions[:known]] != bounds[0][:known])
        self._emit_removed([column.take(pa.array(merged)) for column in old.columns[: 2 + len(keys)]])
        changed = pa.array(distinct(sessions[known:]))
        self._emit([column.take(changed) for column in columns])

    def _taken(self, slots: AnyArray, wanted: Sequence[int]) -> Rows:
        """Removes all stored sessions of keys by their slots; returns the columns at the positions ``wanted``."""
        found = np.zeros(len(slots), dtype=np.uint8)
        groups, parts = [], []
        for probes, rows in self._buffer.matches(slots, _NO_TIMES, 0, 0, found):
            groups.append(probes.astype(np.uint32))
            parts.append(self._buffer.take(rows, wanted))
        if len(parts) == 1:
            return Rows(read_only(groups[0]), parts[0])
        if not parts:
            return Rows(np.empty(0, dtype=np.uint32), [pa.nulls(0, self._row_schema.types[at]) for at in wanted])
        return Rows(
            read_only(np.concatenate(groups)), [pa.concat_arrays(columns) for columns in zip(*parts, strict=True)]
        )

    def _emit_removed(self, columns: list[pa.Array]) -> None:
        """Emits that sessions, given by their bounds and keys, are part of earlier ones."""
        rows = len(columns[0])
        if rows:
            nulls = [pa.nulls(rows, kind) for kind in self._output_schema.types[len(columns) : -1]]
            arrays = [*columns, *nulls, pa.repeat(pa.scalar(True), rows)]
            self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._output_schema))
