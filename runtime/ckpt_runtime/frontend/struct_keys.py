"""Keys that are structs, such as windows, arrays or maps as the values that they are compared by, and back."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_runtime.expressions.functions.key_texts import key_text, value_of_key
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import SparkType


def is_window(kind: SparkType) -> bool:
    """Whether a type is that of windows, which are never null."""
    if not isinstance(kind, dict) or kind["type"] != "struct":
        return False
    fields = [(field["name"], field["type"]) for field in kind["fields"]]
    return fields in ([("start", time), ("end", time)] for time in ("timestamp", "timestamp_ntz"))


def leaves_of(expression: Expression) -> list[tuple[str, Expression]]:
    """The values that a key is compared by, with their paths: of a struct, whether it is null, and its fields.

    An array or map is compared by its text, and a value of no type not at all, because it is null.
    """
    kind = expression.type
    if not isinstance(kind, dict):
        return [] if kind == "void" else [("", expression)]
    if kind["type"] != "struct":
        return [("", key_text(expression))]
    fields = [
        (f".{field['name']}", Call("GetStructField", (expression,), field["type"], settings={"ordinal": at}))
        for at, field in enumerate(kind["fields"])
    ]
    leaves = [(name + path, leaf) for name, field in fields for path, leaf in leaves_of(field)]
    return leaves if is_window(kind) else [(" is null", Call("IsNull", (expression,), "boolean")), *leaves]


def rebuilt(kind: SparkType, place: Callable[[], int]) -> Expression:
    """Returns the key that was cut into leaves, whose columns ``place`` gives in their order."""
    if not isinstance(kind, dict):
        return Literal(None, kind) if kind == "void" else Column(place(), kind)
    if kind["type"] != "struct":
        return value_of_key(Column(place(), "string"), kind)
    missing = None if is_window(kind) else Column(place(), "boolean")
    arguments: list[Expression] = []
    for field in kind["fields"]:
        arguments += [Literal(field["name"], "string"), rebuilt(field["type"], place)]
    struct = Call("CreateNamedStruct", tuple(arguments), kind)
    return struct if missing is None else Call("If", (missing, Literal(None, kind), struct), kind)
