"""Event time: emits a watermark that trails the greatest timestamp seen. It only ever grows.

Watermarks from upstream are swallowed, as event time starts here, except the end of all time. The greatest timestamp is
not state: after a restore the watermark starts anew with the replayed rows.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.schemas import watermark_output_schema
from ckpt_runtime.graph.specs import WatermarkSpec
from ckpt_runtime.operators.operator import MAX_WATERMARK, Operator

_PER_MS = {"s": (1000, 1), "ms": (1, 1), "us": (1, 1000), "ns": (1, 1_000_000)}


class WatermarkOperator(Operator):
    """Built from a :class:`WatermarkSpec`. Rows pass unchanged and before the watermark that they cause."""

    def __init__(self, spec: WatermarkSpec) -> None:
        self._column = spec.column
        self._delay_ms = spec.delay_ms
        self._emitted: int | None = None

    @staticmethod
    def output_schema(spec: WatermarkSpec, input_schema: pa.Schema) -> pa.Schema:
        """The input's; raises SchemaDerivationError when the column is not a timestamp."""
        return watermark_output_schema(input_schema, spec)

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        self.output.emit(batch)
        column = batch.column(self._column)
        greatest = pc.max(column).cast(pa.int64()).as_py()
        if greatest is None:
            return
        multiply, divide = _PER_MS[column.type.unit]
        self._advance(greatest * multiply // divide - self._delay_ms)

    def process_watermark(self, timestamp_ms: int) -> None:
        if timestamp_ms == MAX_WATERMARK:
            self._advance(timestamp_ms)

    def _advance(self, timestamp_ms: int) -> None:
        if self._emitted is None or timestamp_ms > self._emitted:
            self._emitted = timestamp_ms
            self.output.emit_watermark(timestamp_ms)
