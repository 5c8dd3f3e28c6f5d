"""Filters and projections of typed expressions, compiled once and called once for each batch. They never block."""

from __future__ import annotations

import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Frame, compile_expression, evaluate
from ckpt_runtime.graph.specs import ConditionSpec, EvaluateSpec, ExpandSpec
from ckpt_runtime.operators.operator import Operator, OperatorContext


class ConditionOperator(Operator):
    """Keeps the rows for which a condition is true; null counts as false. Rows keep their order."""

    requires_final_checkpoint = False

    def __init__(self, spec: ConditionSpec) -> None:
        self._holds = compile_expression(spec.condition)

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        mask = evaluate(self._holds, _frame(batch, self.context), pa.bool_())
        kept = batch.filter(mask)
        if kept.num_rows:
            self.output.emit(kept)


class EvaluateOperator(Operator):
    """Computes columns from a batch."""

    requires_final_checkpoint = False

    def __init__(self, spec: EvaluateSpec) -> None:
        self._schema = spec.schema
        self._columns = [
            (compile_expression(tree), field.type) for (_, tree), field in zip(spec.columns, spec.schema, strict=True)
        ]

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        frame = _frame(batch, self.context)
        arrays = [evaluate(compute, frame, kind) for compute, kind in self._columns]
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._schema))


class ExpandOperator(Operator):
    """Computes several rows from each row of a batch, such as one for each window that the row lies in."""

    requires_final_checkpoint = False

    def __init__(self, spec: ExpandSpec) -> None:
        self._schema = spec.schema
        self._rows = [[compile_expression(tree) for tree in row] for row in spec.rows]

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        frame = _frame(batch, self.context)
        for row in self._rows:
            arrays = [evaluate(compute, frame, kind) for compute, kind in zip(row, self._schema.types, strict=True)]
            self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._schema))


def _frame(batch: pa.RecordBatch, context: OperatorContext) -> Frame:
    """Returns the rows of a batch. The current time is when the operator gets them, and the same for all of them."""
    return Frame(batch.columns, batch.num_rows, moment=context.now_ms() * 1000)
