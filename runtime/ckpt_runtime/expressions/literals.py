"""Constants: from Spark's text of a value to an Arrow scalar."""

from __future__ import annotations

import decimal

import pyarrow as pa

from ckpt_runtime.expressions.errors import UnsupportedExpressionError
from ckpt_runtime.expressions.nodes import Literal
from ckpt_runtime.expressions.types import is_fractional, is_integral, is_year_month, value_type


def literal_scalar(literal: Literal) -> pa.Scalar:
    """Returns the Arrow scalar of a constant.

    Dates are days and timestamps microseconds since 1970, as texts of integers. Raises UnsupportedExpressionError for a
    constant array, map or struct.
    """
    kind = value_type(literal.type)
    value = literal.value
    if value is None:
        return pa.scalar(None, kind)
    if isinstance(value, bool):
        return pa.scalar(value, kind)
    if pa.types.is_string(kind):
        return pa.scalar(value, kind)
    if is_integral(literal.type) or is_year_month(literal.type):
        return pa.scalar(int(value), kind)
    if is_fractional(literal.type):
        return pa.scalar(float(value), kind)
    if pa.types.is_boolean(kind):
        return pa.scalar(value == "true", kind)
    if pa.types.is_decimal(kind):
        return pa.scalar(decimal.Decimal(value), kind)
    if pa.types.is_binary(kind):
        return pa.scalar(bytes.fromhex(value), kind)
    if pa.types.is_date32(kind):
        return pa.scalar(int(value), pa.int32()).cast(kind)
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return pa.scalar(int(value), pa.int64()).cast(kind)
    if literal.type == "interval":
        months, days, micros = map(int, str(value).split(","))
        return pa.scalar({"months": months, "days": days, "micros": micros}, kind)
    raise UnsupportedExpressionError(f"a constant of type {literal.type}")
