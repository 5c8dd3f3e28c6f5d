"""Arrays and maps as keys: a text that is equal for equal values, and the value of such a text.

State has no keys with elements. The text is JSON: arrays and structs are lists, maps are lists of entries in the order
of their keys, and dates, times and intervals are integers. As in Spark, -0.0 is 0.0 and NaN equals itself.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.evaluation import Value, strict
from ckpt_runtime.expressions.nodes import Call, Column, Expression
from ckpt_runtime.expressions.rows import per_row
from ckpt_runtime.expressions.types import SparkType, arrow_type

_EPOCH = datetime.datetime(1970, 1, 1)
_MICROSECOND = datetime.timedelta(microseconds=1)


def key_text(value: Expression) -> Call:
    """Returns the text of an array or map."""
    return Call("KeyText", (value,), "string")


def value_of_key(column: Column, kind: SparkType) -> Call:
    """Returns the array or map whose text a column has."""
    return Call("ValueOfKey", (column,), kind)


@strict("KeyText")
def _key_text(call: Call) -> Callable[..., Value]:
    kind = arrow_type(call.arguments[0].type)

    def text(value: Any) -> str:
        return json.dumps(_plain(value, kind), ensure_ascii=False, separators=(",", ":"))

    return per_row(text, pa.string())


@strict("ValueOfKey")
def _value_of_key(call: Call) -> Callable[..., Value]:
    kind = arrow_type(call.type)
    return per_row(lambda text: _value(json.loads(text), kind), kind)


def _plain(value: Any, kind: pa.DataType) -> Any:
    """Returns a value as JSON has it."""
    if value is None:
        return None
    if pa.types.is_map(kind):
        entries = [[_plain(key, kind.key_type), _plain(item, kind.item_type)] for key, item in value]
        return sorted(entries, key=lambda entry: json.dumps(entry[0]))
    if pa.types.is_list(kind):
        return [_plain(element, kind.value_type) for element in value]
    if pa.types.is_struct(kind):
        return [_plain(value[field.name], field.type) for field in kind]
    if isinstance(value, float):
        return value + 0.0  # the sum of -0.0 and 0.0 is 0.0
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, datetime.datetime):
        return (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND
    if isinstance(value, datetime.date):
        return (value - _EPOCH.date()).days
    return value // _MICROSECOND if isinstance(value, datetime.timedelta) else value


def _value(plain: Any, kind: pa.DataType) -> Any:
    """Returns the value of a part of a JSON text, in a form of which Arrow makes the type."""
    if plain is None:
        return None
    if pa.types.is_map(kind):
        return [(_value(key, kind.key_type), _value(item, kind.item_type)) for key, item in plain]
    if pa.types.is_list(kind):
        return [_value(element, kind.value_type) for element in plain]
    if pa.types.is_struct(kind):
        return {field.name: _value(part, field.type) for field, part in zip(kind, plain, strict=True)}
    if pa.types.is_binary(kind):
        return bytes.fromhex(plain)
    return decimal.Decimal(plain) if pa.types.is_decimal(kind) else plain
