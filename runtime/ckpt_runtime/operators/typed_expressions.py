"""Filters and projections of typed expressions, compiled once and called once for each batch. They never block."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import (
    Evaluator,
    Frame,
    compile_encoded,
    compile_expression,
    evaluate,
    evaluate_encoded,
)
from ckpt_runtime.graph.specs import ConditionSpec, EvaluateSpec, ExpandSpec
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output, SelectingOutput


class ConditionOperator(Operator):
    """Keeps the rows for which a condition is true; null counts as false. Rows keep their order."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, spec: ConditionSpec) -> None:
        self._holds = compile_expression(spec.condition)
        self._selecting: SelectingOutput | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._selecting = output if isinstance(output, SelectingOutput) else None

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        mask = evaluate(self._holds, _frame(batch, self.context), pa.bool_())
        rows = mask.true_count
        if rows == batch.num_rows:
            self.output.emit(batch)
        elif rows and self._selecting is not None:
            self._selecting.emit_selected(batch, mask)
        elif rows:
            self.output.emit(batch.filter(mask))


class _ComputingOperator(Operator):
    """Base of operators that compute rows of one schema. Their text stays a dictionary if it comes as one."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._schemas: dict[tuple[pa.DataType, ...], pa.Schema] = {}
        """The schema by the types of its columns: text may be encoded in dictionaries."""

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        self._process(_frame(batch, self.context))

    def process_selected(self, batch: pa.RecordBatch, mask: pa.BooleanArray, input_index: int) -> None:
        self._process(_frame(batch, self.context).part(mask))

    @abstractmethod
    def _process(self, frame: Frame) -> None: ...

    def _emit(self, columns: Sequence[Evaluator], frame: Frame) -> None:
        """Emits the rows that the columns have over a frame."""
        pairs = zip(columns, self._schema.types, strict=True)
        arrays = [evaluate_encoded(compute, frame, kind) for compute, kind in pairs]
        schema = self._schema
        if any(isinstance(array, _MAY_BE_ENCODED) for array in arrays):
            kinds = tuple(array.type for array in arrays)
            schema = self._schemas.get(kinds) or self._schemas.setdefault(kinds, _with_types(schema, kinds))
        self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=schema))


class EvaluateOperator(_ComputingOperator):
    """Computes columns from a batch."""

    def __init__(self, spec: EvaluateSpec) -> None:
        super().__init__(spec.schema)
        self._columns = compile_encoded([tree for _, tree in spec.columns])

    def _process(self, frame: Frame) -> None:
        self._emit(self._columns, frame)


_MAY_BE_ENCODED = (pa.DictionaryArray, pa.StructArray, pa.ListArray, pa.MapArray, pa.LargeListArray)


def _with_types(schema: pa.Schema, kinds: Sequence[pa.DataType]) -> pa.Schema:
    if list(kinds) == schema.types:
        return schema
    return pa.schema([field.with_type(kind) for field, kind in zip(schema, kinds, strict=True)])


class ExpandOperator(_ComputingOperator):
    """Computes several rows from each row of a batch, such as one for each window that the row lies in."""

    def __init__(self, spec: ExpandSpec) -> None:
        super().__init__(spec.schema)
        compiled = iter(compile_encoded([tree for row in spec.rows for tree in row]))
        self._rows = [[next(compiled) for _ in row] for row in spec.rows]

    def _process(self, frame: Frame) -> None:
        for row in self._rows:
            self._emit(row, frame)


def _frame(batch: pa.RecordBatch, context: OperatorContext) -> Frame:
    """Returns the rows of a batch. The current time is when the operator gets them, and the same for all of them."""
    return Frame(batch.columns, batch.num_rows, moment=context.now_ms() * 1000)
