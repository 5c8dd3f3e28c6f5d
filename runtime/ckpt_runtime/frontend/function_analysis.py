"""Reads the generators, joins and calls of the author's functions in Spark's analyzed plans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ckpt_runtime.expressions.errors import UnsupportedExpressionError
from ckpt_runtime.expressions.nodes import Column
from ckpt_runtime.frontend.catalyst import function_number, jvm_name, output, spark_type
from ckpt_runtime.frontend.joins import HOW
from ckpt_runtime.frontend.late_join_rows import joins_streams
from ckpt_runtime.frontend.stateful_analysis import event_window
from ckpt_runtime.frontend.static_joins import STATIC_HOW
from ckpt_runtime.frontend.typed_plan import Generate, Join, MapPartitions, Project, StatefulFunction, StaticTable

if TYPE_CHECKING:
    from ckpt_runtime.frontend.analysis import PlanReader

_MAPS = frozenset({"MapInPandas", "MapInArrow", "PythonMapInArrow"})
PROCESSORS = frozenset({"TransformWithStateInPySpark", "FlatMapGroupsInPandasWithState"})
"""The relations that keep state with a function of the author."""
FUNCTIONAL = _MAPS | PROCESSORS | {"Generate", "Join", "UpdateEventTimeWatermarkColumn"}
"""The relations that :func:`read_functional` reads."""
_PANDAS = (211, 212)
"""PySpark's numbers for processors of pandas frames, without and with an initial state."""


def has_initial_state(name: str, plan: Any) -> bool:
    """Returns whether a relation with a processor has an initial state, its second input."""
    return name == "TransformWithStateInPySpark" and bool(plan.hasInitialState())


def read_functional(reader: PlanReader, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
    """Adds the nodes of a relation whose inputs are read, and returns the position of the last one."""
    if name in PROCESSORS:
        return _stateful(reader, name, plan, inputs)
    if name == "UpdateEventTimeWatermarkColumn":
        return _with_event_time(reader, plan, inputs[0])
    columns, ids = output(plan.output())
    plan_id = reader.plan_id(plan)
    if name == "Generate":
        [function] = reader.expressions([plan.generator()], inputs[0])
        outer = bool(plan.outer())
        return reader.add(Generate(columns=columns, inputs=inputs, function=function, outer=outer), ids)
    if name == "Join":
        how = jvm_name(plan.joinType())
        allowed = STATIC_HOW if any(isinstance(reader.nodes[at], StaticTable) for at in inputs) else HOW
        if how not in allowed:
            raise UnsupportedExpressionError(f"a join of type {how}", f"streams have {', '.join(allowed)}")
        conditions = [plan.condition().get()] if plan.condition().isDefined() else []
        condition = next(iter(reader.expressions(conditions, *inputs)), None)
        node = Join(columns=columns, inputs=inputs, plan_id=plan_id, how=how, condition=condition)
        left, right = event_window(plan.left()), event_window(plan.right())
        if left is not None and right is not None:
            node = msgspec.structs.replace(node, windows=(left, right))
        if joins_streams(plan):
            first, second = next(reader.late_columns)
            late = (_position(reader.ids[inputs[0]], first), _position(reader.ids[inputs[1]], second))
            node = msgspec.structs.replace(node, late=late)
        return reader.add(node, ids)
    if plan.isBarrier():
        raise UnsupportedExpressionError(
            f"{name} with barrier", "tasks of a stream never wait for each other; remove barrier"
        )
    partitions = MapPartitions(
        columns=columns,
        inputs=inputs,
        plan_id=plan_id,
        function=function_number(plan.functionExpr().func()),
        in_pandas=name == "MapInPandas",
    )
    return reader.add(partitions, ids)


def _position(ids: tuple[int, ...], wanted: int | None) -> int | None:
    """Returns the place of a column by Spark's id of it; None for one that the optimizer has made of a column."""
    return ids.index(wanted) if wanted in ids else None


def _stateful(reader: PlanReader, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
    """Adds an operator with the author's function. Spark passes it the keys before the other columns."""
    columns, ids = output(plan.output())
    input_, initial = inputs[0], inputs[1:]
    group_state = name == "FlatMapGroupsInPandasWithState"
    if any(not isinstance(reader.nodes[at], StaticTable) for at in initial):
        raise UnsupportedExpressionError("initialState", "it must be a static frame, as in Spark")
    project, known = reader.nodes[input_], reader.ids[input_]
    keys = output(plan.groupingAttributes())[1] if group_state else known[: plan.groupingAttributesLen()]
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
    return reader.add(
        StatefulFunction(
            columns=columns,
            inputs=(rows, *initial),
            plan_id=reader.plan_id(plan),
            function=function_number(plan.functionExpr().func()),
            kind=kind,
            keys=tuple(reader.ids[rows].index(id_) for id_ in keys),
            output_mode=str(plan.outputMode().toString()),
            time=str((plan.timeout() if group_state else plan.timeMode()).toString()),
            state=spark_type(plan.stateType()) if group_state else "void",
        ),
        ids,
    )


def _with_event_time(reader: PlanReader, plan: Any, input_: int) -> int:
    """Marks the column of ``transformWithState`` that ``eventTimeColumnName`` names."""
    node = reader.nodes[input_]
    [column] = reader.expressions([plan.eventTime()], input_)
    assert isinstance(node, StatefulFunction)
    assert isinstance(column, Column)
    if column.type not in ("timestamp", "timestamp_ntz"):
        raise UnsupportedExpressionError("eventTimeColumnName", "its column is not a timestamp")
    reader.nodes[input_] = msgspec.structs.replace(node, event_time=column.index)
    return input_
