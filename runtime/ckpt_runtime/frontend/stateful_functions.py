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
    )


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
