"""Converts values to text and back as Spark does: numbers as in Java, dates and timestamps in their own forms."""

from __future__ import annotations

import datetime
import decimal
import math
import re
import zoneinfo
from functools import cache
from typing import Any

from ckpt_runtime.expressions.types import SparkType, is_day_time, is_fractional, is_year_month

EPOCH = datetime.datetime(1970, 1, 1)
_UTC = datetime.UTC
_WHITE = "".join(map(chr, range(0x21))) + "\x7f"
"""Characters that Spark trims from a text before it reads a value: blanks and control characters."""


def trimmed(text: str) -> str:
    """Returns the text without blanks and control characters at both ends."""
    return text.strip(_WHITE)


@cache
def zone_of(name: str) -> datetime.tzinfo:
    """Returns a time zone by Spark's name of it: a region, ``UTC``, ``Z``, ``+01:00``, ``GMT+1``. Raises ValueError."""
    offset = re.fullmatch(r"(?:UTC|GMT|UT)?([+-])(\d{1,2})(?::?(\d{2}))?(?::?(\d{2}))?", name)
    if offset:
        seconds = int(offset[2]) * 3600 + int(offset[3] or 0) * 60 + int(offset[4] or 0)
        if seconds > 18 * 3600:
            raise ValueError(f"{name} is more than 18 hours from UTC")
        return datetime.timezone(datetime.timedelta(seconds=seconds if offset[1] == "+" else -seconds))
    if name in ("Z", "UTC", "GMT", "UT", "Etc/UTC"):
        return _UTC
    try:
        return zoneinfo.ZoneInfo(name)
    except (KeyError, OSError) as error:
        raise ValueError(f"{name} is not a time zone") from error


def micros_of_local(local: datetime.datetime, zone: datetime.tzinfo) -> int:
    """Returns the moment of a local time, in microseconds since 1970.

    As in Java, a local time that occurs twice is the earlier one, and one that a clock change skips is moved by the
    gap.
    """
    shift = local.replace(tzinfo=zone, fold=0).utcoffset()
    assert shift is not None
    span = local - EPOCH - shift
    return (span.days * 86400 + span.seconds) * 1_000_000 + span.microseconds


def local_of_micros(micros: int, zone: datetime.tzinfo) -> datetime.datetime:
    """Returns the local time of a moment, without a zone."""
    return zoned_of_micros(micros, zone).replace(tzinfo=None)


def zoned_of_micros(micros: int, zone: datetime.tzinfo) -> datetime.datetime:
    """Returns the local time of a moment, with the zone."""
    return (EPOCH + datetime.timedelta(microseconds=micros)).replace(tzinfo=_UTC).astimezone(zone)


