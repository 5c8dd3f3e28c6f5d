"""Durations in PySpark's notation: ``"10 minutes"``, ``"1 minute 30 seconds"``, ``"1 week"``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from ckpt_runtime.configuration.value_types import parse_duration

INTERVAL_FORM = 'one or more numbers with a unit (week, day, hour, minute, second, millisecond), such as "10 minutes"'
DELAY_FORM = INTERVAL_FORM.replace("(week", "(year, month, week")

_PART = re.compile(r"\s*([+-]?)\s*([0-9]{1,18})(\.[0-9]{0,9})?\s*([a-z]+)")
_MILLIS = {"week": 604_800_000, "day": 86_400_000, "hour": 3_600_000, "minute": 60_000, "second": 1_000}
_MONTHS = {"year": 12 * 31 * 86_400_000, "month": 31 * 86_400_000}
_FRACTIONS = {"millisecond": Decimal(1), "microsecond": Decimal("0.001")}


def parse_interval(text: str) -> int:
    """Parses a Spark SQL interval, or a duration in the form of options, to milliseconds, rounded down.

    A month has 31 days, and a year 12 months, as in the delay of Spark's watermarks. Raises ValueError saying what is
    allowed.
    """
    try:
        return parse_duration(text)
    except ValueError:
        millis = _spark_interval(text.strip().lower(), _MILLIS | _MONTHS)
    if millis is None or millis < 0:
        raise ValueError(f"{DELAY_FORM}, not less than nothing")
    return int(millis)


def parse_offset(text: str) -> int:
    """Parses a duration as :func:`parse_interval` does, except months and years, to whole milliseconds.

    It may be negative. Spark adds calendar months to a row's time, and these have no fixed length. A sign belongs to
    its number, as in Spark: ``"-1 hour 30 minutes"`` is half an hour back. Raises ValueError saying what is allowed.
    """
    stripped = text.strip()
    try:
        return -parse_duration(stripped[1:]) if stripped.startswith("-") else parse_duration(stripped)
    except ValueError:
        millis = _spark_interval(stripped.lower(), _MILLIS)
    if millis is None or millis != int(millis):
        raise ValueError(f"{INTERVAL_FORM}, in whole milliseconds")
    return int(millis)


def _spark_interval(text: str, units: Mapping[str, int]) -> Decimal | None:
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
        if fraction is not None and unit != "second":
            return None
        factor = _FRACTIONS.get(unit) or Decimal(units.get(unit, 0))
        if not factor:
            return None
        total += (-1 if sign == "-" else 1) * Decimal(whole + (fraction or "")) * factor
        position = part.end()
    return total
