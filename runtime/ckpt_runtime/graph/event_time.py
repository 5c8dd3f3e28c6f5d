"""Finds the column of a stream that is event time: found by following it through the plan, as Spark follows column
metadata.

An operator whose output is declared (``mapInArrow``) or computed ends the trace, as in Spark;
``transformWithState`` may name a column of its output.
Behind a join it is the left side's column, or the right side's where all right rows are kept. A full outer join, one
without time bounds, and one in which this side has no watermark end the trace.

The options that align the watermarks of sources have the names that Flink SQL has for them;
``scheduler/watermark_alignment.py`` decides what they do while a job runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pyarrow as pa

from ckpt_runtime.expressions.nodes import Column, Literal
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.logical import LogicalInput, LogicalNode
from ckpt_runtime.graph.options import Option, duration_ms, parse_value
from ckpt_runtime.graph.specs import (
    AggregateSpec,
    CommitterSpec,
    ConditionSpec,
    DeduplicateSpec,
    EvaluateSpec,
    ExpandSpec,
    GenerateSpec,
    GroupSpec,
    JoinSpec,
    LatestSpec,
    LimitSpec,
    MapInArrowSpec,
    ObserveSpec,
    OperatorSpec,
    ProcessSpec,
    PythonFunctionsSpec,
    SinkSpec,
    SourceSpec,
    StaticJoinSpec,
    WatermarkSpec,
)

_KEEP_COLUMNS = (ConditionSpec, ObserveSpec, GenerateSpec, PythonFunctionsSpec, DeduplicateSpec, LatestSpec, LimitSpec)
"""Specs of operators that emit their input's columns unchanged."""
NO_ROWS = ConditionSpec(Literal(False, "boolean"))
"""Only watermarks pass this operator."""


def has_watermark(inputs: Sequence[LogicalInput]) -> bool:
    """Returns whether every path from the sources passes through a watermark."""
    return all(
        isinstance(edge.node.spec, WatermarkSpec) or (bool(edge.node.inputs) and has_watermark(edge.node.inputs))
        for edge in inputs
    )


def may_have_watermark(inputs: Sequence[LogicalInput]) -> bool:
    """Returns whether the streams have no watermark, and a new watermark would see whole batches of a source."""
    return all(
        isinstance(edge.node.spec, SourceSpec)
        or (
            isinstance(edge.node.spec, _OF_ONE_ROW)
            and len(edge.node.inputs) == 1
            and may_have_watermark(edge.node.inputs)
        )
        for edge in inputs
    )


_OF_ONE_ROW = (ConditionSpec, EvaluateSpec, PythonFunctionsSpec, StaticJoinSpec)


def event_time_column(inputs: Sequence[LogicalInput]) -> str | None:
    """The event time column that all ``inputs`` (more than one after a union) have; None when it cannot be traced.

    Raises PlanError when the united streams have different ones.
    """
    found = {_column_of(edge.node) for edge in inputs if not _has_no_rows(edge.node)}
    if len(found - {None}) > 1:
        names = sorted(name for name in found if name is not None)
        raise PlanError(
            "union", f"the united streams have different event time columns {names}; rename one before the union"
        )
    return found.pop() if len(found) == 1 else None


def _has_no_rows(node: LogicalNode) -> bool:
    """Whether an operator emits only watermarks (``frontend/query_watermark.py``)."""
    return any(edge.node.spec == NO_ROWS for edge in node.inputs)


def _column_of(node: LogicalNode) -> str | None:
    spec = node.spec
    if isinstance(spec, WatermarkSpec):
        return spec.column
    if isinstance(spec, ProcessSpec):
        return spec.output_event_time
    if isinstance(spec, JoinSpec):
        side = spec.right if spec.how == "right_outer" else spec.left
        return None if spec.how == "full_outer" or side.late_by == "" else side.event_time
    if not isinstance(spec, (*_KEEP_COLUMNS, EvaluateSpec, AggregateSpec, StaticJoinSpec)):
        return None
    column = event_time_column(node.inputs)
    if column is None or isinstance(spec, _KEEP_COLUMNS):
        return column
    if isinstance(spec, EvaluateSpec | StaticJoinSpec):
        return _renamed(spec, node.inputs[0].node.schema, column)
    return column if column in spec.keys else None


