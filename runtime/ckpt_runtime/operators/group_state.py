"""Base of operators over groups: buffers input, drops late rows, and removes state that the watermark has passed.

State is one row per group (several for sessions) in row buffers, which both backends have, with the time at which the
row ends. Adding to a group removes its row and stores another one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec.structs import replace

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorStateMode
from ckpt_runtime.checkpoint.measures import OperatorMeasures
from ckpt_runtime.operators.conformed import conformed
from ckpt_runtime.operators.errors import OperatorError
from ckpt_runtime.operators.operator import MAX_WATERMARK, EventTime, Operator, OperatorContext, Output
from ckpt_runtime.operators.watermark import LateRows, in_unit
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.columns import AnyArray
from ckpt_runtime.state.kernels.group_kernels import number_groups
from ckpt_runtime.state.states import KeyedRows, RowBufferSpec

WATERMARK = "watermark"
GROUPS = "groups"
"""The name of the keyed state."""
ENDS = "$ends"
"""The column of stored rows with the time at which they end, in microseconds."""
TIME = pa.timestamp("us")
NEVER = (1 << 63) - 1
MOST_WAITING = 65_536
"""Maximum number of buffered rows. Rows are buffered so that they are added in few large batches."""
OUTPUT_ROWS = 32_768


class GroupStateOperator(Operator):
    """Base of operators whose state is rows that end by event time. The watermark is part of the state."""

    requires_final_checkpoint = False
    state_name = GROUPS
    keeps_matched = False
    """Whether a stored row stays in state when further rows of its group are added."""
    waits = True
    """Whether rows may be buffered before they are added. A watermark that ends a group adds them first."""

    def __init__(self, schema: pa.Schema, keys: Sequence[str], event_time: str | None) -> None:
        self._schema = schema
        self._keys = tuple(keys)
        self._late_rows = None if event_time is None else LateRows(event_time, self.rows_in)
        self.affects = event_time
        """The input column with the earliest time at which the group that a row belongs to can end."""
        self._waiting: list[pa.RecordBatch] = []
        self._rows_waiting = 0
        self._next_affected = NEVER
        self._watermark = self._watermark_to_keep = 0
        self._marks: AnyArray = np.zeros(1024, dtype=np.uint32)

    @property
    @abstractmethod
    def stored_schema(self) -> pa.Schema:
        """The columns of stored rows but :data:`ENDS`, the keys among them."""

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        if context.keyed_state is None:
            raise OperatorError(f"operator {context.uid!r} has groups but no keyed state")
        # Event time begins at 1970, as in Spark: an earlier row is late.
        self._watermark = self._watermark_to_keep = max(
            0, min(context.operator_state.restored(WATERMARK, EventTime), default=0)
        )
        self._row_schema = self.stored_schema.append(pa.field(ENDS, TIME))
        spec = RowBufferSpec(self.state_name, self._row_schema, self._keys, ENDS, keeps_matched=self.keeps_matched)
        self._buffers: KeyedRows = context.keyed_state.row_buffers([spec])
        self._buffer = self._buffers.sides[0]

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        batch = self.shaped(batch)
        if self._late_rows is not None:
            batch = self._late_rows.removed(batch, self._watermark)
            self.late_rows_dropped = self._late_rows.dropped
        if not batch.num_rows:
            return
        if self.affects is not None:
            earliest = pc.min(batch.column(self.affects)).cast(pa.int64()).as_py()
            self._next_affected = self._next_affected if earliest is None else min(self._next_affected, earliest)
        self._waiting.append(batch)
        self._rows_waiting += batch.num_rows
        if not self.waits or self._rows_waiting >= MOST_WAITING:
            self.add_waiting()

    def shaped(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch in the schema that :meth:`add` takes. Raises OutputSchemaError."""
        return conformed(batch, self._schema, self.context.uid)

    def rows_in(self, batch: pa.RecordBatch) -> int:
        """How many rows of the input a batch stands for."""
        return int(batch.num_rows)

    def add_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._rows_waiting, self._next_affected = 0, NEVER
        forms: dict[tuple[str, ...], list[pa.RecordBatch]] = {}
        for batch in waiting:
            forms.setdefault(tuple(batch.schema.names), []).append(batch)
        for batches in forms.values():
            self.add(batches[0] if len(batches) == 1 else pa.concat_batches(batches))
            self._buffers.compact_if_due()

    @abstractmethod
    def add(self, batch: pa.RecordBatch) -> None:
        """Adds rows to the state."""

    def numbered(self, keys: list[pa.Array]) -> tuple[AnyArray, AnyArray, AnyArray]:
        """Returns the number of each row's group, and by group its slot and its first row."""
        slots = read_only(self._buffers.slots_of(keys))
        size = int(slots.max()) + 1
        if size > len(self._marks):
            self._marks = np.zeros(2 * size, dtype=np.uint32)
        groups, firsts = np.empty(len(slots), dtype=np.uint32), np.empty(len(slots), dtype=np.uint32)
        firsts = firsts[: number_groups(slots, self._marks, groups, firsts)]
        return read_only(groups), slots[firsts], firsts

    def store(self, columns: list[pa.Array], ends: pa.Array | None, slots: AnyArray) -> None:
        """Stores rows; those whose end is null, and all without ``ends``, stay for ever."""
        rows = len(slots)
        if ends is None:
            ends = pa.repeat(pa.scalar(NEVER, pa.int64()), rows)
        else:
            ends = pc.fill_null(ends.cast(pa.int64()), NEVER)
        batch = pa.RecordBatch.from_arrays([*columns, ends.cast(TIME)], schema=self._row_schema)
        self._buffer.append(batch, slots, np.zeros(rows, dtype=np.uint8))
        self.rows_updated += rows

    def process_watermark(self, timestamp_ms: int) -> None:
        """Ends the groups whose end the watermark has reached. At the end of data, open groups stay in state."""
        if timestamp_ms != MAX_WATERMARK and timestamp_ms > self._watermark:
            bound = in_unit(timestamp_ms, "us")
            if self._next_affected <= bound:
                self.add_waiting()
            self._watermark = self._watermark_to_keep = timestamp_ms
            before = len(self._buffer)
            for rows in self._buffer.expired(bound):
                for start in range(0, len(rows), OUTPUT_ROWS):
                    part = rows[start : start + OUTPUT_ROWS]
                    self.ended(self._buffer.take(part, range(len(self._row_schema) - 1)))
            self.rows_removed += before - len(self._buffer)
            self._buffers.compact_if_due()
        elif timestamp_ms == MAX_WATERMARK:
            self.add_waiting()
        self.output.emit_watermark(timestamp_ms)

    def ended(self, columns: list[pa.Array]) -> None:
        """Called with the rows that were removed because the watermark has reached their end."""

    def prepare_snapshot(self, checkpoint_id: int) -> None:
        self.add_waiting()

    def finish(self) -> None:
        self.add_waiting()

    def measured(self) -> OperatorMeasures:
        stored = {"stored_rows": len(self._buffer), "stored_bytes": self._buffer.nbytes, "watermark": self._watermark}
        return replace(super().measured(), **stored)

    def snapshot(self, checkpoint_id: int) -> None:
        self.context.operator_state.put(WATERMARK, [self._watermark_to_keep], OperatorStateMode.UNION)
