"""Filters and projections of typed expressions, compiled once and called once for each batch. They never block."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.errors import EvaluationError
from ckpt_runtime.expressions.evaluation import (
    Frame,
    compile_all,
    compile_encoded,
    compile_expression,
    evaluate,
    evaluate_encoded,
)
from ckpt_runtime.graph.bad_rows import letters_of, marked
from ckpt_runtime.graph.specs import ConditionSpec, EvaluateSpec, ExpandSpec
from ckpt_runtime.operators.operator import Operator, OperatorContext, Output, SelectingOutput
from ckpt_runtime.sources import BadRow


class ConditionOperator(Operator):
    """Keeps the rows for which a condition is true; null counts as false. Rows keep their order."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, spec: ConditionSpec) -> None:
        self._holds = compile_expression(spec.condition)
        self._reports_bad = spec.reports_bad
        self._selecting: SelectingOutput | None = None

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        self._selecting = output if isinstance(output, SelectingOutput) else None

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._reports_bad:
            moment = self.context.now_ms() * 1000
            emit_with_bad_rows(self.output, batch, batch.schema, lambda part: self._kept(part, moment))
            return
        mask = evaluate(self._holds, _frame(batch, self.context), pa.bool_())
        rows = mask.true_count
        if rows == batch.num_rows:
            self.output.emit(batch)
        elif rows and self._selecting is not None:
            self._selecting.emit_selected(batch, mask)
        elif rows:
            self.output.emit(batch.filter(mask))

    def _kept(self, batch: pa.RecordBatch, moment: int) -> pa.RecordBatch:
        return batch.filter(evaluate(self._holds, Frame(batch.columns, batch.num_rows, moment=moment), pa.bool_()))


class EvaluateOperator(Operator):
    """Computes columns from a batch."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, spec: EvaluateSpec) -> None:
        self._schema = spec.schema
        self._reports_bad = spec.reports_bad
        self._schemas: dict[tuple[pa.DataType, ...], pa.Schema] = {}
        """The schema by the types of its columns: text may be encoded in dictionaries."""
        self._columns = list(zip(compile_encoded([tree for _, tree in spec.columns]), spec.schema.types, strict=True))

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        if self._reports_bad:
            moment = self.context.now_ms() * 1000
            emit_with_bad_rows(
                self.output,
                batch,
                self._schema,
                lambda part: self._evaluated(Frame(part.columns, part.num_rows, moment=moment)),
            )
            return
        self.output.emit(self._evaluated(_frame(batch, self.context)))

    def process_selected(self, batch: pa.RecordBatch, mask: pa.BooleanArray, input_index: int) -> None:
        if self._reports_bad:
            self.process_batch(batch.filter(mask), input_index)
            return
        self.output.emit(self._evaluated(_frame(batch, self.context).part(mask)))

    def _evaluated(self, frame: Frame) -> pa.RecordBatch:
        arrays = [evaluate_encoded(compute, frame, kind) for compute, kind in self._columns]
        schema = self._schema
        if any(isinstance(array, _MAY_BE_ENCODED) for array in arrays):
            kinds = tuple(array.type for array in arrays)
            schema = self._schemas.get(kinds) or self._schemas.setdefault(kinds, _with_types(schema, kinds))
        return pa.RecordBatch.from_arrays(arrays, schema=schema)


def emit_with_bad_rows(
    output: Output, batch: pa.RecordBatch, schema: pa.Schema, compute: Callable[[pa.RecordBatch], pa.RecordBatch]
) -> None:
    """Emits what ``compute`` makes of a batch, with the column of bad rows (``graph/bad_rows.py``).

    A batch that fails is halved until single rows are left that fail. These are bad; of each the input row is kept as a
    JSON object, in which bytes are in base64. ``schema`` is that of the results.
    """
    try:
        result = compute(batch)
    except EvaluationError as error:
        half = batch.num_rows // 2
        if half:
            emit_with_bad_rows(output, batch.slice(0, half), schema, compute)
            emit_with_bad_rows(output, batch.slice(half), schema, compute)
            return
        raw = msgspec.json.encode(batch.to_pylist()[0])
        letters = letters_of(1, {0: BadRow(str(error), None, raw)})
        nothing = pa.RecordBatch.from_arrays([pa.nulls(1, kind) for kind in schema.types], schema=schema)
        output.emit(marked(nothing, letters))
        return
    if result.num_rows:
        output.emit(marked(result))


_MAY_BE_ENCODED = (pa.DictionaryArray, pa.StructArray, pa.ListArray, pa.MapArray, pa.LargeListArray)


def _with_types(schema: pa.Schema, kinds: Sequence[pa.DataType]) -> pa.Schema:
    if list(kinds) == schema.types:
        return schema
    return pa.schema([field.with_type(kind) for field, kind in zip(schema, kinds, strict=True)])


class ExpandOperator(Operator):
    """Computes several rows from each row of a batch, such as one for each window that the row lies in."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, spec: ExpandSpec) -> None:
        self._schema = spec.schema
        compiled = iter(compile_all([tree for row in spec.rows for tree in row]))
        self._rows = [[next(compiled) for _ in row] for row in spec.rows]

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        self._expand(_frame(batch, self.context))

    def process_selected(self, batch: pa.RecordBatch, mask: pa.BooleanArray, input_index: int) -> None:
        self._expand(_frame(batch, self.context).part(mask))

    def _expand(self, frame: Frame) -> None:
        for row in self._rows:
            arrays = [evaluate(compute, frame, kind) for compute, kind in zip(row, self._schema.types, strict=True)]
            self.output.emit(pa.RecordBatch.from_arrays(arrays, schema=self._schema))


def _frame(batch: pa.RecordBatch, context: OperatorContext) -> Frame:
    """Returns the rows of a batch. The current time is when the operator gets them, and the same for all of them."""
    return Frame(batch.columns, batch.num_rows, moment=context.now_ms() * 1000)
