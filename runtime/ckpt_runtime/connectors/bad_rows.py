"""The operators behind those that may find bad rows: good rows pass, bad ones are counted and perhaps kept.

Dead letters are Parquet files, which become visible with the checkpoint that covers them, as the files of any sink:
each bad row is there once, also after a failure.
"""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.connectors.file_sink import FileSink
from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator
from ckpt_runtime.graph.bad_rows import DEAD_LETTERS, taken_apart
from ckpt_runtime.graph.specs import BadRowsSpec
from ckpt_runtime.operators.operator import Operator


class DroppedRowsOperator(Operator):
    """Drops bad rows and counts them."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        rows, letters = taken_apart(batch)
        if letters is not None:
            self.bad_rows += len(letters)
        self.output.emit(rows)


class DeadLettersOperator(CommittingSinkOperator):
    """Writes bad rows to a directory. ``operator`` is the name of the one that found them, by its uid."""

    takes_dictionaries = True

    def __init__(self, spec: BadRowsSpec) -> None:
        assert spec.directory is not None
        super().__init__(FileSink("parquet", {"path": spec.directory}))
        self._found_by = spec.found_by

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        rows, letters = taken_apart(batch)
        if letters is not None:
            self.bad_rows += len(letters)
            found_by = pa.repeat(pa.scalar(self._found_by, pa.string()), len(letters))
            kept = pa.RecordBatch.from_arrays([found_by, *letters.flatten()], schema=DEAD_LETTERS)
            super().process_batch(kept, input_index)
        self.output.emit(rows)

    def process_watermark(self, timestamp_ms: int) -> None:
        self.output.emit_watermark(timestamp_ms)

    def process_end_of_range(self) -> None:
        self.output.emit_end_of_range()
