"""Output mode ``complete``: checks plans and sinks, and adds the operators between aggregation and sink."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ckpt_runtime.expressions.nodes import Column, Expression
from ckpt_runtime.expressions.types import arrow_type
from ckpt_runtime.frontend.batch_writers import SparkWrite
from ckpt_runtime.frontend.query_operators import Inputs, QueryOperators
from ckpt_runtime.frontend.struct_keys import is_window, leaves_of
from ckpt_runtime.frontend.typed_plan import (
    Aggregate,
    Filter,
    Generate,
    Join,
    Limit,
    MapPartitions,
    PlanNode,
    Project,
    Sort,
    StaticTable,
    Watermark,
)
from ckpt_runtime.graph import specs
from ckpt_runtime.graph.errors import PlanError

_BEHIND = (Project, Filter, Generate, MapPartitions, Sort, Limit, Watermark, StaticTable, Join)
"""Operators that may follow the aggregation: each output row comes from one result, and is emitted before its end.
Joins are those with static tables: ``check_output_mode`` has refused joins of two streams."""
_WHOLE = frozenset({"delta", "foreach", "foreachBatch", "kafka", "noop"})
"""Formats that can write each whole result. PySpark data sources can, too: they are called with ``overwrite``."""


def check_complete(nodes: Sequence[PlanNode]) -> None:
    """Raises PlanError for a plan without a result table, which output mode complete would write each time."""
    places = [at for at, node in enumerate(nodes) if isinstance(node, Aggregate)]
    if not places:
        raise PlanError("outputMode", "complete needs an aggregation, as in Spark; use append")
    for at, node in enumerate(nodes):
        if isinstance(node, Sort) and at < places[0]:
            raise PlanError("orderBy", "it can only follow the result of the aggregation, not the rows before it")
        if at > places[-1] and not isinstance(node, _BEHIND):
            raise PlanError(
                "outputMode",
                f"complete writes the result of one aggregation, and {type(node).__name__} mixes it with other rows",
            )


def check_complete_sink(spec: specs.SinkSpec) -> None:
    """Raises PlanError for a sink that cannot replace what it has written, as Spark does."""
    sink, name = spec.format, spec.format if isinstance(spec.format, str) else spec.format.__name__
    whole = sink in _WHOLE if isinstance(sink, str) else hasattr(sink, "streamWriter")
    if spec.function is not None and isinstance(spec.function.call, SparkWrite):
        whole, name = False, spec.function.call.format
    if not whole:
        raise PlanError(
            "outputMode",
            f"format {name!r} does not support complete, because its rows stay; use foreachBatch, console, kafka or "
            "delta, or update",
        )
    if sink == "delta" and spec.options.get("partitionBy"):
        raise PlanError(
            "partitionBy", "a table of format 'delta' that output mode complete overwrites cannot be partitioned"
        )


def add_ordered(operators: QueryOperators, node: Sort | Limit, inputs: Inputs, schema: pa.Schema) -> Inputs:
    """Adds the operators that order or limit rows. Keys of an order are first computed, as columns after the others."""
    if isinstance(node, Limit):
        if operators.whole:
            return operators.apply(specs.LimitSpec(node.rows), inputs, schema, node.plan_id)
        limited = operators.apply(specs.LimitSpec(node.rows, in_all=True), inputs, schema, node.plan_id)
        if limited[0].node.parallelism not in (None, 1):
            raise PlanError("parallelism", "rows are counted in one subtask after a limit; remove the hint")
        limited[0].node.parallelism = 1
        return limited
    columns: list[tuple[str, Expression]] = [
        (f"column{at}", Column(at, column.type)) for at, column in enumerate(node.columns)
    ]
    orders = []
    for key in node.orders:
        for leaf in _sorted_by(key.expression):
            orders.append(specs.SortOrder(len(columns), key.descending, key.nulls_first))
            columns.append((f"order{len(orders)}", leaf))
    prepared = pa.schema([(name, arrow_type(tree.type)) for name, tree in columns])
    computed = operators.apply(specs.EvaluateSpec(tuple(columns), prepared), inputs, prepared, None)
    return operators.apply(specs.SortSpec(tuple(orders), schema), computed, schema, node.plan_id)


def _sorted_by(key: Expression) -> list[Expression]:
    """The values that a key is compared by: itself, or the start and the end of a window. Raises PlanError."""
    if is_window(key.type):
        return [leaf for _, leaf in leaves_of(key)]
    kind = arrow_type(key.type)
    if pa.types.is_nested(kind):
        raise PlanError("orderBy", f"a column of type {kind} cannot be used in orderBy; order by its fields")
    return [key]
