"""Columns that the directories of a file name, such as ``country=DE``, with the values that Spark gives them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions import texts
from ckpt_runtime.expressions.functions.casts import caster

_NULL = "__HIVE_DEFAULT_PARTITION__"
_ESCAPED = re.compile("%([0-9a-fA-F]{2})")


def partition_of(directories: Sequence[str]) -> dict[str, str | None]:
    """The columns of the names of directories, the outermost first, as texts.

    Only the last directories count that all name columns; others may lie below them. Raises ValueError.
    """
    columns: dict[str, str | None] = {}
    for directory in reversed(directories):
        name, equals, value = directory.partition("=")
        if not equals or not name:
            if columns:
                break
            continue
        if not value:
            raise ValueError(f"the directory {directory!r} gives column {name!r} no value")
        columns[_unescaped(name)] = None if value == _NULL else _unescaped(value)
    return dict(reversed(columns.items()))


def _unescaped(text: str) -> str:
    """Spark escapes a character of one byte as its code, and no other."""
    return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), text)


def partition_value(text: str | None, type_: pa.DataType) -> Any:
    """The value of a text as a scalar of a type. Raises ValueError if it is none."""
    if text is None or pa.types.is_string(type_) or pa.types.is_binary(type_):
        return pa.scalar(text, pa.string()).cast(type_)
    if pa.types.is_integer(type_):
        return pa.scalar(_integer(text, type_), type_)
    if type_ == pa.bool_():
        if text.lower() not in ("true", "false"):
            raise ValueError
        return pa.scalar(text.lower() == "true")
    if pa.types.is_floating(type_):
        number = texts.parse_double(text)
        if number is None:
            raise ValueError
        return pa.scalar(number, pa.float64()).cast(type_)
    if pa.types.is_decimal(type_):
        if texts.parse_decimal(text) is None:
            raise ValueError
        return _cast(text, f"decimal({type_.precision},{type_.scale})")  # null if it does not fit, as in Spark
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        kind = "date" if pa.types.is_date(type_) else "timestamp" if type_.tz else "timestamp_ntz"
        value = _cast(text, kind)
        if not value.is_valid:
            raise ValueError
        return value.cast(type_)
    raise ValueError("directories cannot name values of this type")


def _integer(text: str, type_: pa.DataType) -> int:
    """Java's parser, whose result loses its upper bits in a column of 8 or 16."""
    if not re.fullmatch("[+-]?[0-9]+", text):
        raise ValueError
    value, bits = int(text), max(32, type_.bit_width)
    if not -(1 << (bits - 1)) <= value < 1 << (bits - 1):
        raise ValueError
    half: int = 1 << (type_.bit_width - 1)
    return (value + half) % (2 * half) - half


def _cast(text: str, kind: str) -> Any:
    return caster("string", kind, "try", "UTC")(pa.array([text], pa.string()))[0]