def _renamed(spec: EvaluateSpec | StaticJoinSpec, schema: pa.Schema | None, column: str) -> str | None:
    """Returns the name that a column of the input, whose schema is given, has in the output of an operator."""
    assert schema is not None
    position = schema.get_field_index(column)
    if isinstance(spec, StaticJoinSpec):
        return spec.schema.names[spec.output.index(position)] if position in spec.output else None
    return next((name for name, tree in spec.columns if isinstance(tree, Column) and tree.index == position), None)


_TIMELESS = (
    AggregateSpec,
    CommitterSpec,
    ConditionSpec,
    EvaluateSpec,
    ExpandSpec,
    GenerateSpec,
    LatestSpec,
    MapInArrowSpec,
    PythonFunctionsSpec,
    StaticJoinSpec,
)
"""Specs of operators for which it makes no difference where in a stream watermarks and the ends of ranges are."""


def uses_event_time(spec: OperatorSpec) -> bool:
    """Whether the result of an operator changes if a watermark or the end of a range arrives after further rows."""
    match spec:
        case GroupSpec():
            return spec.event_time is not None or spec.session is not None or spec.mode == "complete"
        case JoinSpec():
            times = (time for side in spec.sides for time in (side.event_time, side.late_by))
            return spec.within_ms is not None or any(times)
        case DeduplicateSpec():
            return (spec.event_time, spec.forget_by, spec.within_ms) != (None, None, None)
        case SinkSpec():
            return spec.table is not None
    return not isinstance(spec, _TIMELESS)


GROUP_OPTION = "scan.watermark.alignment.group"
MAX_DRIFT_OPTION = "scan.watermark.alignment.max-drift"
UPDATE_INTERVAL_OPTION = "scan.watermark.alignment.update-interval"
IDLE_TIMEOUT_OPTION = "scan.watermark.idle-timeout"
ALIGNMENT_OPTIONS = (GROUP_OPTION, MAX_DRIFT_OPTION, UPDATE_INTERVAL_OPTION, IDLE_TIMEOUT_OPTION)
"""Reader options of every source that is read in splits, handled by the engine."""

_LEAST_INTERVAL_MS = 10


class Alignment(NamedTuple):
    """Durations are in ms. With ``idle_timeout_ms`` None, the timeout of the job applies."""

    group: str
    max_drift_ms: int
    update_interval_ms: int
    idle_timeout_ms: int | None


def alignment_of(options: Mapping[str, str]) -> Alignment | None:
    """The options of a reader about alignment; None if it has none. Raises PlanError for a bad one."""
    given = {key.lower(): str(value) for key, value in options.items()}
    values = {key: given[key] for key in ALIGNMENT_OPTIONS if key in given}
    if not values:
        return None
    for key, other in ((GROUP_OPTION, MAX_DRIFT_OPTION), (MAX_DRIFT_OPTION, GROUP_OPTION)):
        if not values.get(key, "").strip():
            raise PlanError(f"option {key!r}", f"alignment of watermarks needs it, together with {other}")
    durations = {
        key: int(parse_value(Option(key, duration_ms), text)) for key, text in values.items() if key != GROUP_OPTION
    }
    interval_ms = durations.get(UPDATE_INTERVAL_OPTION, 1_000)
    if interval_ms < _LEAST_INTERVAL_MS:
        problem = f"{values[UPDATE_INTERVAL_OPTION]!r} is less than {_LEAST_INTERVAL_MS} ms"
        raise PlanError(f"option {UPDATE_INTERVAL_OPTION!r}", problem)
    return Alignment(values[GROUP_OPTION], durations[MAX_DRIFT_OPTION], interval_ms, durations.get(IDLE_TIMEOUT_OPTION))