def double_text(value: float, *, single: bool = False) -> str:
    """Returns a number as Java's ``Double.toString`` (or ``Float.toString``) writes it."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if value == 0:
        return "-0.0" if math.copysign(1, value) < 0 else "0.0"
    shortest = repr(value)
    if single:
        import numpy as np

        shortest = np.format_float_scientific(np.float32(value), unique=True, trim="0")
    sign, digits, exponent = decimal.Decimal(shortest).as_tuple()
    text = "".join(map(str, digits)).rstrip("0") or "0"
    point = len(digits) + int(exponent)
    prefix = "-" if sign else ""
    if -2 <= point <= 7:
        if point <= 0:
            return f"{prefix}0.{'0' * -point}{text}"
        whole = text[:point].ljust(point, "0")
        return f"{prefix}{whole}.{text[point:] or '0'}"
    return f"{prefix}{text[0]}.{text[1:] or '0'}E{point - 1}"


def date_text(value: datetime.date) -> str:
    """Returns ``yyyy-MM-dd``."""
    return f"{value.year:04}-{value.month:02}-{value.day:02}"


def local_text(value: datetime.datetime) -> str:
    """Returns ``yyyy-MM-dd HH:mm:ss`` with as many digits of a fraction as it has."""
    text = f"{date_text(value)} {value.hour:02}:{value.minute:02}:{value.second:02}"
    return f"{text}.{value.microsecond:06}".rstrip("0") if value.microsecond else text


def value_text(value: Any, type_: SparkType, zone: datetime.tzinfo) -> str:
    """Returns the result of a cast to a string for a Python value. Inside arrays, maps and structs null is ``null``."""
    if value is None:
        return "null"
    if isinstance(type_, dict):
        return _nested_text(value, type_, zone)
    if type_ == "boolean":
        return "true" if value else "false"
    if is_fractional(type_):
        return double_text(value, single=type_ == "float")
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if type_ == "timestamp":
        return local_text(value.astimezone(zone).replace(tzinfo=None))
    if type_ == "timestamp_ntz":
        return local_text(value)
    if type_ == "date":
        return date_text(value)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if is_day_time(type_) or is_year_month(type_):
        return interval_text(value, str(type_))
    return str(value)


def interval_text(value: datetime.timedelta | int, type_: str) -> str:
    """Returns an interval of days to seconds, or a number of months, as Spark writes its type's fields."""
    first, _, last = type_.removeprefix("interval ").partition(" to ")
    last = last or first
    whole = value if isinstance(value, int) else value // datetime.timedelta(microseconds=1)
    sign, whole = "-" if whole < 0 else "", abs(whole)
    if first in ("year", "month"):
        text = {"year": f"{whole // 12}", "month": f"{whole}"}[first]
        text = text if first == last else f"{text}-{whole % 12}"
    else:
        seconds, micros = divmod(whole, 1_000_000)
        fraction = f".{micros:06}".rstrip("0") if micros else ""
        text = {
            "day": f"{seconds // 86_400}",
            "hour": f"{seconds // 3600:02}",
            "minute": f"{seconds // 60:02}",
            "second": f"{seconds:02}{fraction}",
        }[first]
        after = {
            "day": "",
            "hour": f" {seconds // 3600 % 24:02}",
            "minute": f":{seconds // 60 % 60:02}",
            "second": f":{seconds % 60:02}{fraction}",
        }
        fields = [*after]
        text += "".join(after[field] for field in fields[fields.index(first) + 1 : fields.index(last) + 1])
    return f"INTERVAL '{sign}{text}' {type_.removeprefix('interval ').upper()}"


def _nested_text(value: Any, type_: dict[str, Any], zone: datetime.tzinfo) -> str:
    kind = type_["type"]
    if kind == "array":
        return "[" + ", ".join(value_text(element, type_["elementType"], zone) for element in value) + "]"
    if kind == "map":
        return (
            "{"
            + ", ".join(
                f"{value_text(key, type_['keyType'], zone)} -> {value_text(element, type_['valueType'], zone)}"
                for key, element in value
            )
            + "}"
        )
    fields = type_["fields"]
    return "{" + ", ".join(value_text(value[field["name"]], field["type"], zone) for field in fields) + "}"


_INTEGER = re.compile(r"[+-]?\d+")
_TRUNCATED = re.compile(r"([+-]?\d*)\.\d*")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?[dDfF]?")
_SPECIAL = {"inf": math.inf, "infinity": math.inf, "nan": math.nan}


def parse_integer(text: str, *, truncates: bool) -> int | None:
    """Returns the integer that a text holds. ``truncates``: the fraction is dropped, as without ANSI mode."""
    text = trimmed(text)
    if _INTEGER.fullmatch(text):
        return int(text)
    if truncates and (cut := _TRUNCATED.fullmatch(text)) and re.search(r"\d", text):
        return int(cut[1]) if _INTEGER.fullmatch(cut[1]) else 0
    return None


def parse_double(text: str) -> float | None:
    """Returns the number that a text holds in one of the forms that Java reads, or None."""
    text = trimmed(text)
    if _NUMBER.fullmatch(text):
        return float(text.rstrip("dDfF"))
    sign = -1 if text[:1] == "-" else 1
    special = _SPECIAL.get(text.lstrip("+-").lower()) if len(text) - len(text.lstrip("+-")) <= 1 else None
    if special is None or (math.isnan(special) and text[:1] in "+-"):
        return None
    return sign * special


def parse_decimal(text: str) -> decimal.Decimal | None:
    """Returns the decimal number that a text holds, or None."""
    text = trimmed(text)
    if not re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text):
        return None
    return decimal.Decimal(text)


