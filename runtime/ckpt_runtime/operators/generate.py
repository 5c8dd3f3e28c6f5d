"""Spark's generators: each input row becomes one row per element. Never blocks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Frame
from ckpt_runtime.expressions.generators import IntArray, compile_generator
from ckpt_runtime.graph.specs import GenerateSpec
from ckpt_runtime.operators.operator import Operator

OUTPUT_ROWS = 32_768
"""Maximum number of rows in an output batch, unless a single input row alone makes more."""


class GenerateOperator(Operator):
    """Built from a :class:`GenerateSpec`. Rows stay in order; so do the elements of a row."""

    requires_final_checkpoint = False

    def __init__(self, spec: GenerateSpec) -> None:
        self._spec = spec
        self._generator = compile_generator(spec.function)

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        elements = self._generator(Frame(batch.columns, batch.num_rows))
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
            self.output.emit(pa.RecordBatch.from_arrays(arrays + made, schema=self._spec.schema))


def _cuts(counts: IntArray) -> Iterator[tuple[int, int]]:
    """Yields ranges of rows with at most :data:`OUTPUT_ROWS` elements in all, or of a single row."""
    ends = np.cumsum(counts)
    first = done = 0
    while first < len(counts):
        last = max(int(np.searchsorted(ends, done + OUTPUT_ROWS, side="right")), first + 1)
        yield first, last
        first, done = last, int(ends[last - 1])
