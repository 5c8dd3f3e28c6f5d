"""Format ``noop``: discards all rows."""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.graph.specs import SinkSpec
from ckpt_runtime.operators.operator import Operator


class NoopSink(Operator):
    """The operator behind format ``noop``. Keeps no state."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, spec: SinkSpec) -> None:
        """``spec`` has no options."""

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        pass

    def process_watermark(self, timestamp_ms: int) -> None:
        pass
