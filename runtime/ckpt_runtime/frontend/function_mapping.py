"""Maps typed relations with the author's functions, generators and joins to operators.

The author's functions include ``transformWithState`` and ``transformWithStateInPandas``. ``applyInPandasWithState``
becomes a processor of pandas frames: PySpark's ``GroupState`` over a state and a timer. As in Spark, a call of the
function that updates or removes the state, or sets a timeout, clears the timeout that an earlier call set; a timeout
expires when time has passed it, not when time has reached it; and the function then gets one frame without rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import or_
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.errors import PySparkRuntimeError, PySparkTypeError
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import StructType

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import SparkType, arrow_type
from ckpt_runtime.frontend.generators import generate_spec
from ckpt_runtime.frontend.joins import TIMES, Side, all_of, conditions_of, parts_of
from ckpt_runtime.frontend.python_functions import CapturedFunctions, calls_python, functions_spec, separated
from ckpt_runtime.frontend.query_operators import Inputs, QueryOperators, arrow_schema
from ckpt_runtime.frontend.stateful import UniqueNames
from ckpt_runtime.frontend.static_joins import static_join_spec
from ckpt_runtime.frontend.static_tables import path_of
from ckpt_runtime.frontend.struct_keys import leaves_of
from ckpt_runtime.frontend.typed_plan import (
    Filter,
    Generate,
    Join,
    MapPartitions,
    PlanNode,
    StatefulFunction,
    StaticTable,
    TypedColumn,
)
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.event_time import event_time_column, has_watermark, may_have_watermark
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.logical import LogicalInput
from ckpt_runtime.graph.output_schemas import join_output_schema
from ckpt_runtime.graph.specs import ProcessSpec
from ckpt_runtime.processors import ArrowStatefulProcessor, ProcessorSchemas

STATE = "state"


class GroupStateProcessor(StatefulProcessor):
    """Calls ``function(key, frames, state)`` for each key with rows, and for each key whose timeout has expired."""

    def __init__(
        self,
        function: Callable[..., Any],
        state: StructType,
        timeout: str,
        rows: pa.Schema,
        keys: tuple[str, ...],
        results: int,
        watermark: bool,
    ) -> None:
        """``rows`` are grouped by ``keys``; ``results`` is the number of columns that the function gives."""
        self._function = function
        self._schema = state
        self._timeout = timeout
        self._columns = list(rows.names)
        self._keys = pa.schema([rows.field(key) for key in keys])
        self._results = results
        self._watermark = watermark

    def init(self, handle: Any) -> None:
        self._handle = handle
        self._state = handle.getValueState(STATE, self._schema)

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:  # noqa: N802, N803 -- PySpark's names
        first = next(rows)
        scalars = tuple(first[name].iloc[0] for name in self._keys.names)
        return self._called(scalars, chain([first], rows), timerValues, timed_out=False)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Any]:  # noqa: N802, N803 -- PySpark's names
        import pandas as pd
        from pyspark.sql.conversion import ArrowBatchTransformer

        parts = [pa.array([part], field.type) for part, field in zip(key, self._keys, strict=True)]
        series = ArrowBatchTransformer.to_pandas(pa.RecordBatch.from_arrays(parts, self._keys.names), timezone="UTC")
        scalars = tuple(each.iloc[0] for each in series)
        return self._called(scalars, iter([pd.DataFrame(columns=self._columns)]), timerValues, timed_out=True)

    def close(self) -> None:
        """Does nothing: the function holds nothing."""

    def _called(self, key: Any, frames: Iterator[Any], times: Any, *, timed_out: bool) -> Iterator[Any]:
        value = self._state.get() if self._state.exists() else None
        state = GroupState(
            optionalValue=value,  # type: ignore[arg-type]
            batchProcessingTimeMs=times.getCurrentProcessingTimeInMs(),
            eventTimeWatermarkMs=times.getCurrentWatermarkInMs() if self._watermark else GroupState.NO_TIMESTAMP,
            timeoutConf=self._timeout,
            hasTimedOut=timed_out,
            watermarkPresent=self._watermark,
            defined=value is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self._schema,
        )
        results = self._function(key, frames, state)
        if hasattr(results, "columns"):
            raise PySparkTypeError(
                errorClass="UDF_RETURN_TYPE",
                messageParameters={"expected": "iterable of pandas.DataFrame", "actual": type(results).__name__},
            )
        for frame in results:
            names = getattr(frame, "columns", None)  # what is no frame at all is refused with all other results
            if names is not None and len(names) != self._results and not (len(names) == 0 and frame.empty):
                raise PySparkRuntimeError(
                    errorClass="RESULT_COLUMN_SCHEMA_MISMATCH",
                    messageParameters={"expected": str(self._results), "actual": str(len(names))},
                )
            # Spark appends rows of objects. Therefore missing values fit columns of any type, and times are in UTC.
            yield frame if names is None else frame.astype(object)
        # PySpark's class has no public access to the changes that the function made.
        if state._removed:
            self._state.clear()
        elif state._updated:
            self._state.update(tuple(state._value))
        timeout = int(state._timeout_timestamp)
        if self._timeout == GroupStateTimeout.NoTimeout or (
            timeout == GroupState.NO_TIMESTAMP and not state._removed and not state._updated
        ):
            return
        for time in list(self._handle.listTimers()):
            self._handle.deleteTimer(time)
        if timeout != GroupState.NO_TIMESTAMP:
            self._handle.registerTimer(timeout + 1)


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
    inputs: Inputs,
    rows: pa.Schema,
    output: pa.Schema,
    settings: Mapping[str, str],
    initial_state: str | None = None,
) -> ProcessSpec:
    """Returns the operator. ``rows`` is the schema of the rows that the author's function receives, ``settings`` are
    options of Spark.

    ``initial_state`` is the file of the initial state. Raises PlanError for keys without a type, and for event time
    without a watermark.
    """
    keys = tuple(rows.names[at] for at in node.keys)
    for key in keys:
        if rows.names.count(key) > 1:
            raise PlanError("groupBy", f"there are several columns {key!r}: rename or drop all but the key")
        if pa.types.is_null(rows.field(key).type):
            raise PlanError("groupBy", f"column {key!r} has no type, so all of its values are null: cast it to a type")
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
            function, StructType.fromJson(node.state), node.time, rows, keys, len(output), watermark
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
        if nested := [key for key in keys if pa.types.is_nested(rows.field(key).type)]:
            raise PlanError(
                "groupBy",
                f"column {nested[0]!r} is of type {rows.field(nested[0]).type}, which cannot be a key of an "
                "ArrowStatefulProcessor: group by the fields of a struct (window.start) or by a text (to_json)",
            )
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
        settings,
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


def add_functional(
    operators: QueryOperators,
    node: Generate | MapPartitions | StatefulFunction | Join,
    nodes: Sequence[PlanNode],
    inputs: Sequence[Inputs],
) -> Inputs:
    """Adds the operators of a node and returns the origin of their rows. Raises PlanError."""
    schema = arrow_schema(node.columns)
    below = nodes[node.inputs[0]].columns
    match node:
        case Join():
            tables = [side for side, at in enumerate(node.inputs) if isinstance(nodes[at], StaticTable)]
            plain, called = _apart(node)
            if tables:
                joined = _static_join(operators, plain, nodes, tables[0], inputs[1 - tables[0]])
            else:
                joined = _join(operators, plain, [nodes[at].columns for at in node.inputs], inputs)
            if called is None:
                return joined
            return add_filter(operators, Filter(columns=node.columns, condition=called), joined, schema)
        case Generate():
            return _generate(operators, node, nodes, inputs[0])
        case MapPartitions():
            function = operators.capture.called.of_number(node.function)
            form = specs.SparkForm(
                _struct_type(below), _struct_type(node.columns), _settings(operators), in_pandas=node.in_pandas
            )
            return operators.apply(specs.MapInArrowSpec(function, schema, form), inputs[0], schema, node.plan_id)
        case StatefulFunction():
            rows, initial = arrow_schema(below), None
            if node.inputs[1:]:
                table = nodes[node.inputs[1]]
                assert isinstance(table, StaticTable)
                check_initial_state(node, rows, table)
                operators.capture.tables.add(table.digest)
                initial = path_of(operators.capture.directory, table.digest)
            given = rows, schema, _settings(operators), initial
            spec = stateful_spec(node, operators.capture.called, inputs[0], *given)
            spec = replace(spec, timers_wait=not operators.has_empty_batches)
            if any(pa.types.is_nested(rows.field(key).type) for key in spec.keys):
                spec, flat = _with_nested_keys(spec, below)
                wide = pa.schema([(name, arrow_type(tree.type)) for name, tree in flat])
                prepared = operators.apply(specs.EvaluateSpec(flat, wide), inputs[0], wide, None)
                return operators.apply(spec, _hashed(prepared, spec.keys), schema, node.plan_id)
            return operators.apply(spec, _hashed(inputs[0], spec.keys), schema, node.plan_id)


def _with_nested_keys(
    spec: ProcessSpec, columns: Sequence[TypedColumn]
) -> tuple[ProcessSpec, tuple[tuple[str, Expression], ...]]:
    """Returns the operator with keys of plain values, and its input: the columns, then the values of nested keys."""
    names = [column.name for column in columns]
    flat: list[tuple[str, Expression]] = [(name, Column(at, columns[at].type)) for at, name in enumerate(names)]
    unique, keys, given = UniqueNames(names), [], []
    for key in spec.keys:
        own = flat[names.index(key)][1]
        given.append((key, own.type))
        if isinstance(own.type, dict):
            leaves = [(unique.of(key + path), leaf) for path, leaf in leaves_of(own)]
            flat += leaves
            keys += [name for name, _ in leaves]
        else:
            keys.append(key)
    return replace(spec, keys=tuple(keys), nested_keys=tuple(given)), tuple(flat)


def add_filter(operators: QueryOperators, node: Filter, inputs: Inputs, schema: pa.Schema) -> Inputs:
    """Adds a filter; the columns of Python functions in its condition are dropped after it."""
    inputs, [condition] = with_functions(operators, [node.condition], node.columns, inputs)
    if condition is node.condition:
        return operators.apply(specs.ConditionSpec(condition), inputs, schema, node.plan_id)
    wide = inputs[0].node.schema
    assert wide is not None
    kept = operators.apply(specs.ConditionSpec(condition), inputs, wide, node.plan_id)
    return operators.apply(specs.EvaluateSpec(_picked(node.columns, range(len(schema))), schema), kept, schema, None)


def with_functions(
    operators: QueryOperators, trees: Sequence[Expression], columns: tuple[TypedColumn, ...], inputs: Inputs
) -> tuple[Inputs, Sequence[Expression]]:
    """Adds operators for the Python functions in expressions over ``columns``. Returns their output."""
    steps, remaining = separated(trees, len(columns), operators.capture.called)
    if not steps:
        return inputs, trees
    kept = [(column.name, arrow_type(column.type)) for column in columns]
    types = [column.type for column in columns]
    for step in steps:
        spec, arguments = functions_spec(step, kept, _settings(operators))
        carried = [(name, Column(at, kind)) for at, ((name, _), kind) in enumerate(zip(kept, types, strict=True))]
        computed = (*carried, *arguments)
        schema = pa.schema([(name, arrow_type(tree.type)) for name, tree in computed])
        inputs = operators.apply(specs.EvaluateSpec(computed, schema), inputs, schema, None)
        inputs = operators.apply(spec, inputs, spec.schema, None)
        kept = [(field.name, field.type) for field in spec.schema]
        types += [function.type for function in spec.functions]
    return inputs, remaining


def _generate(operators: QueryOperators, node: Generate, nodes: Sequence[PlanNode], inputs: Inputs) -> Inputs:
    schema = arrow_schema(node.columns)
    columns = nodes[node.inputs[0]].columns
    at = next(position for position, each in enumerate(nodes) if each is node)
    inputs, [function] = with_functions(operators, [node.function], columns, inputs)
    if function is node.function:
        return operators.apply(generate_spec(node, nodes, at, schema), inputs, schema, node.plan_id)
    between = inputs[0].node.schema
    assert between is not None
    wide = pa.schema([*between, *list(schema)[len(columns) :]])
    behind = msgspec.structs.replace(node, function=function)
    made = operators.apply(generate_spec(behind, nodes, at, wide), inputs, wide, node.plan_id)
    added = len(between) - len(columns)
    places = [place if place < len(columns) else place + added for place in range(len(schema))]
    return operators.apply(specs.EvaluateSpec(_picked(node.columns, places), schema), made, schema, None)


def _apart(node: Join) -> tuple[Join, Expression | None]:
    """Takes what calls Python functions out of an inner join's condition: as in Spark, it filters the result."""
    if node.condition is None or not calls_python(node.condition):
        return node, None
    if node.how not in ("Inner", "Cross"):
        raise PlanError(
            "join",
            f"the condition of a join of type {node.how} calls a Python function; add its result as a column before "
            "the join",
        )
    plain: list[Expression] = []
    called: list[Expression] = []
    for tree in parts_of(node.condition):
        (called if calls_python(tree) else plain).append(tree)
    return msgspec.structs.replace(node, condition=all_of(plain)), all_of(called)


