"""PySpark ``DataSource`` stream readers, unchanged and without a JVM: one enumerator plans offset ranges, readers read.

The enumerator is the head of the job. It holds the user's reader object and makes all calls that Spark's driver would
make on this one object, so that ``partitions`` and ``commit`` see what ``latestOffset`` stored in it. A range is
planned once. Its partitions are sent to the readers (``range_reader.py``) as data, each to one of them in turn; a
reader keeps a partition in state until it is read. So a restore does not plan a range again: it continues after the
last planned range. Simple readers return rows with the offset; these rows are sent instead of partitions. A watermark
after each range says up to which sequence number everything was sent, since a reader cannot know otherwise that no more
of the range will arrive.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from msgspec import Struct

from ckpt_runtime.connectors.datasource_values import restored_items, values_of, versioned
from ckpt_runtime.connectors.stream_planner import Offset, PlannedRange, StreamPlanner, new_planner
from ckpt_runtime.graph.formats import SPLIT_SCHEMA, available_now, described_data_source
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import EnumeratorSpec
from ckpt_runtime.operators.operator import OperatorContext, Output, SourceOperator, SourceStatus

_OFFSET = "offset"
_LEAST_IDLE_MS = 10
_GREATEST_IDLE_MS = 500


class _Position(Struct):
    """The stored form; ``ended_in`` is the job in which the source ended."""

    offset: Offset
    splits: NonNegative
    ended_in: str | None
    planned: bool = True

    def __post_init__(self) -> None:
        """Checks that the offset is JSON."""
        json.loads(self.offset)


class EnumeratorOperator(SourceOperator):
    """Plans offset ranges; parallelism 1. Option ``availableNow=true`` ends the source with the data present at start.

    The reader's ``commit(end)`` follows the completion of a checkpoint that covers ``end``, except in a restore drill.
    """

    def __init__(self, spec: EnumeratorSpec) -> None:
        assert isinstance(spec.format, type)
        self._source = spec.format
        self._instance, self._schema = described_data_source(spec.format, spec.options, spec.schema, spec.reported)
        self._available_now = available_now(spec.options)
        self._acknowledges = spec.acknowledges
        self._planner: StreamPlanner | None = None
        self._offsets: dict[int, Offset] = {}
        self._committed: Offset | None = None
        self._splits = 0
        self._ended = False
        self._planned = False
        self._idle = _LEAST_IDLE_MS

    def open(self, context: OperatorContext, output: Output) -> None:
        """Continues where the restored snapshot ended; an ended source stays ended for the same job."""
        super().open(context, output)
        self._planner = new_planner(self._instance, self._schema, self._available_now)
        self.requires_final_checkpoint = self._acknowledges and self._planner.commits
        self._values = values_of(self._source, self._planner.reader)
        restored = restored_items(context, _OFFSET, _Position)
        if restored:
            self._offset, self._splits = restored[0].offset, restored[0].splits
            self._ended = restored[0].ended_in == context.job_id
            self._planned = restored[0].planned
            if self._splits:
                # Watermarks in flight at the snapshot are not part of any state.
                output.emit_watermark(self._splits)
        else:
            self._offset = self._planner.initial_offset()

    def poll(self) -> SourceStatus:
        assert self._planner is not None
        if self._ended:
            return SourceStatus.END_OF_INPUT
        planned = self._planner.next_range(self._offset)
        self._ended = self._available_now and (planned is None or not self._planner.ends_by_itself)
        if planned is not None:
            self._idle = _LEAST_IDLE_MS
            self._emit(planned)
            self._offset = planned.end
            self._planned = True
            return SourceStatus.MORE_AVAILABLE
        if self._ended:
            return SourceStatus.END_OF_INPUT
        self._idle = min(self._idle * 2, _GREATEST_IDLE_MS)
        return SourceStatus.NOTHING_AVAILABLE

    def idle_ms(self) -> int:
        return self._idle

    def snapshot(self, checkpoint_id: int) -> None:
        if self._planned:  # the initial offset does not end a range
            self._offsets[checkpoint_id] = self._offset
        ended_in = self.context.job_id if self._ended else None
        item = {"offset": self._offset, "splits": self._splits, "ended_in": ended_in, "planned": self._planned}
        self.context.operator_state.put(_OFFSET, versioned([item]))

    def notify_complete(self, checkpoint_id: int) -> None:
        assert self._planner is not None
        covered = [known for known in self._offsets if known <= checkpoint_id]
        if not covered:
            return
        end = self._offsets[max(covered)]
        for known in covered:
            del self._offsets[known]
        if end != self._committed and self._acknowledges:
            # Only offsets that a completed checkpoint covers: a source may discard committed data.
            self._planner.commit(end)
            self._committed = end

    def close(self) -> None:
        if self._planner is not None:
            self._planner.stop()

    def _emit(self, planned: PlannedRange) -> None:
        """Emits one batch per range, which is distributed to the readers row by row."""
        rows = self._rows_of(planned)
        if not rows:
            return
        self._splits += len(rows)
        self.output.emit(pa.RecordBatch.from_pylist(rows, schema=SPLIT_SCHEMA))
        self.output.emit_watermark(self._splits)

    def _rows_of(self, planned: PlannedRange) -> list[dict[str, Any]]:
        if planned.rows:
            stream = _to_ipc(planned.rows, self._schema)
            return [{"sequence": self._splits, "number": 0, "partition": None, "rows": stream}]
        assert self._planner is not None
        what = f"{type(self._planner.reader).__name__}.partitions()"
        return [
            {
                "sequence": self._splits + number,
                "number": number,
                "partition": self._values.encode(partition, f"{what}[{number}]"),
                "rows": None,
            }
            for number, partition in enumerate(planned.partitions)
        ]


def _to_ipc(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())
