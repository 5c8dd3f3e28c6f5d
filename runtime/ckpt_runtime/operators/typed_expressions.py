"""Filters, projections and generators of typed expressions, compiled once and called per batch. They never block."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Frame, compile_encoded, compile_expression, evaluate, evaluate_encoded
from ckpt_runtime.expressions.generators import Elements, IntArray, compile_generator
from ckpt_runtime.expressions.nodes import Expression
from ckpt_runtime.graph.specs import ConditionSpec, EvaluateSpec, ExpandSpec, GenerateSpec
from ckpt_runtime.operators.bad_rows import LeavesOutBadRows
from ckpt_runtime.operators.operator import OperatorContext, Output, SelectingOutput


class ConditionOperator(LeavesOutBadRows):
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
        for part, mask in self._parts(batch, self._mask):
            self._emit(part, mask)

    def _mask(self, batch: pa.RecordBatch) -> pa.BooleanArray:
        return evaluate(self._holds, _frame(batch, self.context), pa.bool_())

    def _emit(self, batch: pa.RecordBatch, mask: pa.BooleanArray) -> None:
        rows = mask.true_count
        if rows == batch.num_rows:
            self.output.emit(batch)
        elif rows and self._selecting is not None and self._bad_rows is None:
            self._selecting.emit_selected(batch, mask)
        elif rows:
            self._emit_from(batch, batch.filter(mask), mask)


class _ComputingOperator(LeavesOutBadRows):
    """Base of operators that compute rows of one schema. Their text stays a dictionary if it is one."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, schema: pa.Schema, rows: Sequence[Sequence[Expression]]) -> None:
        self._schema = schema
        self._given: list[pa.DataType] = schema.types
        """The types of the last columns, which may be encoded in dictionaries, and their schema."""
        self._given_schema = schema
        compiled = iter(compile_encoded([tree for row in rows for tree in row]))
        self._rows = [[(next(compiled), kind) for kind in schema.types] for _ in rows]

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        for part, rows in self._parts(batch, lambda part: self._computed(_frame(part, self.context))):
            self._emit(rows, part)

    def process_selected(self, batch: pa.RecordBatch, mask: pa.BooleanArray, input_index: int) -> None:
        if self._bad_rows is not None:
            self.process_batch(batch.filter(mask), input_index)
        else:
            self._emit(self._computed(_frame(batch, self.context).part(mask)), batch)

    def _computed(self, frame: Frame) -> list[list[pa.Array]]:
        return [[evaluate_encoded(compute, frame, kind) for compute, kind in row] for row in self._rows]

    def _emit(self, rows: list[list[pa.Array]], part: pa.RecordBatch) -> None:
        for arrays in rows:
            # Types are compared, because Arrow computes the hash of one from its text.
            kinds = [array.type for array in arrays]
            if kinds != self._given:
                fields = [field.with_type(kind) for field, kind in zip(self._schema, kinds, strict=True)]
                self._given, self._given_schema = kinds, pa.schema(fields)
            self._emit_from(part, pa.RecordBatch.from_arrays(arrays, schema=self._given_schema))


class EvaluateOperator(_ComputingOperator):
    """Computes columns from a batch."""

    def __init__(self, spec: EvaluateSpec) -> None:
        super().__init__(spec.schema, [[tree for _, tree in spec.columns]])


class ExpandOperator(_ComputingOperator):
    """Computes several rows from each row of a batch, such as one for each window of the row."""

    def __init__(self, spec: ExpandSpec) -> None:
        super().__init__(spec.schema, spec.rows)


def _frame(batch: pa.RecordBatch, context: OperatorContext) -> Frame:
    """Returns the rows of a batch. The current time is when the operator gets them, and the same for all of them."""
    return Frame(batch.columns, batch.num_rows, moment=context.now_ms() * 1000, random_bytes=os.urandom)


OUTPUT_ROWS = 32_768
"""Maximum number of rows in an output batch, unless a single input row alone makes more."""


class GenerateOperator(LeavesOutBadRows):
    """Built from a :class:`GenerateSpec`. Rows stay in order; so do the elements of a row."""

    requires_final_checkpoint = False

    def __init__(self, spec: GenerateSpec) -> None:
        self._spec = spec
        self._generator = compile_generator(spec.function)

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        for part, elements in self._parts(batch, lambda part: self._generator(_frame(part, self.context))):
            self._emit(part, elements)

    def _emit(self, batch: pa.RecordBatch, elements: Elements) -> None:
        counts = np.maximum(elements.counts, 1) if self._spec.outer else elements.counts
        for first, last in _cuts(counts):
            rows = np.repeat(np.arange(first, last), counts[first:last])
            if not len(rows):
                continue
            within = np.arange(len(rows)) - np.repeat(
                np.cumsum(counts[first:last]) - counts[first:last], counts[first:last]
            )
            missing = elements.counts[rows] == 0
            at = pa.array(elements.starts[rows] + within, pa.int64(), mask=missing if missing.any() else None)
            indices = pa.array(rows)
            made = [column.take(at) for column in elements.columns]
            if elements.positions:
                made.insert(0, pa.array(within, pa.int32(), mask=missing))
            arrays = [
                column.take(indices) if position in self._spec.carried else pa.nulls(len(rows), column.type)
                for position, column in enumerate(batch.columns)
            ]
            self._emit_from(batch, pa.RecordBatch.from_arrays(arrays + made, schema=self._spec.schema), rows)


def _cuts(counts: IntArray) -> Iterator[tuple[int, int]]:
    """Yields ranges of rows with at most :data:`OUTPUT_ROWS` elements in all, or of a single row."""
    ends = np.cumsum(counts)
    first = done = 0
    while first < len(counts):
        last = max(int(np.searchsorted(ends, done + OUTPUT_ROWS, side="right")), first + 1)
        yield first, last
        first, done = last, int(ends[last - 1])
