"""PySpark ``DataSource`` stream readers, unchanged and without a JVM: one enumerator plans offset ranges, readers read.

The enumerator is the head of the job: it asks for the latest offset, sends each new range to all readers and keeps the
offset as its state. Each reader (``range_reader.py``) plans the range's partitions (which must not depend on who plans)
and reads every ``parallelism``-th. Simple readers hand out rows with the offset: those travel with the range.
"""

from __future__ import annotations

import inspect
import json
from typing import Any, Protocol

import pyarrow as pa

from ckpt_runtime.connectors.datasource_rows import records_to_batches, struct_type
from ckpt_runtime.connectors.task_context import identify_thread
from ckpt_runtime.graph.formats import RANGE_SCHEMA, available_now, new_data_source, source_schema
from ckpt_runtime.graph.specs import EnumeratorSpec
from ckpt_runtime.operators.operator import OperatorContext, Output, SourceOperator, SourceStatus

Offset = dict[str, Any]

_OFFSET = "offset"
_LEAST_IDLE_MS = 10
_GREATEST_IDLE_MS = 500


class _Planner(Protocol):
    """A user's stream reader, as the enumerator uses it."""

    ends_by_itself: bool

    def initial_offset(self) -> Offset: ...

    def next_range(self, start: Offset) -> tuple[Offset, list[pa.RecordBatch] | None]:
        """The end of what can be read now, and the rows themselves where the reader gave them."""
        ...

    def commit(self, end: Offset) -> None: ...

    def stop(self) -> None: ...


class _StreamPlanner:
    """Around a ``DataSourceStreamReader``."""

    def __init__(self, reader: Any, available_now: bool) -> None:
        self._reader = reader
        self._with_start = bool(inspect.signature(reader.latestOffset).parameters)
        self.ends_by_itself = available_now and _prepare_available_now(reader)
        self._limit: Any = None
        if self._with_start:
            self._limit = _read_limit(reader, available_now and not self.ends_by_itself)

    def initial_offset(self) -> Offset:
        return _as_json(self._reader.initialOffset(), "initialOffset")

    def next_range(self, start: Offset) -> tuple[Offset, list[pa.RecordBatch] | None]:
        end = self._reader.latestOffset(start, self._limit) if self._with_start else self._reader.latestOffset()
        return (start if end is None else _as_json(end, "latestOffset")), None

    def commit(self, end: Offset) -> None:
        self._reader.commit(end)

    def stop(self) -> None:
        self._reader.stop()


class _SimplePlanner:
    """Around a ``SimpleDataSourceStreamReader``."""

    def __init__(self, reader: Any, schema: pa.Schema, available_now: bool) -> None:
        self._reader = reader
        self._schema = schema
        self.ends_by_itself = available_now and _prepare_available_now(reader)

    def initial_offset(self) -> Offset:
        return _as_json(self._reader.initialOffset(), "initialOffset")

    def next_range(self, start: Offset) -> tuple[Offset, list[pa.RecordBatch] | None]:
        records, end = self._reader.read(start)
        batches = list(records_to_batches(records, self._schema, f"{type(self._reader).__name__}.read"))
        offset = _as_json(end, "read")
        if offset == start and batches:
            raise ValueError(f"{type(self._reader).__name__}.read gave rows but did not advance the offset {start}")
        return offset, batches

    def commit(self, end: Offset) -> None:
        self._reader.commit(end)

    def stop(self) -> None:
        """Simple readers have nothing to stop."""


def _planner(source: type, options: Any, schema: pa.Schema, available_now: bool) -> _Planner:
    instance = new_data_source(source, options)
    struct = struct_type(schema)
    try:
        reader = instance.streamReader(struct)
    except NotImplementedError:
        return _SimplePlanner(instance.simpleStreamReader(struct), schema, available_now)
    return _StreamPlanner(reader, available_now)


def _prepare_available_now(reader: Any) -> bool:
    """Fixes the end of the data in a reader that supports it; otherwise one range is what is available now."""
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

    if not isinstance(reader, SupportsTriggerAvailableNow):
        return False
    reader.prepareForTriggerAvailableNow()
    return True


def _read_limit(reader: Any, everything: bool) -> Any:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    return ReadAllAvailable() if everything else reader.getDefaultReadLimit()


def _as_json(offset: Any, method: str) -> Offset:
    """Offsets are stored and sent as JSON; a reader sees its own after that round trip, as in Spark."""
    if not isinstance(offset, dict):
        raise TypeError(f"{method}() returned {type(offset).__name__}, expected a dict")
    try:
        restored: Offset = json.loads(json.dumps(offset))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{method}() returned an offset that is no JSON: {error}") from None
    return restored


class EnumeratorOperator(SourceOperator):
    """Plans offset ranges; parallelism 1. Option ``availableNow=true`` ends the source with what is there at the start.

    The reader's ``commit(end)`` follows the completion of a checkpoint that covers ``end``.
    """

    def __init__(self, spec: EnumeratorSpec) -> None:
        assert isinstance(spec.format, type)
        self._source = spec.format
        self._options = spec.options
        self._schema = source_schema(spec.format, spec.options, spec.schema)
        self._available_now = available_now(spec.options)
        self._planner: _Planner | None = None
        self._offsets: dict[int, Offset] = {}
        self._committed: Offset | None = None
        self._ended = False
        self._idle = _LEAST_IDLE_MS

    def open(self, context: OperatorContext, output: Output) -> None:
        super().open(context, output)
        identify_thread(context.subtask_index, context.parallelism, context.attempt)
        self._planner = _planner(self._source, self._options, self._schema, self._available_now)
        restored = context.operator_state.restored(_OFFSET)
        if restored:
            self._offset, self._sequence = restored[0]["offset"], int(restored[0]["sequence"])
        else:
            self._offset, self._sequence = self._planner.initial_offset(), 0

    def poll(self) -> SourceStatus:
        assert self._planner is not None
        if self._ended:
            return SourceStatus.END_OF_INPUT
        end, rows = self._planner.next_range(self._offset)
        self._ended = self._available_now and not self._planner.ends_by_itself
        if end == self._offset:
            if self._available_now:
                return SourceStatus.END_OF_INPUT
            self._idle = min(self._idle * 2, _GREATEST_IDLE_MS)
            return SourceStatus.NOTHING_AVAILABLE
        self._idle = _LEAST_IDLE_MS
        self._emit(end, rows)
        self._offset = end
        return SourceStatus.MORE_AVAILABLE

    def idle_ms(self) -> int:
        return self._idle

    def snapshot(self, checkpoint_id: int) -> None:
        self._offsets[checkpoint_id] = self._offset
        self.context.operator_state.put(_OFFSET, [{"offset": self._offset, "sequence": self._sequence}])

    def notify_complete(self, checkpoint_id: int) -> None:
        assert self._planner is not None
        covered = [known for known in self._offsets if known <= checkpoint_id]
        if not covered:
            return
        end = self._offsets[max(covered)]
        for known in covered:
            del self._offsets[known]
        if end != self._committed:
            self._planner.commit(end)
            self._committed = end

    def close(self) -> None:
        if self._planner is not None:
            self._planner.stop()

    def _emit(self, end: Offset, rows: list[pa.RecordBatch] | None) -> None:
        row = {
            "sequence": self._sequence,
            "start": json.dumps(self._offset),
            "end": json.dumps(end),
            "rows": None if rows is None else _to_ipc(rows, self._schema),
        }
        self._sequence += 1
        self.output.emit(pa.RecordBatch.from_pylist([row], schema=RANGE_SCHEMA))


def _to_ipc(batches: list[pa.RecordBatch], schema: pa.Schema) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())
