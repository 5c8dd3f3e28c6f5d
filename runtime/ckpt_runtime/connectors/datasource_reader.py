"""PySpark ``DataSource`` stream readers, unchanged and without a JVM: one enumerator plans offset ranges, readers read.

The enumerator is the head of the job. It holds the user's reader object and makes all calls that Spark's driver would
make on this one object, so that ``partitions`` and ``commit`` see the attributes that ``latestOffset`` stored in it. A
range is planned once. Its partitions are sent to the readers (``range_reader.py``) as data, each to one of them in
turn; a reader keeps a partition in state until it is read. A restore therefore does not plan a range again: it
continues after the last planned range. Simple readers return rows with the offset; these rows are sent instead of
partitions. A watermark after each range is the sequence number up to which everything was sent, since a reader cannot
know otherwise that the range is complete.

:class:`StreamPlanner` makes the calls of one reader object in Spark's order and knows nothing of checkpoints. Offsets
are JSON texts there; each call gets its own dict, so that a reader may modify it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa
from msgspec import Struct

from ckpt_runtime.connectors.datasource_rows import (
    records_to_batches,
    restored_items,
    struct_type,
    values_of,
    versioned,
)
from ckpt_runtime.connectors.split_host import OFFSET, RangeEnumerator, Reposition
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import SPLIT_SCHEMA, available_now, described_data_source
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.graph.specs import EnumeratorSpec
from ckpt_runtime.operators.operator import OperatorContext, Output
from ckpt_runtime.sources import PositionKind, StartPosition

Offset = str
"""An offset as JSON."""


@dataclass(frozen=True, slots=True)
class PlannedRange:
    """The data that can be read now, up to ``end``: partitions, or the rows themselves if the reader returned rows."""

    end: Offset
    partitions: tuple[Any, ...] = ()
    rows: tuple[pa.RecordBatch, ...] = ()


class StreamPlanner(Protocol):
    """Wraps a user's reader. ``ends_by_itself``: the reader itself has fixed the end of a bounded source's data."""

    reader: Any
    ends_by_itself: bool
    start_positions: frozenset[PositionKind]

    @property
    def commits(self) -> bool:
        """Whether the reader implements ``commit``."""
        ...

    def initial_offset(self) -> Offset: ...

    def next_range(self, start: Offset) -> PlannedRange | None:
        """The next range, planned; None when there is nothing new."""
        ...

    def commit(self, end: Offset) -> None: ...

    def stop(self) -> None: ...


def new_planner(instance: Any, schema: pa.Schema, available_now: bool) -> StreamPlanner:
    """Creates the reader of a data source instance. Raises PlanError if it has no stream reader."""
    struct = struct_type(schema)
    try:
        return _PartitionPlanner(instance.streamReader(struct), available_now)
    except NotImplementedError:
        pass
    try:
        reader = instance.simpleStreamReader(struct)
    except NotImplementedError:
        problem = f"{type(instance).__name__} has neither a streamReader nor a simpleStreamReader"
        raise PlanError("format", f"{problem}: it is not a stream source") from None
    return _SimplePlanner(reader, schema, available_now)


class _PartitionPlanner:
    """Wraps a ``DataSourceStreamReader``."""

    start_positions: frozenset[PositionKind] = frozenset(("earliest", "latest", "offsets"))

    def __init__(self, reader: Any, available_now: bool) -> None:
        self.reader = reader
        self._with_start = bool(inspect.signature(reader.latestOffset).parameters)
        self.ends_by_itself = available_now and _prepare_available_now(reader)
        self._limit: Any = None
        if self._with_start:
            self._limit = _read_limit(reader, available_now and not self.ends_by_itself)

    @property
    def commits(self) -> bool:
        from pyspark.sql.datasource import DataSourceStreamReader

        return type(self.reader).commit is not DataSourceStreamReader.commit

    def initial_offset(self) -> Offset:
        return _offset(self.reader.initialOffset(), "initialOffset")

    def latest_offset(self, start: Offset) -> Offset:
        """The end of all data behind ``start``."""
        return self._end_behind(start, _read_limit(self.reader, everything=True))

    def _end_behind(self, start: Offset, limit: Any) -> Offset:
        found = self.reader.latestOffset(json.loads(start), limit) if self._with_start else self.reader.latestOffset()
        return start if found is None else _offset(found, "latestOffset")

    def next_range(self, start: Offset) -> PlannedRange | None:
        end = self._end_behind(start, self._limit)
        if _same(start, end):
            return None
        return PlannedRange(end, partitions=tuple(self.reader.partitions(json.loads(start), json.loads(end))))

    def commit(self, end: Offset) -> None:
        self.reader.commit(json.loads(end))

    def stop(self) -> None:
        self.reader.stop()


class _SimplePlanner:
    """Wraps a ``SimpleDataSourceStreamReader``, which knows the end of its data only by reading all of it."""

    start_positions: frozenset[PositionKind] = frozenset(("earliest", "offsets"))

    def __init__(self, reader: Any, schema: pa.Schema, available_now: bool) -> None:
        self.reader = reader
        self._schema = schema
        self.ends_by_itself = available_now and _prepare_available_now(reader)

    @property
    def commits(self) -> bool:
        from pyspark.sql.datasource import SimpleDataSourceStreamReader

        return type(self.reader).commit is not SimpleDataSourceStreamReader.commit

    def initial_offset(self) -> Offset:
        return _offset(self.reader.initialOffset(), "initialOffset")

    def next_range(self, start: Offset) -> PlannedRange | None:
        name = f"{type(self.reader).__name__}.read"
        records, latest = self.reader.read(json.loads(start))
        rows = tuple(records_to_batches(records, self._schema, name))
        end = _offset(latest, "read")
        if not _same(start, end):
            return PlannedRange(end, rows=rows)
        if rows:
            raise ValueError(f"{name} returned rows but did not advance the offset {start}")
        return None

    def commit(self, end: Offset) -> None:
        self.reader.commit(json.loads(end))

    def stop(self) -> None:
        """Does nothing: simple readers have nothing to stop."""


def _prepare_available_now(reader: Any) -> bool:
    """Has the reader fix the end of the data if it supports this; otherwise the first range is the available data."""
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

    if not isinstance(reader, SupportsTriggerAvailableNow):
        return False
    reader.prepareForTriggerAvailableNow()
    return True


def _read_limit(reader: Any, everything: bool) -> Any:
    from pyspark.sql.streaming.datasource import ReadAllAvailable

    return ReadAllAvailable() if everything else reader.getDefaultReadLimit()


def _offset(offset: Any, method: str) -> Offset:
    if not isinstance(offset, dict):
        raise TypeError(f"{method}() returned {type(offset).__name__}, expected a dict")
    try:
        return json.dumps(offset)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{method}() returned an offset that is not JSON: {error}") from None


def _same(one: Offset, other: Offset) -> bool:
    """Whether two offsets are equal regardless of the order of their members."""
    return one == other or _sorted(one) == _sorted(other)


def _sorted(offset: Offset) -> str:
    return json.dumps(json.loads(offset), sort_keys=True)


_LEAST_IDLE_MS = 10
_GREATEST_IDLE_MS = 500


class _Position(Struct):
    """The stored form; ``ended_in`` is the job in which the source ended."""

    offset: Offset
    splits: NonNegative
    ended_in: str | None
    planned: bool = True
    ranges: NonNegative = 0
    reposition: Reposition | None = None

    def __post_init__(self) -> None:
        """Checks that the offset is JSON."""
        json.loads(self.offset)


class EnumeratorOperator(RangeEnumerator):
    """Plans offset ranges; parallelism 1. Option ``availableNow=true`` ends the source with the data present at start.

    The reader's ``commit(end)`` follows the completion of a checkpoint that covers ``end``, except in a restore drill.
    """

    def __init__(self, spec: EnumeratorSpec) -> None:
        assert isinstance(spec.format, type)
        super().__init__(spec)
        self._source = spec.format
        self._instance, self._schema = described_data_source(spec.format, spec.options, spec.schema, spec.reported)
        self._available_now = available_now(spec.options)
        self._acknowledges = spec.acknowledges
        self._planner: StreamPlanner | None = None
        self._offsets: dict[int, Offset] = {}
        self._committed: Offset | None = None
        self._planned = False
        self._idle = _LEAST_IDLE_MS

    def open(self, context: OperatorContext, output: Output) -> None:
        """Continues where the restored snapshot ended."""
        super().open(context, output)
        self._planner = new_planner(self._instance, self._schema, self._available_now)
        self.requires_final_checkpoint = self._acknowledges and self._planner.commits
        self._values = values_of(self._source, self._planner.reader)
        restored = restored_items(context, OFFSET, _Position)
        if restored:
            self._offset = restored[0].offset
            self._planned = restored[0].planned
            self.continue_behind(restored[0].splits, restored[0].ranges, restored[0].ended_in)
            if restored[0].reposition is not None:
                self._offset = self._offset_at(restored[0].reposition.position)
                self._planned = False
        else:
            self._offset = self._planner.initial_offset()

    def send_range(self) -> bool:
        assert self._planner is not None
        planned = self._planner.next_range(self._offset)
        self._ended = self._available_now and (planned is None or not self._planner.ends_by_itself)
        if planned is None:
            self._idle = min(self._idle * 2, _GREATEST_IDLE_MS)
            return False
        self._idle = _LEAST_IDLE_MS
        self._emit(planned)
        self._offset = planned.end
        self._planned = True
        return True

    def idle_ms(self) -> int:
        return _LEAST_IDLE_MS if self.waits else self._idle

    def snapshot(self, checkpoint_id: int) -> None:
        super().snapshot(checkpoint_id)
        if self._planned:  # the initial offset does not end a range
            self._offsets[checkpoint_id] = self._offset
        item = {"offset": self._offset, "splits": self._splits, "ended_in": self.ended_in, "planned": self._planned}
        assert self._planner is not None
        item |= {"ranges": self.ranges_with_data, "start_positions": sorted(self._planner.start_positions)}
        self.context.operator_state.put(OFFSET, versioned([item]))

    def notify_complete(self, checkpoint_id: int) -> None:
        super().notify_complete(checkpoint_id)
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

    def _offset_at(self, position: StartPosition) -> Offset:
        """The offset of a position that a user has set. Raises ValueError if the source has no such position."""
        assert self._planner is not None
        self.check_position(position, self._planner.start_positions)
        if position.offsets is not None:
            return json.dumps(position.offsets)
        if position.kind == "earliest":
            return self._planner.initial_offset()
        assert isinstance(self._planner, _PartitionPlanner)
        return self._planner.latest_offset(self._offset)

    def _emit(self, planned: PlannedRange) -> None:
        """Emits one batch per range, which is distributed to the readers row by row."""
        rows = self._rows_of(planned)
        if not rows:
            return
        self._splits += len(rows)
        self.output.emit(pa.RecordBatch.from_pylist(rows, schema=SPLIT_SCHEMA))
        self.end_range()

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
