"""Lateral joins of a stream with generators and subqueries over the columns of one row.

The right side of such a join reads nothing but the row of the left side, so that its operations are applied to the
rows of the left side themselves: a projection adds columns, a generator repeats the row, a condition filters it.
"""

from __future__ import annotations

from typing import Any

from ckpt_runtime.expressions.nodes import Column
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.frontend.catalyst import PlanNodes, items, jvm_name, output
from ckpt_runtime.frontend.typed_plan import Filter, Generate, Project, TypedColumn

_NAMES = frozenset({"SubqueryAlias", "SQLFunctionNode"})
"""Operations that only give a name: to columns, or to what a table function of SQL returns."""
_OPERATIONS = frozenset({"Project", "Filter", "Generate"}) | _NAMES


def read_lateral(reader: PlanNodes, plan: Any, left: int) -> int:
    """Adds the nodes of a lateral join over the node ``left``, and returns the position of the last one.

    Raises UnsupportedExpressionError for a right side that reads a table or collects rows.
    """
    how = jvm_name(plan.joinType())
    if how not in ("Inner", "Cross"):
        raise UnsupportedExpressionError(
            f"a lateral join of type {how}", "streams have Inner and Cross: use LATERAL VIEW OUTER, or explode_outer"
        )
    at = left
    for operation in _operations(plan.right().plan()):
        at = _applied(reader, operation, left, at)
    if plan.condition().isDefined():
        [condition] = reader.expressions([plan.condition().get()], at)
        at = reader.add(Filter(columns=reader.nodes[at].columns, inputs=(at,), condition=condition), reader.ids[at])
    columns, ids = output(plan.output())
    width, known = len(reader.ids[left]), reader.ids[at]
    places = [*range(width), *(len(known) - 1 - known[::-1].index(id_) for id_ in ids[width:])]
    trees = tuple(Column(place, column.type) for place, column in zip(places, columns, strict=True))
    return reader.represent(Project, plan, at, expressions=trees)


def _operations(plan: Any) -> list[Any]:
    """Returns the operations of the right side, that on the row itself first."""
    found: list[Any] = []
    while jvm_name(plan) != "OneRowRelation":
        name = jvm_name(plan)
        if name not in _OPERATIONS:
            raise UnsupportedExpressionError(
                f"the operation {name} in LATERAL",
                "it may compute columns, filter, and call generators such as explode over the columns of one row: "
                "use functions of arrays, such as aggregate and array_max, or join a table",
            )
        if name not in _NAMES:
            found.append(plan)
        plan = plan.child()
    return found[::-1]


def _applied(reader: PlanNodes, operation: Any, left: int, at: int) -> int:
    """Adds one operation to the rows of the node ``at``, which begin with the columns of ``left``."""
    before: tuple[TypedColumn, ...] = reader.nodes[at].columns
    match jvm_name(operation):
        case "Filter":
            [condition] = reader.expressions([operation.condition()], at)
            return reader.add(Filter(columns=before, inputs=(at,), condition=condition), reader.ids[at])
        case "Generate":
            [function] = reader.expressions([operation.generator()], at)
            made, ids = output(operation.generatorOutput())
            outer = bool(operation.outer())
            generate = Generate(columns=(*before, *made), inputs=(at,), function=function, outer=outer)
            return reader.add(generate, reader.ids[at] + ids)
    row = reader.nodes[left].columns
    columns, ids = output(operation.output())
    kept = tuple(Column(place, column.type) for place, column in enumerate(row))
    trees = (*kept, *reader.expressions(items(operation.projectList()), at))
    return reader.add(Project(columns=(*row, *columns), inputs=(at,), expressions=trees), reader.ids[left] + ids)