_BOOLEANS = {
    **dict.fromkeys(("t", "true", "y", "yes", "1"), True),
    **dict.fromkeys(("f", "false", "n", "no", "0"), False),
}


def parse_boolean(text: str) -> bool | None:
    """Returns the boolean that a text holds, or None."""
    return _BOOLEANS.get(trimmed(text).lower())


_DATE = re.compile(r"([+-]?\d{4,7})(?:-(\d{1,2})(?:-(\d{1,2})(?:[ T].*)?)?)?", re.S)
_TIME = re.compile(
    r"(?:([+-]?\d{4,6})(?:-(\d{1,2})(?:-(\d{1,2}))?)?)?"
    r"(?:(?:(?<=\d)[ T]|^T?)(\d{1,2}):(\d{1,2})(?::(\d{1,2})(?:\.(\d{0,9}))?)?)?"
    r"\s*(Z|UTC|GMT|UT|(?:UTC|GMT|UT)?[+-]\d{1,2}(?::?\d{1,2})?(?::?\d{1,2})?|[A-Za-z]+(?:/[A-Za-z_+\-0-9]+)+|[A-Z]{3,4})?"
)


def parse_date(text: str) -> datetime.date | None:
    """Returns the date of ``yyyy``, ``yyyy-M`` or ``yyyy-M-d``, with any text after a blank or a T, or None."""
    found = _DATE.fullmatch(trimmed(text))
    if not found:
        return None
    try:
        return datetime.date(int(found[1]), int(found[2] or 1), int(found[3] or 1))
    except ValueError:
        return None


def parse_local(text: str) -> tuple[datetime.datetime, datetime.tzinfo | None] | None:
    """Returns the local time of a text and the zone that it names, in the forms that a cast to a timestamp reads.

    A text without a date would depend on the current day, so it gives None, like an invalid text.
    """
    found = _TIME.fullmatch(trimmed(text))
    if not found or found[1] is None:
        return None
    year, month, day, hour, minute, second, fraction, zone = found.groups()
    if (zone or hour) and day is None:
        return None
    if zone and hour is None:
        return None
    micros = int((fraction or "")[:6].ljust(6, "0"))
    try:
        local = datetime.datetime(
            int(year), int(month or 1), int(day or 1), int(hour or 0), int(minute or 0), int(second or 0), micros
        )
        return local, zone_of(zone) if zone else None
    except (ValueError, OverflowError):
        return None


_INTERVAL = re.compile(r"(?:interval\s+)?\s*((?:[+-]?\s*(?:\d+(?:\.\d*)?|\.\d+)\s+[a-z]+(?:\s+|$))+)", re.IGNORECASE)
_INTERVAL_PART = re.compile(r"([+-]?)\s*(\d*)(?:(\.)(\d*))?\s+([a-z]+)", re.IGNORECASE)
_INTERVAL_UNITS = {
    "year": ("months", 12),
    "month": ("months", 1),
    "week": ("days", 7),
    "day": ("days", 1),
    "hour": ("micros", 3_600_000_000),
    "minute": ("micros", 60_000_000),
    "second": ("micros", 1_000_000),
    "millisecond": ("micros", 1_000),
    "microsecond": ("micros", 1),
}


def parse_interval(text: str) -> dict[str, int] | None:
    """Returns months, days and microseconds of a calendar interval such as ``5 minutes``; None for another text."""
    found = _INTERVAL.fullmatch(trimmed(text))
    if found is None:
        return None
    total = {"months": 0, "days": 0, "micros": 0}
    for sign, whole, point, fraction, name in _INTERVAL_PART.findall(found[1]):
        unit = _INTERVAL_UNITS.get(name.lower().removesuffix("s"))
        if unit is None or (point and unit[1] != 1_000_000) or len(fraction) > 9:
            return None
        amount = int(whole or "0") * unit[1] + (int(fraction.ljust(9, "0")) // 1000 if point else 0)
        total[unit[0]] += -amount if sign == "-" else amount
    limits = {"months": 1 << 31, "days": 1 << 31, "micros": 1 << 63}
    return total if all(-limits[part] <= amount < limits[part] for part, amount in total.items()) else None
