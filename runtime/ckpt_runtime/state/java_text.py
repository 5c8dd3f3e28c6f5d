"""Formats numbers as the JVM does: Spark stores this text when a number is written to a string field of a state."""

from __future__ import annotations

import math
from decimal import Decimal

_LEAST_PLAIN = 1e-3
_FIRST_WITH_EXPONENT = 1e7


def java_text(value: bool | int | float | Decimal) -> str:
    """``true``, ``5``, ``1.0E10``, ``1.50``."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return _double_text(float(value)) if isinstance(value, float) else str(value)


def _double_text(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0 or _LEAST_PLAIN <= abs(value) < _FIRST_WITH_EXPONENT:
        plain = format(Decimal(repr(value)), "f")
        return plain if "." in plain else f"{plain}.0"
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    text = "".join(map(str, digits))
    assert isinstance(exponent, int)
    return f"{'-' if sign else ''}{text[0]}.{text[1:] or '0'}E{exponent + len(text) - 1}"
