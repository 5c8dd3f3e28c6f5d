"""Applies a user function to each buffer: ``func(iterator of batches) -> iterator of batches``.

The function is called once per buffer with an iterator of that one batch, so that nothing is held back over a barrier.
Its result is checked against the declared schema as in Spark: types are compared by position.
"""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from ckpt_runtime.graph.specs import MapInArrowSpec
from ckpt_runtime.operators.conformed import conformed_result
from ckpt_runtime.operators.errors import UserFunctionError
from ckpt_runtime.operators.operator import Operator
from ckpt_runtime.operators.python_functions import in_form
from ckpt_runtime.operators.task_context import new_task, running


class MapInArrowOperator(Operator):
    """Built from a :class:`MapInArrowSpec`."""

    def __init__(self, spec: MapInArrowSpec) -> None:
        self._function = spec.func if spec.form is None else in_form(spec.func, spec.form)
        self._schema = spec.schema
        self.requires_final_checkpoint = getattr(spec.func, "requires_final_checkpoint", False) is True

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        with running(new_task(self.context.subtask_index, self.context.attempt)):
            self._apply(batch)

    def _apply(self, batch: pa.RecordBatch) -> None:
        result = self._function(iter((batch,)))
        if not isinstance(result, Iterable) or isinstance(result, pa.RecordBatch | pa.Table):
            raise UserFunctionError(
                f"the function of operator {self.context.uid!r} returned {type(result).__name__}, "
                "it must return an iterator of pyarrow.RecordBatch"
            )
        for part in result:
            if not isinstance(part, pa.RecordBatch):
                raise UserFunctionError(
                    f"the function of operator {self.context.uid!r} returned a {type(part).__name__}, it must return "
                    "pyarrow.RecordBatch"
                )
            conformed = conformed_result(part, self._schema, self.context.uid)
            if conformed.num_rows:
                self.output.emit(conformed)
