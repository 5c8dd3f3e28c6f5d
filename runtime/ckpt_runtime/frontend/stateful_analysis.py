"""Reads the stateful relations of Spark's analyzed plans: aggregations, windows, deduplication, processors.

Spark marks event time in the metadata of columns; a key with that mark ends its group when the watermark passes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal, rewritten
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.frontend.aggregate_calls import FILTERED
from ckpt_runtime.frontend.catalyst import PlanNodes, function_number, items, jvm_name, output, spark_type
from ckpt_runtime.frontend.generators import columns_of
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Deduplicate,
    Expand,
    Limit,
    Project,
    Sort,
    SortKey,
    StatefulFunction,
    StaticTable,
    TypedAggregate,
    TypedColumn,
)

PROCESSORS = frozenset({"TransformWithStateInPySpark", "FlatMapGroupsInPandasWithState"})
"""The relations that keep state with a function of the author."""
STATEFUL = PROCESSORS | {
    *("Aggregate", "Expand", "Deduplicate", "DeduplicateWithinWatermark", "Sort", "GlobalLimit"),
    "UpdateEventTimeWatermarkColumn",
}
"""The relations that :func:`read_stateful` reads."""
_PANDAS = (211, 212)
"""PySpark's numbers for processors of pandas frames, without and with an initial state."""
_DELAY, _SESSION = "spark.watermarkDelayMs", "spark.sessionWindow"


