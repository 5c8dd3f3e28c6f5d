"""JSON Schemas of answers, inferred from examples: a schema promises what all examples have in common.

A field is required if every example has it; its types are those that occur. Lists and objects are inferred recursively;
objects whose keys are ids or states are maps. Pure functions, independent of paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Json = dict[str, Any]

_MAP_KEY = re.compile(r"[0-9a-f]{32}|[A-Z]+")
_PERCENTILE = re.compile(r"p\d+")


def schema_of(examples: Iterable[Any]) -> Json:
    """Infer the schema that all examples match. Without any example the schema promises nothing."""
    values = list(examples)
    kinds = sorted({_kind(value) for value in values})
    if not kinds or kinds == ["null"]:
        return {}
    schema: Json = {"type": kinds[0] if len(kinds) == 1 else kinds}
    objects = [value for value in values if isinstance(value, dict)]
    if objects:
        schema |= _object(objects)
    items = [item for value in values if isinstance(value, list) for item in value]
    if items:
        schema["items"] = schema_of(items)
    return schema


def _object(objects: Sequence[Mapping[str, Any]]) -> Json:
    names = list(dict.fromkeys(name for value in objects for name in value))
    if names and all(_MAP_KEY.fullmatch(name) for name in names):
        return {"additionalProperties": schema_of(item for value in objects for item in value.values())}
    found: Json = {}
    if names:
        found["properties"] = {
            name: _field(name, [value[name] for value in objects if name in value]) for name in names
        }
    required = [name for name in names if all(name in value for value in objects)]
    if required:
        found["required"] = required
    return found


def _field(name: str, values: list[Any]) -> Json:
    if _PERCENTILE.fullmatch(name):
        return {"anyOf": [{"type": "number"}, {"const": "NaN"}]}
    return schema_of(values)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"
