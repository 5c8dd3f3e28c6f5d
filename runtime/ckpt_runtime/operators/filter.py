"""Keeps the rows for which a predicate is true; null counts as false. Never blocks."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import acero

from ckpt_runtime.graph.specs import FilterSpec
from ckpt_runtime.operators.expressions import apply_node
from ckpt_runtime.operators.operator import Operator


class FilterOperator(Operator):
    """Built from a :class:`FilterSpec`."""

    def __init__(self, spec: FilterSpec) -> None:
        self._node = acero.Declaration("filter", acero.FilterNodeOptions(spec.predicate))

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        for part in apply_node(batch, self._node):
            self.output.emit(part)
