"""Reads ``observe`` of a frame (Spark's ``CollectMetrics``), and maps it to an operator."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.nodes import Expression
from ckpt_runtime.expressions.types import UnsupportedExpressionError, arrow_type
from ckpt_runtime.frontend.catalyst import PlanNodes, items
from ckpt_runtime.frontend.query_operators import Inputs, QueryOperators
from ckpt_runtime.frontend.stateful_analysis import collected, over_results
from ckpt_runtime.frontend.typed_plan import Observe, TypedAggregate
from ckpt_runtime.graph.aggregates import AGGREGATES, accepts
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.specs import ObservedAggregate, ObserveSpec

_KEEP_VALUES = frozenset({"list", "set", "percentile", "ranked", "mode", "concatenated"})
"""Accumulators that keep all values, which would travel to the driver with each checkpoint."""


def read_observe(reader: PlanNodes, plan: Any, input_: int) -> int:
    """Adds the node of an ``observe`` whose input is read, and returns its position."""
    metrics = items(plan.metrics())
    results = reader.expressions(metrics, input_, aggregates=True)
    arguments: list[Expression] = []
    calls, aggregates = collected(results, arguments)
    named = tuple(
        (str(metric.name()), over_results(tree, calls)) for metric, tree in zip(metrics, results, strict=True)
    )
    spec = ObserveSpec(str(plan.name()), tuple(arguments), tuple(map(_observed, aggregates)), named, reader.zone)
    return reader.represent(Observe, plan, input_, spec=spec)


def _observed(aggregate: TypedAggregate) -> ObservedAggregate:
    known = AGGREGATES.get(aggregate.function)
    if known is None:
        raise UnsupportedExpressionError(aggregate.function, "the engine does not have this aggregate")
    if known.accumulator in _KEEP_VALUES:
        raise UnsupportedExpressionError(
            f"{aggregate.function} in observe", "it keeps all values; observe an aggregate of fixed size"
        )
    return ObservedAggregate(
        aggregate.function, aggregate.arguments, aggregate.type, aggregate.mode == "ansi", aggregate.settings
    )


def add_observe(operators: QueryOperators, node: Observe, inputs: Inputs, schema: pa.Schema) -> Inputs:
    """Adds the operator of an ``observe``. Raises PlanError for an aggregate that does not take its arguments."""
    for aggregate in node.spec.aggregates:
        types = tuple(arrow_type(node.spec.arguments[at].type) for at in aggregate.arguments)
        if not accepts(aggregate.function, types, distinct=False):
            given = ", ".join(map(str, types))
            raise PlanError("observe", f"the aggregate {aggregate.function} does not take columns of type {given}")
    return operators.apply(node.spec, inputs, schema, node.plan_id)
