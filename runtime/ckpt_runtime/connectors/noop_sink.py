"""Sinks that write nothing: the format ``noop``, and the sink of restore drills.

The drill sink replaces every sink and every committer in a restore drill. It never loads the real sink and never reads
its state, so that none of its output is committed, aborted or cleaned up. Its checkpoints are marked, because a job
that started from them would lose the pending output of the real sink.
"""

from __future__ import annotations

import logging

import pyarrow as pa

from ckpt_runtime.checkpoint.sink_state import DRILL_MARK
from ckpt_runtime.graph.specs import DrillSinkSpec, SinkSpec
from ckpt_runtime.operators.operator import Operator


class NoopSink(Operator):
    """The operator of format ``noop``. Keeps no state."""

    requires_final_checkpoint = False
    takes_dictionaries = True

    def __init__(self, spec: SinkSpec) -> None:
        """``spec`` has no options."""

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        pass

    def process_watermark(self, timestamp_ms: int) -> None:
        pass


logger = logging.getLogger(__name__)


class DrillSink(Operator):
    """The operator of :class:`DrillSinkSpec`."""

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
        logger.info("restore drill: %s, subtask %d, received %d rows", context.uid, context.subtask_index, self._rows)
