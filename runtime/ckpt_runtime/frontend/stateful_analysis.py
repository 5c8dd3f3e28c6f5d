"""Reads the stateful relations of Spark's analyzed plans: aggregations, windows, deduplication.

Spark marks event time in the metadata of columns; a key with that mark ends its group when the watermark passes it.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal, rewritten
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.frontend.aggregate_calls import FILTERED
from ckpt_runtime.frontend.catalyst import items, jvm_name, output
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Deduplicate,
    Expand,
    Limit,
    Project,
    Sort,
    SortKey,
    TypedAggregate,
    TypedColumn,
)

if TYPE_CHECKING:
    from ckpt_runtime.frontend.analysis import PlanReader

STATEFUL = frozenset({"Aggregate", "Expand", "Deduplicate", "DeduplicateWithinWatermark", "Sort", "GlobalLimit"})
"""The relations that :func:`read_stateful` reads."""
_DELAY, _SESSION = "spark.watermarkDelayMs", "spark.sessionWindow"


def read_stateful(reader: PlanReader, name: str, plan: Any, input_: int) -> int:
    """Adds the nodes of a relation whose input is read, and returns the position of the last one."""
    columns, ids = output(plan.output())
    plan_id = reader.plan_id(plan)
    if name == "Aggregate":
        return _aggregate(reader, plan, input_, plan_id, columns, ids)
    if name == "Expand":
        rows = tuple(reader.expressions(items(row), input_) for row in items(plan.projections()))
        return reader.add(Expand(columns=columns, inputs=(input_,), plan_id=plan_id, rows=rows), ids)
    if name == "Sort":
        orders = tuple(_order(reader, order, input_) for order in items(plan.order()))
        if not getattr(plan, "global")():  # a keyword of Python
            raise UnsupportedExpressionError("sortWithinPartitions", "call orderBy, which orders all rows")
        return reader.add(Sort(columns=columns, inputs=(input_,), plan_id=plan_id, orders=orders), ids)
    if name == "GlobalLimit":
        [most] = reader.expressions([plan.limitExpr()], input_)
        if not isinstance(most, Literal) or most.value is None:
            raise UnsupportedExpressionError("limit", "the number of rows has to be a constant")
        return reader.add(Limit(columns=columns, inputs=(input_,), plan_id=plan_id, rows=int(most.value)), ids)
    return _deduplicate(reader, name, plan, input_)


def _order(reader: PlanReader, order: Any, input_: int) -> SortKey:
    [key] = reader.expressions([order.child()], input_)
    descending = order.direction().toString() == "Descending"
    return SortKey(key, descending, order.nullOrdering().toString() == "NullsFirst")


def _deduplicate(reader: PlanReader, name: str, plan: Any, input_: int) -> int:
    columns, ids = output(plan.output())
    plan_id = reader.plan_id(plan)
    keys = tuple(_position(tree) for tree in reader.expressions(items(plan.keys()), input_))
    marks = [marks_of(attribute) for attribute in items(plan.child().output())]
    times = [at for at, mark in enumerate(marks) if _DELAY in mark]
    within = int(marks[times[0]][_DELAY]) if name == "DeduplicateWithinWatermark" and times else None
    if name == "DeduplicateWithinWatermark" and within is None:
        raise UnsupportedExpressionError(
            "dropDuplicatesWithinWatermark", "it needs withWatermark on the stream before it, as in Spark"
        )
    node = Deduplicate(
        columns=columns,
        inputs=(input_,),
        plan_id=plan_id,
        keys=keys,
        event_time=times[0] if times else None,
        within_ms=within,
    )
    return reader.add(node, ids)


def _position(tree: Expression) -> int:
    assert isinstance(tree, Column)
    return tree.index


def event_window(plan: Any) -> int | None:
    """Returns the position of a plan's column with windows of event time."""
    for at, attribute in enumerate(items(plan.output())):
        if jvm_name(attribute.dataType()) == "StructType" and is_event_time(attribute):
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


def _aggregate(
    reader: PlanReader,
    plan: Any,
    input_: int,
    plan_id: int | None,
    columns: tuple[TypedColumn, ...],
    ids: tuple[int, ...],
) -> int:
    """Adds three nodes: the keys and arguments, the aggregates, and what is computed from their results."""
    grouping = items(plan.groupingExpressions())
    keys = list(reader.expressions(grouping, input_, aggregates=True))
    results = reader.expressions(items(plan.aggregateExpressions()), input_, aggregates=True)
    calls: list[Call] = []
    for result in results:
        _collect(result, calls)
    arguments: list[Expression] = [*keys]
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
    prepared = tuple(TypedColumn(f"_{at}", argument.type) for at, argument in enumerate(arguments))
    before = reader.add(Project(columns=prepared, inputs=(input_,), expressions=tuple(arguments)), ())
    outcome = prepared[: len(keys)] + tuple(
        TypedColumn(f"_agg{at}", aggregate.type) for at, aggregate in enumerate(aggregates)
    )
    marks = [marks_of(expression) for expression in grouping]
    node = Aggregate(
        columns=outcome,
        inputs=(before,),
        plan_id=plan_id,
        keys=tuple(range(len(keys))),
        aggregates=tuple(aggregates),
        event_time=next((at for at, mark in enumerate(marks) if _DELAY in mark), None),
        session=next((at for at, mark in enumerate(marks) if _SESSION in mark), None),
    )
    grouped = reader.add(node, ())
    known = [*keys, *calls]

    def computed(tree: Expression) -> Expression | None:
        if tree in known:
            return Column(known.index(tree), tree.type)
        if isinstance(tree, Column):
            raise UnsupportedExpressionError("an aggregation", "a result uses a column that is not one of its keys")
        return None

    finished = tuple(rewritten(result, computed) for result in results)
    return reader.add(Project(columns=columns, inputs=(grouped,), expressions=finished), ids)


def _collect(tree: Expression, calls: list[Call]) -> None:
    if not isinstance(tree, Call):
        return
    if tree.settings.get("aggregate"):
        if tree not in calls:
            calls.append(tree)
        return
    for argument in tree.arguments:
        _collect(argument, calls)
