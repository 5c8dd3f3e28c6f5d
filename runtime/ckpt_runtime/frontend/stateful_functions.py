"""``transformWithState``, ``transformWithStateInPandas`` and ``applyInPandasWithState`` of typed plans."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.types import arrow_type
from ckpt_runtime.frontend.group_state import GroupStateProcessor
from ckpt_runtime.frontend.python_functions import CapturedFunctions
from ckpt_runtime.frontend.typed_plan import StatefulFunction, StaticTable
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import event_time_column, has_watermark
from ckpt_runtime.graph.logical import LogicalInput
from ckpt_runtime.graph.specs import ProcessSpec
from ckpt_runtime.processors import ArrowStatefulProcessor, ProcessorSchemas

_TIME_MODES = {
    "NoTime": "None",
    "None": "None",
    "ProcessingTime": "ProcessingTime",
    "EventTime": "EventTime",
    "NoTimeout": "ProcessingTime",
    "ProcessingTimeTimeout": "ProcessingTime",
    "EventTimeTimeout": "EventTime",
}
"""The engine's time mode for each of Spark's time modes and timeouts. Without a timeout no timer is ever set."""


def stateful_spec(
    node: StatefulFunction,
    functions: CapturedFunctions,
    inputs: tuple[LogicalInput, ...],
    rows: pa.Schema,
    output: pa.Schema,
    initial_state: str | None = None,
) -> ProcessSpec:
    """Returns the operator. ``rows`` is the schema of what the author's function gets.

    ``initial_state`` is the file of the initial state. Raises PlanError for keys that are nested, and for event time
    without a watermark.
    """
    keys = tuple(rows.names[at] for at in node.keys)
    for key in keys:
        if rows.names.count(key) > 1 or pa.types.is_nested(rows.field(key).type):
            raise PlanError("groupBy", f"column {key!r} is nested or exists twice; it cannot be a key")
    watermark = has_watermark(inputs)
    time_mode = _TIME_MODES[node.time]
    if time_mode == "EventTime" and not watermark:
        raise PlanError("timeMode", f"{node.time} needs .withWatermark(column, delay) before groupBy")
    if node.event_time is not None and not watermark:
        raise PlanError("eventTimeColumnName", "it needs .withWatermark(column, delay) before groupBy")
    function: Any = functions.of_number(node.function)
    if node.kind == "group_state":
        from pyspark.sql.types import StructType

        assert isinstance(node.state, dict)
        processor: Any = GroupStateProcessor(
            function, StructType.fromJson(node.state), node.time, list(rows.names), watermark
        )
    else:
        processor = function.__self__._stateful_processor
    in_arrow = isinstance(processor, ArrowStatefulProcessor)
    if in_arrow:
        if node.kind != "rows":
            raise PlanError(
                "transformWithStateInPandas", "an ArrowStatefulProcessor gets tables of Arrow: use transformWithState"
            )
        if initial_state is not None:
            raise PlanError("initialState", "an ArrowStatefulProcessor takes none: use a StatefulProcessor of rows")
        check_arrow_processor(processor, pa.schema([rows.field(key) for key in keys]), rows, time_mode)
    return ProcessSpec(
        keys,
        processor,
        output,
        node.output_mode,
        time_mode,
        event_time_column(inputs) if time_mode == "EventTime" else None,
        node.kind != "rows",
        None if node.event_time is None else output.names[node.event_time],
        initial_state,
        in_arrow,
    )


def check_arrow_processor(processor: ArrowStatefulProcessor, keys: pa.Schema, rows: pa.Schema, time_mode: str) -> None:
    """Raises PlanError unless the processor's schemas fit the grouped rows.

    ``keys`` are the columns of groupBy, ``rows`` those of the stream.
    """
    schemas = ProcessorSchemas(processor)
    if [(field.name, field.type) for field in schemas.key] != [(field.name, field.type) for field in keys]:
        raise PlanError("keySchema", f"it is {_text(schemas.key)}, and groupBy has {_text(keys)}")
    for field in schemas.input:
        if rows.names.count(field.name) != 1 or rows.field(field.name).type != field.type:
            raise PlanError("inputSchema", f"{field.name} {field.type} is not a column of {_text(rows)}")
    if not len(schemas.input):
        raise PlanError("inputSchema", "it has no columns: name those that handleBatch needs, or the key's")
    for field in schemas.state:
        if not field.nullable:
            raise PlanError(
                "stateSchema", f"{field.name} is NOT NULL; nulls stand for the state that a key has not yet"
            )
        if field.name in schemas.key.names or schemas.state.names.count(field.name) != 1:
            raise PlanError("stateSchema", f"{field.name} is a column of the key, or there are two of it")
    timer = processor.timerColumn
    if timer is not None:
        if timer not in schemas.state.names or schemas.state.field(timer).type != pa.int64():
            raise PlanError("timerColumn", f"{timer!r} is not a BIGINT column of stateSchema")
        if time_mode != "EventTime":
            raise PlanError("timerColumn", f"timers in Arrow need timeMode EventTime, it is {time_mode}")


def _text(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def check_initial_state(node: StatefulFunction, rows: pa.Schema, table: StaticTable) -> None:
    """Raises PlanError for an initial state that is grouped by columns of other types than the stream ``rows``."""
    wanted = [rows.types[at] for at in node.keys]
    given = [arrow_type(column.type) for column in table.columns[: len(wanted)]]
    if given != wanted:
        raise PlanError(
            "initialState",
            f"it is grouped by {', '.join(map(str, given))}, but the stream by {', '.join(map(str, wanted))}: group "
            "both by columns of the same types",
        )