def _join(
    operators: QueryOperators, node: Join, columns: Sequence[tuple[TypedColumn, ...]], inputs: Sequence[Inputs]
) -> Inputs:
    schema = arrow_schema(node.columns)
    sides: list[Side] = []
    unmarked = [may_have_watermark(edges) for edges in inputs]
    marked = [has_watermark(edges) for edges in inputs]
    one_sided = any(marked) and not operators.capture.has_greatest_watermark
    late_columns = (None, None) if isinstance(node.late, msgspec.UnsetType) else node.late
    if one_sided and late_columns != (None, None) and not all(map(or_, marked, unmarked)):
        raise PlanError(
            "join",
            "only one of the streams has a watermark (withWatermark), and the other one is a union or comes from an "
            "operator with state: call withWatermark on each stream of it, too",
        )
    for typed, edges, late, free in zip(columns, inputs, late_columns, unmarked, strict=True):
        names = [column.name for column in typed]
        event_time = event_time_column(edges)
        known = names.index(event_time) if event_time is not None and names.count(event_time) == 1 else None
        if known is None and late is not None and typed[late].type in TIMES:
            known = late  # behind an aggregation, only Spark's mark says which column is event time
        sides.append(Side(typed, known, late, one_sided and free))
    inputs = [_without_limit(operators, *each) for each in zip(sides, inputs, strict=True)]
    conditions = conditions_of(node, *sides)
    spec = conditions.spec()
    both: Inputs = ()
    alone: Inputs = ()
    for side, letter, edges, given in zip(sides, "lr", inputs, spec.sides, strict=True):
        rows = edges
        if side.needed:
            alone += _alone(operators, node, side, letter == "l", rows)
        for tree in (*side.filters, *side.needed):
            rows = operators.apply(specs.ConditionSpec(tree), rows, arrow_schema(side.columns), None)
        prepared = specs.EvaluateSpec(side.prepared(letter), given.schema)
        both += _hashed(operators.apply(prepared, rows, given.schema, None), given.keys)
    output = join_output_schema(spec)
    joined = operators.apply(spec, both, output, node.plan_id)
    for tree in conditions.remaining() if spec.condition is None else ():
        joined = operators.apply(specs.ConditionSpec(tree), joined, output, None)
    picked = tuple(zip(schema.names, conditions.joined(node.columns), strict=True))
    return operators.apply(specs.EvaluateSpec(picked, schema), joined, schema, None) + alone


