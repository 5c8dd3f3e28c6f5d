"""Durations in PySpark's notation: ``"10 minutes"``, ``"1 minute 30 seconds"``, ``"1 week"``."""

from __future__ import annotations

import re
from decimal import Decimal

from ckpt_runtime.configuration.value_types import parse_duration

INTERVAL_FORM = 'one or more numbers with a unit (week, day, hour, minute, second, millisecond), such as "10 minutes"'

_PART = re.compile(r"\s*([+-]?)\s*([0-9]{1,18})(\.[0-9]{0,9})?\s*([a-z]+)")
_MILLIS = {
    "week": Decimal(604_800_000),
    "day": Decimal(86_400_000),
    "hour": Decimal(3_600_000),
    "minute": Decimal(60_000),
    "second": Decimal(1_000),
    "millisecond": Decimal(1),
    "microsecond": Decimal("0.001"),
}


def parse_interval(text: str) -> int:
    """Parses a Spark SQL interval, or a duration in the form of options, to milliseconds, rounded down.

    Months and years are refused, as in Spark's triggers. Raises ValueError saying what is allowed.
    """
    try:
        return parse_duration(text)
    except ValueError:
        millis = _spark_interval(text.strip().lower())
    if millis is None or millis < 0:
        raise ValueError(f"{INTERVAL_FORM}, not negative")
    return int(millis)


def _spark_interval(text: str) -> Decimal | None:
    """Returns None for a text that is not an interval."""
    text = re.sub(r"^interval(?=[\s+-])", "", text)
    total, position = Decimal(0), 0
    if not text:
        return None
    while position < len(text):
        part = _PART.match(text, position)
        if part is None:
            return None
        sign, whole, fraction, plural = part.groups()
        unit = plural.removesuffix("s")
        factor = _MILLIS.get(unit)
        if factor is None or (fraction is not None and unit != "second"):
            return None
        total += (-1 if sign == "-" else 1) * Decimal(whole + (fraction or "")) * factor
        position = part.end()
    return total