def read_stateful(reader: PlanNodes, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
    """Adds the nodes of a relation whose inputs are read, and returns the position of the last one."""
    if name in PROCESSORS:
        return _processor(reader, name, plan, inputs)
    [input_] = inputs
    if name == "UpdateEventTimeWatermarkColumn":
        return _with_event_time(reader, plan, input_)
    if name == "Aggregate":
        return _aggregate(reader, plan, input_)
    if name == "Expand":
        rows = tuple(reader.expressions(items(row), input_) for row in items(plan.projections()))
        return reader.represent(Expand, plan, input_, rows=rows)
    if name == "Sort":
        # That all rows are in order also holds within what sortWithinPartitions would order.
        orders = tuple(_order(reader, order, input_) for order in items(plan.order()))
        return reader.represent(Sort, plan, input_, orders=orders)
    if name == "GlobalLimit":
        [most] = reader.expressions([plan.limitExpr()], input_)
        if not isinstance(most, Literal) or most.value is None:
            raise UnsupportedExpressionError("limit", "the number of rows has to be a constant")
        return reader.represent(Limit, plan, input_, rows=int(most.value))
    return _deduplicate(reader, name, plan, input_)


def _order(reader: PlanNodes, order: Any, input_: int) -> SortKey:
    [key] = reader.expressions([order.child()], input_)
    descending = order.direction().toString() == "Descending"
    return SortKey(key, descending, order.nullOrdering().toString() == "NullsFirst")


def _deduplicate(reader: PlanNodes, name: str, plan: Any, input_: int) -> int:
    keys = tuple(_position(tree) for tree in reader.expressions(items(plan.keys()), input_))
    marks = [marks_of(attribute) for attribute in items(plan.child().output())]
    times = [at for at, mark in enumerate(marks) if _DELAY in mark]
    within = int(marks[times[0]][_DELAY]) if name == "DeduplicateWithinWatermark" and times else None
    if name == "DeduplicateWithinWatermark" and within is None:
        raise UnsupportedExpressionError(
            "dropDuplicatesWithinWatermark", "it needs withWatermark on the stream before it, as in Spark"
        )
    event_time = times[0] if times else None
    return reader.represent(Deduplicate, plan, input_, keys=keys, event_time=event_time, within_ms=within)


def _position(tree: Expression) -> int:
    assert isinstance(tree, Column)
    return tree.index


def event_window(plan: Any) -> int | None:
    """Returns the position of a plan's column with windows of event time."""
    for at, attribute in enumerate(items(plan.output())):
        if attribute.dataType().typeName() == "struct" and is_event_time(attribute):
            return at
    return None


def is_event_time(attribute: Any) -> bool:
    """Whether a column is event time, or windows of it."""
    return _DELAY in marks_of(attribute)


def marks_of(expression: Any) -> dict[str, Any]:
    """The metadata of a column; other expressions have none."""
    if jvm_name(expression) != "AttributeReference":
        return {}
    found: dict[str, Any] = json.loads(expression.metadata().json())
    return found


def _aggregate(reader: PlanNodes, plan: Any, input_: int) -> int:
    """Adds three nodes: the keys and arguments, the aggregates, and the expressions over their results.

    The values of subqueries are columns of the rows where keys or arguments need them, and of the groups elsewhere.
    """
    grouping = items(plan.groupingExpressions())
    subqueries: list[Any] = []
    keys = list(reader.expressions(grouping, input_, aggregates=True, subqueries=subqueries))
    results = reader.expressions(items(plan.aggregateExpressions()), input_, aggregates=True, subqueries=subqueries)
    arguments: list[Expression] = [*keys]
    calls, aggregates = collected(results, arguments)
    width = len(reader.nodes[input_].columns)
    if max(columns_of(arguments), default=-1) >= width:
        input_ = reader.with_values(subqueries, input_)
    prepared = tuple(TypedColumn(f"_{at}", argument.type) for at, argument in enumerate(arguments))
    before = reader.add(Project(columns=prepared, inputs=(input_,), expressions=tuple(arguments)), ())
    outcome = prepared[: len(keys)] + tuple(
        TypedColumn(f"_agg{at}", aggregate.type) for at, aggregate in enumerate(aggregates)
    )
    marks = [marks_of(expression) for expression in grouping]
    node = Aggregate(
        columns=outcome,
        inputs=(before,),
        plan_id=reader.plan_id(plan),
        keys=tuple(range(len(keys))),
        aggregates=tuple(aggregates),
        event_time=next((at for at, mark in enumerate(marks) if _DELAY in mark), None),
        session=next((at for at, mark in enumerate(marks) if _SESSION in mark), None),
    )
    grouped = reader.add(node, ())
    finished = tuple(over_results(result, [*keys, *calls], width) for result in results)
    if max(columns_of(finished), default=-1) >= len(outcome):
        grouped = reader.with_values(subqueries, grouped)
    columns, ids = output(plan.output())
    return reader.add(Project(columns=columns, inputs=(grouped,), expressions=finished), ids)


def collected(results: Sequence[Expression], arguments: list[Expression]) -> tuple[list[Call], list[TypedAggregate]]:
    """Returns the aggregates in expressions, as calls and over ``arguments``, to which it adds their arguments."""
    calls: list[Call] = []
    for result in results:
        _collect(result, calls)
    aggregates = []
    for call in calls:
        positions = []
        for argument in call.arguments:
            if argument not in arguments:
                arguments.append(argument)
            positions.append(arguments.index(argument))
        settings = {key: value for key, value in call.settings.items() if key not in ("aggregate", FILTERED)}
        filtered = bool(call.settings.get(FILTERED))
        aggregates.append(TypedAggregate(call.function, tuple(positions), call.type, call.mode, filtered, settings))
    return calls, aggregates


def over_results(result: Expression, known: Sequence[Expression], width: int | None = None) -> Expression:
    """Returns an expression over columns for ``known`` ones: keys, and the results of aggregates.

    Columns of the input after the first ``width`` ones are the values of subqueries, which come after ``known``.
    """

    def computed(tree: Expression) -> Expression | None:
        if tree in known:
            return Column(known.index(tree), tree.type)
        if isinstance(tree, Column):
            if width is not None and tree.index >= width:
                return Column(len(known) + tree.index - width, tree.type)
            raise UnsupportedExpressionError("an aggregation", "a result uses a column that is not one of its keys")
        return None

    return rewritten(result, computed)


def _collect(tree: Expression, calls: list[Call]) -> None:
    if not isinstance(tree, Call):
        return
    if tree.settings.get("aggregate"):
        if tree not in calls:
            calls.append(tree)
        return
    for argument in tree.arguments:
        _collect(argument, calls)


def has_initial_state(name: str, plan: Any) -> bool:
    """Returns whether a relation with a processor has an initial state, its second input."""
    return name == "TransformWithStateInPySpark" and bool(plan.hasInitialState())


def _processor(reader: PlanNodes, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
    """Adds the node of a relation that keeps state with a function of the author, and returns its position.

    Spark passes the function the keys before the other columns.
    """
    input_, initial = inputs[0], inputs[1:]
    group_state = name == "FlatMapGroupsInPandasWithState"
    if any(not isinstance(reader.nodes[at], StaticTable) for at in initial):
        raise UnsupportedExpressionError("initialState", "it must be a static frame, as in Spark")
    project, known = reader.nodes[input_], reader.ids[input_]
    keys = output(plan.groupingAttributes())[1] if group_state else known[: plan.groupingAttributesLen()]
    if initial and plan.initGroupingAttrsLen() != len(keys):
        message = f"it is grouped by {plan.initGroupingAttrsLen()} columns, and the stream by {len(keys)}"
        raise UnsupportedExpressionError("initialState", f"{message}: group both by the same columns")
    # The function's arguments are the frame's columns. Spark may have put the keys in front of them.
    width = len(known) - plan.functionExpr().children().size()
    if missing := [id_ for id_ in keys if id_ not in known[width:]]:
        column = project.columns[known.index(missing[0])].name
        raise UnsupportedExpressionError(
            f"groupBy of the expression {column}", "add it as a column first, and group by its name"
        )
    rows = input_
    if width and isinstance(project, Project):
        node = Project(columns=project.columns[width:], inputs=project.inputs, expressions=project.expressions[width:])
        reader.nodes[input_], reader.ids[input_] = node, known[width:]
    elif width:
        trees = tuple(Column(at, column.type) for at, column in enumerate(project.columns))[width:]
        node = Project(columns=project.columns[width:], inputs=(input_,), expressions=trees)
        rows = reader.add(node, known[width:])
    kind: Any = "group_state" if group_state else "pandas" if plan.functionExpr().evalType() in _PANDAS else "rows"
    return reader.represent(
        StatefulFunction,
        plan,
        rows,
        *initial,
        function=function_number(plan.functionExpr().func()),
        kind=kind,
        keys=tuple(reader.ids[rows].index(id_) for id_ in keys),
        output_mode=str(plan.outputMode().toString()),
        time=str((plan.timeout() if group_state else plan.timeMode()).toString()),
        state=spark_type(plan.stateType()) if group_state else "void",
    )


def _with_event_time(reader: PlanNodes, plan: Any, input_: int) -> int:
    """Marks the column of ``transformWithState`` that ``eventTimeColumnName`` names."""
    node = reader.nodes[input_]
    [column] = reader.expressions([plan.eventTime()], input_)
    assert isinstance(node, StatefulFunction)
    assert isinstance(column, Column)
    if column.type not in ("timestamp", "timestamp_ntz"):
        raise UnsupportedExpressionError("eventTimeColumnName", "its column is not a timestamp")
    reader.nodes[input_] = msgspec.structs.replace(node, event_time=column.index)
    return input_
