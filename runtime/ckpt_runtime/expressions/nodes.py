"""The typed tree of an expression, as it is stored, fingerprinted and sent to workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias
from typing import Literal as OneOf

import msgspec

from ckpt_runtime.expressions.types import SparkType

Mode: TypeAlias = OneOf["ansi", "legacy", "try"]
"""What an operation without a result does: fail, return the value of Spark's non-ANSI mode, or return null."""


class Column(msgspec.Struct, frozen=True, tag_field="node", tag="column"):
    """A column of the operator's input, by its position."""

    index: int
    type: SparkType


class Literal(msgspec.Struct, frozen=True, tag_field="node", tag="literal"):
    """A constant. ``value`` is null, a boolean, or Spark's text of it; bytes are in hexadecimal digits."""

    value: str | bool | None
    type: SparkType


class Variable(msgspec.Struct, frozen=True, tag_field="node", tag="variable"):
    """An argument of the enclosing lambda function, by Spark's id of it."""

    id: int
    type: SparkType


class Lambda(msgspec.Struct, frozen=True, tag_field="node", tag="lambda"):
    """A function over elements of an array or a map."""

    body: Expression
    parameters: tuple[Variable, ...]

    @property
    def type(self) -> SparkType:
        """The type of its result."""
        return self.body.type


class Call(msgspec.Struct, frozen=True, tag_field="node", tag="call"):
    """A function of Spark's and its arguments. ``function`` is the name of Spark's expression class.

    ``settings`` holds that class's other properties: a time zone, a field's position, whether nulls count.
    """

    function: str
    arguments: tuple[Expression, ...]
    type: SparkType
    mode: Mode = "ansi"
    settings: dict[str, Any] = {}


Expression: TypeAlias = Column | Literal | Variable | Lambda | Call


def rewritten(tree: Expression, replace: Callable[[Expression], Expression | None]) -> Expression:
    """Returns the tree with each node replaced by what ``replace`` returns; for None, its children are rewritten."""
    found = replace(tree)
    if found is not None:
        return found
    if isinstance(tree, Lambda):
        return Lambda(rewritten(tree.body, replace), tree.parameters)
    if isinstance(tree, Call):
        return msgspec.structs.replace(tree, arguments=tuple(rewritten(each, replace) for each in tree.arguments))
    return tree


def moved(tree: Expression, place: Callable[[int], int]) -> Expression:
    """Returns the tree over columns at other positions."""
    return rewritten(tree, lambda node: Column(place(node.index), node.type) if isinstance(node, Column) else None)
