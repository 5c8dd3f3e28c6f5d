"""Passes the first row of each key and drops the others, as Spark does. Never blocks.

A key is kept until the watermark has reached its own event time or, within a watermark, the end of the delay after its
first row. Without event time among the keys it is kept forever.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.graph.specs import DeduplicateSpec
from ckpt_runtime.operators.group_state import TIME, GroupStateOperator
from ckpt_runtime.operators.groups import normal_key


class DeduplicateOperator(GroupStateOperator):
    """Built from a :class:`DeduplicateSpec`."""

    waits = False
    keeps_matched = True

    def __init__(self, spec: DeduplicateSpec) -> None:
        super().__init__(spec.schema, spec.keys, spec.event_time)
        self.state_operator = "dedupe" if spec.within_ms is None else "dedupeWithinWatermark"
        self._spec = spec

    @property
    def stored_schema(self) -> pa.Schema:
        return pa.schema([self._schema.field(name) for name in self._keys])

    def add(self, batch: pa.RecordBatch) -> None:
        keys = [normal_key(batch.column(name)) for name in self._keys]
        _, slots, firsts = self.numbered(keys)
        found = np.zeros(len(slots), dtype=np.uint8)
        self._buffer.mark_found(slots, np.empty(0, dtype=np.int64), 0, 0, found)
        new = found == 0
        if not new.any():
            return
        rows = pa.array(firsts[new])
        passed = batch.take(rows)
        self.store([key.take(rows) for key in keys], self._ends(passed), slots[new])
        self.output.emit(passed)

    def _ends(self, rows: pa.RecordBatch) -> pa.Array | None:
        """The times at which the keys of these rows are removed from state."""
        spec = self._spec
        if spec.within_ms is not None:
            assert spec.event_time is not None
            times = rows.column(spec.event_time).cast(pa.int64())
            return pc.add_checked(times, spec.within_ms * 1000).cast(TIME)
        return None if spec.forget_by is None else rows.column(spec.forget_by)
