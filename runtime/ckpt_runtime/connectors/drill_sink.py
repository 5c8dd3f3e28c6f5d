"""Replaces every sink and every committer in a restore drill: counts rows and writes nothing.

It never reads the real sink's state, so that nothing of it is committed, aborted or cleaned up, and never loads the
real sink. Its checkpoints are marked: a job that started from them would lose what the real sink had prepared.
"""

from __future__ import annotations

import logging

import pyarrow as pa

from ckpt_runtime.checkpoint.sink_state import DRILL_MARK
from ckpt_runtime.graph.specs import DrillSinkSpec
from ckpt_runtime.operators.operator import Operator

logger = logging.getLogger(__name__)


class DrillSink(Operator):
    """The operator behind :class:`DrillSinkSpec`."""

    requires_final_checkpoint = False

    def __init__(self, spec: DrillSinkSpec) -> None:
        """``spec`` has no options."""
        self._rows = 0

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        self._rows += batch.num_rows

    def process_watermark(self, timestamp_ms: int) -> None:
        pass

    def snapshot(self, checkpoint_id: int) -> None:
        self.context.operator_state.put(DRILL_MARK, [{"rows": self._rows}])

    def close(self) -> None:
        context = self.context
        logger.info("restore drill: %s, subtask %d, took %d rows", context.uid, context.subtask_index, self._rows)