def _without_limit(operators: QueryOperators, side: Side, rows: Inputs) -> Inputs:
    """Adds event time later than any other to the side without a watermark: it does not hold back that of the other.

    In Spark, the event time of a query is that of its watermarks.
    """
    if not side.unmarked:
        return rows
    schema = arrow_schema(side.columns)
    names = zip(schema.names, side.columns, strict=True)
    own = tuple((name, Column(at, column.type)) for at, (name, column) in enumerate(names))
    time = f"{max(schema.names, key=len)}_"  # no other column has this name
    timed = schema.append(pa.field(time, arrow_type("timestamp")))
    mark = specs.WatermarkSpec(time, 0, keeps_last=not operators.has_empty_batches)
    free: Inputs = ()
    for edge in rows:
        edges = operators.apply(specs.EvaluateSpec((*own, (time, _LATEST)), timed), (edge,), timed, None)
        edges = operators.apply(mark, edges, timed, None)
        free += operators.apply(specs.EvaluateSpec(own, schema), edges, schema, None)
    return free


_LATEST = Literal(str(253_370_764_800_000_000), "timestamp")
"""The year 9999."""


def _alone(operators: QueryOperators, node: Join, side: Side, is_left: bool, rows: Inputs) -> Inputs:
    """Adds the rows of an outer join's side that can match nothing, with nulls for the other side."""
    true = [Call("Coalesce", (tree, Literal(False, "boolean")), "boolean") for tree in side.needed]
    fails: Expression = Call("Not", (true[0],), "boolean")
    for tree in true[1:]:
        fails = Call("Or", (fails, Call("Not", (tree,), "boolean")), "boolean")
    failed = operators.apply(specs.ConditionSpec(fails), rows, arrow_schema(side.columns), None)
    width, count = len(side.columns), len(node.columns)
    first = 0 if is_left else count - width
    columns = tuple(
        (column.name, Column(at - first, column.type) if first <= at < first + width else Literal(None, column.type))
        for at, column in enumerate(node.columns)
    )
    schema = arrow_schema(node.columns)
    return operators.apply(specs.EvaluateSpec(columns, schema), failed, schema, None)


