"""Computes named columns from expressions. Never blocks."""

from __future__ import annotations

import pyarrow as pa
from pyarrow import acero

from ckpt_runtime.graph.specs import ProjectSpec
from ckpt_runtime.operators.expressions import apply_node
from ckpt_runtime.operators.operator import Operator


class ProjectOperator(Operator):
    """Built from a :class:`ProjectSpec`."""

    def __init__(self, spec: ProjectSpec) -> None:
        expressions = [expression for _, expression in spec.columns]
        names = [name for name, _ in spec.columns]
        self._node = acero.Declaration("project", acero.ProjectNodeOptions(expressions, names))

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        for part in apply_node(batch, self._node):
            self.output.emit(part)
