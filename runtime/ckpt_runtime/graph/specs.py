"""What each operator of a pipeline does, as plain descriptions.

A spec says *what*; the operator classes in ``operators/`` and ``connectors/`` say *how* and are built from a spec by
``task/operator_factory.py`` inside the worker. Specs hold user functions and classes, so they never leave the process
which ran the pipeline's entry point: what travels is the :class:`~ckpt_runtime.graph.job_graph.JobGraph`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

ArrowFunction = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Reads a stream. ``format`` is a registered name or a PySpark ``DataSource`` class."""

    format: str | type
    options: Mapping[str, str] = field(default_factory=dict)
    schema: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class MapInArrowSpec:
    """Applies ``func(iterator of batches) -> iterator of batches``, once per buffer."""

    func: ArrowFunction
    schema: pa.Schema


@dataclass(frozen=True, slots=True)
class FilterSpec:
    """Keeps the rows for which ``predicate`` is true; null counts as false."""

    predicate: pc.Expression


@dataclass(frozen=True, slots=True)
class ProjectSpec:
    """Computes named columns from expressions."""

    columns: tuple[tuple[str, pc.Expression], ...]


@dataclass(frozen=True, slots=True)
class WatermarkSpec:
    """Event time: ``column`` holds timestamps; the watermark trails the greatest one seen by ``delay_ms``."""

    column: str
    delay_ms: int


@dataclass(frozen=True, slots=True)
class Aggregate:
    """One built-in aggregate. ``function`` is count, sum, min, max or avg; ``column`` is None for count(*)."""

    function: str
    column: str | None
    alias: str


@dataclass(frozen=True, slots=True)
class AggregateSpec:
    """Running aggregates per key; one updated row out for each row in (update mode)."""

    keys: tuple[str, ...]
    aggregates: tuple[Aggregate, ...]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Hosts a PySpark ``StatefulProcessor``. Modes are PySpark's strings; time: None, ProcessingTime, EventTime.

    ``event_time_column`` is the timestamp by which late rows are dropped; None keeps all rows.
    """

    keys: tuple[str, ...]
    processor: Any
    output_schema: pa.Schema
    output_mode: str = "Append"
    time_mode: str = "None"
    event_time_column: str | None = None


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """Writes a stream. ``format`` is a registered name or a PySpark ``DataSource`` class."""

    format: str | type
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CommitterSpec:
    """The single global committer behind a PySpark stream writer (two-phase commit); follows its :class:`SinkSpec`.

    ``schema`` is that of the rows which the writer gets.
    """

    format: str | type
    options: Mapping[str, str] = field(default_factory=dict)
    schema: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class EnumeratorSpec:
    """The single planner of offset ranges in front of a PySpark stream reader; its :class:`RangeReaderSpec` follows."""

    format: str | type
    options: Mapping[str, str] = field(default_factory=dict)
    schema: pa.Schema | None = None


@dataclass(frozen=True, slots=True)
class RangeReaderSpec:
    """Reads this subtask's share of each offset range that an :class:`EnumeratorSpec` planned."""

    format: str | type
    options: Mapping[str, str] = field(default_factory=dict)
    schema: pa.Schema | None = None


OperatorSpec = (
    SourceSpec
    | MapInArrowSpec
    | FilterSpec
    | ProjectSpec
    | WatermarkSpec
    | AggregateSpec
    | ProcessSpec
    | SinkSpec
    | CommitterSpec
    | EnumeratorSpec
    | RangeReaderSpec
)