def _static_join(
    operators: QueryOperators, node: Join, nodes: Sequence[PlanNode], table_side: int, inputs: Inputs
) -> Inputs:
    table = nodes[node.inputs[table_side]]
    assert isinstance(table, StaticTable)
    operators.capture.tables.add(table.digest)
    schema = arrow_schema(node.columns)
    # Both sides may have a column of one name, and event time is followed by names.
    internal = pa.schema([(f"_{at}", kind) for at, kind in enumerate(schema.types)])
    sides = [nodes[at].columns for at in node.inputs]
    spec = static_join_spec(node, sides, table, table_side, operators.capture.directory, internal)
    joined = operators.apply(spec, inputs, internal, node.plan_id)
    named = specs.EvaluateSpec(_picked(node.columns, range(len(schema))), schema)
    return operators.apply(named, joined, schema, None)


def _picked(columns: Sequence[TypedColumn], places: Sequence[int]) -> tuple[tuple[str, Expression], ...]:
    return tuple((column.name, Column(at, column.type)) for at, column in zip(places, columns, strict=True))


def _hashed(inputs: Inputs, keys: tuple[str, ...]) -> Inputs:
    return tuple(LogicalInput(edge.node, Partitioning.HASH, keys) for edge in inputs)


def _settings(operators: QueryOperators) -> dict[str, str]:
    """Returns the options by which values are converted for Python functions."""
    return {**operators.capture.conversions, **operators.capture.configuration}


def _struct_type(columns: tuple[TypedColumn, ...]) -> SparkType:
    fields = [{"name": c.name, "type": c.type, "nullable": c.nullable, "metadata": {}} for c in columns]
    return {"type": "struct", "fields": fields}
