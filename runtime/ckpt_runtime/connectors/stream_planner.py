"""A user's stream reader as the enumerator calls it: one object, in Spark's order. Knows nothing of checkpoints.

Offsets are JSON texts here; each call gets its own dict, so that a reader may modify it.
"""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from ckpt_runtime.connectors.datasource_rows import records_to_batches, struct_type
from ckpt_runtime.graph.errors import PlanError

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

    @property
    def commits(self) -> bool:
        """Whether the reader has a ``commit`` of its own."""
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
        problem = f"{type(instance).__name__} makes neither a streamReader nor a simpleStreamReader"
        raise PlanError("format", f"{problem}: it is no stream source") from None
    return _SimplePlanner(reader, schema, available_now)


class _PartitionPlanner:
    """Wraps a ``DataSourceStreamReader``."""

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

    def next_range(self, start: Offset) -> PlannedRange | None:
        if self._with_start:
            latest = self.reader.latestOffset(json.loads(start), self._limit)
        else:
            latest = self.reader.latestOffset()
        end = start if latest is None else _offset(latest, "latestOffset")
        if _same(start, end):
            return None
        return PlannedRange(end, partitions=tuple(self.reader.partitions(json.loads(start), json.loads(end))))

    def commit(self, end: Offset) -> None:
        self.reader.commit(json.loads(end))

    def stop(self) -> None:
        self.reader.stop()


class _SimplePlanner:
    """Wraps a ``SimpleDataSourceStreamReader``."""

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
            raise ValueError(f"{name} gave rows but did not advance the offset {start}")
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
        raise TypeError(f"{method}() returned an offset that is no JSON: {error}") from None


def _same(one: Offset, other: Offset) -> bool:
    """Whether two offsets are equal regardless of the order of their members."""
    return one == other or _sorted(one) == _sorted(other)


def _sorted(offset: Offset) -> str:
    return json.dumps(json.loads(offset), sort_keys=True)
