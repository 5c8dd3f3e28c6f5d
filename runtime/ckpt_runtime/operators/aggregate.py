"""Running aggregates per key: for each input row one row with the keys and the values after it. Never blocks."""

from __future__ import annotations

from collections.abc import Sized

import pyarrow as pa
from msgspec.structs import replace

from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.graph.schemas import aggregate_output_schema, aggregate_type
from ckpt_runtime.graph.specs import AggregateSpec
from ckpt_runtime.operators.errors import OperatorError, output_schema_error
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output
from ckpt_runtime.state.columns import decoded_type
from ckpt_runtime.state.states import AggregateColumn, KeyedAggregates

STATE_NAME = "aggregates"


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
        return replace(super().measured(), stored_rows=len(table) if isinstance(table, Sized) else None)

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
        return self.context.keyed_state.aggregate_table(STATE_NAME, key_schema, columns)
