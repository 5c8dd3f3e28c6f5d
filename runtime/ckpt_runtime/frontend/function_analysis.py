"""Reads relations of Spark's analyzed plans that are generators, or call a function of the author."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt_runtime.expressions.errors import UnsupportedExpressionError
from ckpt_runtime.frontend.catalyst import function_number, output
from ckpt_runtime.frontend.typed_plan import Generate, MapPartitions

if TYPE_CHECKING:
    from ckpt_runtime.frontend.analysis import PlanReader

_MAPS = frozenset({"MapInPandas", "MapInArrow", "PythonMapInArrow"})
FUNCTIONAL = _MAPS | {"Generate"}
"""The relations that :func:`read_functional` reads."""


def read_functional(reader: PlanReader, name: str, plan: Any, inputs: tuple[int, ...]) -> int:
    """Adds the nodes of a relation whose inputs are read, and returns the position of the last one."""
    columns, ids = output(plan.output())
    plan_id = reader.plan_id(plan)
    if name == "Generate":
        [function] = reader.expressions([plan.generator()], inputs[0])
        outer = bool(plan.outer())
        return reader.add(Generate(columns=columns, inputs=inputs, function=function, outer=outer), ids)
    if plan.isBarrier():
        raise UnsupportedExpressionError(
            f"{name} with barrier", "tasks of a stream never wait for each other; leave barrier out"
        )
    node = MapPartitions(
        columns=columns,
        inputs=inputs,
        plan_id=plan_id,
        function=function_number(plan.functionExpr().func()),
        in_pandas=name == "MapInPandas",
    )
    return reader.add(node, ids)
