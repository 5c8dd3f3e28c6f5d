"""Generators (functions like ``explode``, ``LATERAL VIEW``) of typed plans."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from ckpt_runtime.expressions.generators import compile_generator
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda
from ckpt_runtime.expressions.types import UnsupportedExpressionError
from ckpt_runtime.frontend.typed_plan import Filter, Generate, PlanNode, Project
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.specs import GenerateSpec


def generate_spec(node: Generate, nodes: Sequence[PlanNode], at: int, schema: pa.Schema) -> GenerateSpec:
    """Returns the operator of the node at position ``at``. Raises PlanError for a generator that the engine lacks."""
    try:
        compile_generator(node.function)
    except UnsupportedExpressionError as error:
        raise PlanError("generator", str(error)) from error
    width = len(nodes[node.inputs[0]].columns)
    needed = _needed(nodes, at)
    carried = frozenset(range(width)) if needed is None else frozenset(range(width)) & needed
    return GenerateSpec(node.function, node.outer, carried, schema)


def _needed(nodes: Sequence[PlanNode], at: int) -> frozenset[int] | None:
    """Returns the columns of a node that later nodes read; None for all of them.

    The exploded array itself is rarely read again, and repeating it for each of its elements would dominate the cost.
    """
    needed: frozenset[int] = frozenset()
    for position, consumer in enumerate(nodes):
        if at not in consumer.inputs:
            continue
        if isinstance(consumer, Project):
            needed |= columns_of(consumer.expressions)
            continue
        if not isinstance(consumer, Filter | Generate):
            return None
        behind = _needed(nodes, position)
        if behind is None:
            return None
        needed |= behind | columns_of([consumer.condition if isinstance(consumer, Filter) else consumer.function])
    return needed


def columns_of(trees: Sequence[Expression]) -> frozenset[int]:
    """Returns the positions of the input's columns that expressions read."""
    found: set[int] = set()
    todo = list(trees)
    while todo:
        match todo.pop():
            case Column(index=index):
                found.add(index)
            case Lambda(body=body):
                todo.append(body)
            case Call(arguments=arguments):
                todo.extend(arguments)
    return frozenset(found)
