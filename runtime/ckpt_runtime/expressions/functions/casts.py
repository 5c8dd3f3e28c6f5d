"""``CAST`` and ``TRY_CAST`` between all types. A value that does not fit is an error, null, or Java's result."""

from __future__ import annotations

import datetime
import decimal
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions import texts
from ckpt_runtime.expressions.evaluation import Value, kernel_of, strict
from ckpt_runtime.expressions.functions.arithmetic import to_decimal, zero_of
from ckpt_runtime.expressions.nodes import Call
from ckpt_runtime.expressions.rows import EXACT, as_list, per_row, with_elements, with_entries
from ckpt_runtime.expressions.types import (
    EvaluationError,
    SparkType,
    UnsupportedExpressionError,
    arrow_type,
    decimal_of,
    is_day_time,
    is_fractional,
    is_integral,
    is_year_month,
    value_type,
)

_LIMITS = {"byte": 1 << 7, "short": 1 << 15, "integer": 1 << 31, "long": 1 << 63}
_MICROS = 1_000_000
_DAY = 86_400 * _MICROS


@strict("Cast")
def _cast(call: Call) -> Callable[..., Value]:
    return caster(call.arguments[0].type, call.type, call.mode, str(call.settings.get("zone", "UTC")))


def caster(source: SparkType, target: SparkType, mode: str, zone: str) -> Callable[[Value], Value]:
    """Returns the conversion of values from one type to another.

    Raises UnsupportedExpressionError for pairs that the engine does not convert.
    """
    if (source, target) == ("string", "interval"):
        return per_row(texts.parse_interval, value_type(target))  # in ANSI mode too, a bad text gives null
    result, intervals = value_type(target), _unit(source) or _unit(target)
    if source == target or (value_type(source) == result and not intervals):
        return lambda value: value
    if source == "void":
        return lambda value: value.cast(result)
    if target == "string":
        return _to_string(source, texts.zone_of(zone))
    if source == "string":
        return _from_string(target, mode, texts.zone_of(zone))
    if isinstance(source, dict) or isinstance(target, dict):
        return _nested(source, target, mode, zone)
    number = is_integral(source) or is_fractional(source) or decimal_of(source) is not None
    if source == "boolean" and (is_integral(target) or is_fractional(target)):
        return lambda value: value.cast(pa.int8()).cast(result)
    decimals = decimal_of(target)
    if source == "boolean" and decimals is not None:
        exact = _to_decimal("integer", decimals, result, mode)
        return lambda value: exact(value.cast(pa.int32()))
    if number and target == "boolean":
        return lambda value: pc.not_equal(value, zero_of(value.type))
    if number and is_integral(target):
        return _to_integer(source, target, mode)
    if number and is_fractional(target):
        return per_row(float, result) if decimal_of(source) else lambda value: value.cast(result, safe=False)
    if number and decimals is not None:
        return _to_decimal(source, decimals, result, mode)
    if intervals:
        return _of_intervals(source, target, mode)
    conversion = _between_times(source, target, mode, texts.zone_of(zone))
    if conversion is None:
        raise UnsupportedExpressionError(f"a cast from {source} to {target}")
    return conversion


_UNITS = {"year": 12, "month": 1, "day": _DAY, "hour": 3_600 * _MICROS, "minute": 60 * _MICROS, "second": _MICROS}
"""Lengths of the fields of intervals, in months or microseconds."""


def _unit(type_: SparkType) -> int:
    """The length of the last field of an interval of years and months or of days to seconds; 0 for other types."""
    return _UNITS[str(type_).split()[-1]] if is_year_month(type_) or is_day_time(type_) else 0


def _of_intervals(source: SparkType, target: SparkType, mode: str) -> Callable[[Value], Value]:
    """Casts between numbers and intervals, and between intervals of one kind, whose last fields may differ.

    Every fraction is cut off where an interval becomes an integer or loses fields, and rounded elsewhere.
    """
    from_unit, to_unit, decimals = _unit(source), _unit(target), decimal_of(target)
    number = is_integral(source) or decimal_of(source) is not None or is_integral(target) or decimals is not None
    if (number and " to " in str(target)) or not (number or is_year_month(source) == is_year_month(target)):
        raise UnsupportedExpressionError(f"a cast from {source} to {target}")
    if to_unit:
        limit = 1 << (31 if is_year_month(target) else 63)
    elif decimals is None:
        limit = _LIMITS[str(target)]

    def cut(value: int, unit: int) -> int:
        return value // unit if value >= 0 else -(-value // unit)

    def convert(value: Any) -> Any:
        if decimals is not None:
            return _fitting(EXACT.divide(decimal.Decimal(value), from_unit), decimals, mode)
        if from_unit and to_unit:
            whole = value if to_unit == _MICROS else cut(value, to_unit) * to_unit
        elif from_unit:
            whole = cut(value, from_unit)
        else:
            whole = int(EXACT.multiply(decimal.Decimal(value), to_unit).to_integral_value(decimal.ROUND_HALF_UP))
        if -limit <= whole < limit:
            return whole
        if mode == "try":
            return None
        raise bad_cast(value, source, target)

    compute = per_row(convert, value_type(target))
    return lambda value: compute(value.cast(pa.int64()) if pa.types.is_duration(value.type) else value)


_MOST_DIGITS = {"day": 9, "hour": 10, "minute": 12, "second": 13}
_LAST_VALUE = {"month": 11, "hour": 23, "minute": 59, "second": 59}
"""The greatest values of fields behind the first one."""


def _interval_parser(type_: str) -> Callable[[str], int | None]:
    """Returns what reads texts as intervals of a type: as months, or as microseconds.

    A text is the fields alone (``-1 02:03:04.5``) or a literal (``INTERVAL -'1 02:03' DAY TO MINUTE``). The result for
    any other text, and for an interval that is too long, is None.
    """
    names = type_.removeprefix("interval ")
    first, _, last = names.partition(" to ")
    last = last or first
    order = ["year", "month"] if first in ("year", "month") else list(_MOST_DIGITS)
    fields = order[order.index(first) : order.index(last) + 1]
    is_months, is_single = first in ("year", "month"), len(fields) == 1
    if is_months:
        body = "-".join([r"(\d+)"] * len(fields))
    else:
        body = rf"(\d{{1,{_MOST_DIGITS[first]}}})" + "".join(
            rf"{' ' if before == 'day' else ':'}(\d{{1,2}})" for before in fields[:-1]
        )
    body += r"(?:\.(\d{1,9}))?" if last == "second" else "()"
    unquoted = re.compile(rf"()([+|-])?{body}", re.ASCII)  # as in Spark, a bar stands for a plus sign
    of_type = names.replace(" ", r"\s+")
    literal = re.compile(rf"INTERVAL\s+([+|-])?'([+|-])?{body}'\s+{of_type}", re.ASCII | re.IGNORECASE)
    limit = 1 << (31 if is_months else 63)

    def parse(text: str) -> int | None:
        text = texts.trimmed(text)
        found = unquoted.fullmatch(text) or literal.fullmatch(text)
        if found is None:
            return None
        *signs, fraction = found[1], found[2], found[found.re.groups]
        values = dict(zip(fields, map(int, found.groups()[2:-1]), strict=True))
        if any(values[field] > _LAST_VALUE[field] for field in fields[1:]):
            return None
        micros = int((fraction or "").ljust(9, "0")[:6])
        whole = sum(value * _UNITS[field] for field, value in values.items()) + micros
        # Spark takes the sign of seconds from the number in front of the point: it reads -0.5 as 0.5.
        is_negative = signs.count("-") == 1 and not (type_ == "interval second" and whole == micros)
        whole = -whole if is_negative else whole
        if is_single and first != "second":  # Spark multiplies 64-bit numbers without a check
            whole = (whole + (1 << 63)) % (1 << 64) - (1 << 63) if values[first] < 1 << 63 else limit
        return whole if -limit <= whole < limit else None

    return parse


def bad_cast(value: object, source: SparkType, target: SparkType) -> EvaluationError:
    """Returns the error for a value that a type cannot hold."""
    condition = "CAST_INVALID_INPUT" if source == "string" else "CAST_OVERFLOW"
    return EvaluationError(
        condition, f"{value!r} of type {source} cannot be cast to {target}; try_cast gives null instead"
    )


def _to_integer(source: SparkType, target: SparkType, mode: str) -> Callable[[Value], Value]:
    result = arrow_type(target)
    limit = _LIMITS[str(target)]
    if is_integral(source) and _LIMITS[str(source)] <= limit:
        return lambda value: value.cast(result)
    if is_integral(source) and mode == "legacy":
        return lambda value: value.cast(result, safe=False)
    if is_fractional(source) and mode == "legacy":
        return lambda value: _java_integers(value, str(target), result)

    def exact(value: Any) -> int | None:
        try:
            whole = int(value)
        except (ValueError, OverflowError):
            whole = limit
        if -limit <= whole < limit:
            return whole
        if mode == "ansi":
            raise bad_cast(value, source, target)
        return (whole + limit) % (2 * limit) - limit if mode == "legacy" else None

    slow = per_row(exact, result)

    def run(value: Value) -> Value:
        if pa.types.is_decimal(value.type):
            return slow(value)
        try:
            # Arrow refuses a fraction, Spark truncates it.
            return (pc.trunc(value) if is_fractional(source) else value).cast(result)
        except pa.ArrowInvalid:
            return slow(value)

    return run


def _java_integers(value: Value, target: str, result: pa.DataType) -> Value:
    """Converts floating numbers as Java does: NaN is 0, too large values are the limit; bytes and shorts wrap."""
    limit = _LIMITS["long" if target == "long" else "integer"]

    def whole(number: float) -> int:
        if number != number:
            return 0
        bounded = max(-limit, min(limit - 1, int(number) if abs(number) < 1e30 else int(np.sign(number)) * limit))
        small = _LIMITS[target]
        return (bounded + small) % (2 * small) - small

    return per_row(whole, result)(value)


def _to_decimal(source: SparkType, found: tuple[int, int], result: pa.DataType, mode: str) -> Callable[[Value], Value]:
    if is_integral(source):
        if found[0] - found[1] >= len(str(_LIMITS[str(source)])):
            return lambda value: _widened(value, result)
        return lambda value: to_decimal(value.cast(pa.int64()).cast(pa.decimal256(19, 0)), *found, result, mode)
    if known := decimal_of(source):
        if found[1] >= known[1] and found[0] - found[1] >= known[0] - known[1]:
            return lambda value: value.cast(result)
        wide = pa.decimal256(*known)
        return lambda value: to_decimal(value.cast(wide), *found, result, mode)

    def exact(number: float) -> decimal.Decimal | None:
        if not math.isfinite(number):
            return None  # as in Spark, in ANSI mode too
        return _fitting(decimal.Decimal(texts.double_text(number)), found, mode)

    return per_row(exact, result)


def _widened(value: Value, result: pa.DataType) -> Value:
    """Converts whole numbers to decimals that hold all of them. A decimal has two words; the upper one is the sign."""
    if result.scale or not isinstance(value, pa.Array):
        return value.cast(result)
    longs = value.cast(pa.int64())
    validity, numbers = longs.buffers()
    words = np.empty((len(longs), 2), np.int64)
    words[:, 0] = np.frombuffer(numbers, np.int64, len(longs), longs.offset * 8)
    np.right_shift(words[:, 0], 63, out=words[:, 1])
    if validity is not None and longs.offset:
        validity = longs.is_valid().buffers()[1]
    return pa.Array.from_buffers(result, len(longs), [validity, pa.py_buffer(words)])


def _fitting(value: decimal.Decimal, found: tuple[int, int], mode: str) -> decimal.Decimal | None:
    rounded = value.quantize(decimal.Decimal(1).scaleb(-found[1]), decimal.ROUND_HALF_UP, EXACT)
    if abs(rounded) < decimal.Decimal(10) ** (found[0] - found[1]):
        return rounded
    if mode == "ansi":
        raise EvaluationError("NUMERIC_VALUE_OUT_OF_RANGE", f"{value} does not fit into decimal({found[0]},{found[1]})")
    return None


def _to_string(source: SparkType, zone: datetime.tzinfo) -> Callable[[Value], Value]:
    if is_integral(source) or source == "boolean":
        return lambda value: value.cast(pa.string())
    if source == "binary":
        return _decoded
    if source == "date":
        return lambda value: pc.strftime(value, format="%Y-%m-%d")
    if source == "interval":
        raise UnsupportedExpressionError(f"a cast from {source} to string")
    return per_row(lambda value: texts.value_text(value, source, zone), pa.string())


def _decoded(value: Value) -> Value:
    try:
        return value.cast(pa.string())
    except pa.ArrowInvalid:
        raise EvaluationError(
            "INVALID_UTF8_STRING", "the bytes are not UTF-8; the engine supports valid text only"
        ) from None


def _from_string(target: SparkType, mode: str, zone: datetime.tzinfo) -> Callable[[Value], Value]:
    result = value_type(target)
    if target == "binary":
        return lambda value: value.cast(result)
    parse = _parser(target, mode, zone)
    fails = mode == "ansi" or (mode == "legacy" and _unit(target) > 0)  # for an interval, Spark fails in both modes

    def read(text: str) -> Any:
        value = parse(text)
        if value is None and fails:
            raise bad_cast(text, "string", target)
        return value

    slow = per_row(read, result)
    if not is_integral(target):
        return slow

    def run(value: Value) -> Value:
        try:
            return kernel_of("cast", pc.CastOptions(result))(value)
        except pa.ArrowInvalid:
            return slow(value)

    return run


def _parser(target: SparkType, mode: str, zone: datetime.tzinfo) -> Callable[[str], Any]:
    if is_integral(target):
        limit = _LIMITS[str(target)]

        def integer(text: str) -> int | None:
            value = texts.parse_integer(text, truncates=mode == "legacy")
            return value if value is not None and -limit <= value < limit else None

        return integer
    if is_fractional(target):
        return texts.parse_double
    if found := decimal_of(target):

        def decimals(text: str) -> decimal.Decimal | None:
            value = texts.parse_decimal(text)
            return None if value is None else _fitting(value, found, mode)

        return decimals
    if target == "boolean":
        return texts.parse_boolean
    if target == "date":
        return texts.parse_date
    if target in ("timestamp", "timestamp_ntz"):
        return lambda text: _timestamp(text, zone if target == "timestamp" else None)
    if _unit(target):
        return _interval_parser(str(target))
    raise UnsupportedExpressionError(f"a cast from string to {target}")


def _timestamp(text: str, zone: datetime.tzinfo | None) -> int | None:
    found = texts.parse_local(text)
    if found is None:
        return None
    local, named = found
    if zone is None:
        return texts.micros_of_local(local, datetime.UTC)
    return texts.micros_of_local(local, named or zone)


def in_zone(zone: datetime.tzinfo) -> Callable[[Value], Value]:
    """Returns the conversion of timestamps to local times of a zone, as timestamps without one."""
    if zone is datetime.UTC:
        return lambda value: value.cast(pa.timestamp("us", tz="UTC")).cast(pa.int64()).cast(pa.timestamp("us"))
    offset = datetime.datetime(2000, 1, 1, tzinfo=zone).strftime("%z")
    name = getattr(zone, "key", None) or f"{offset[:3]}:{offset[3:5]}"
    return lambda value: pc.local_timestamp(value.cast(pa.timestamp("us", tz=name)))


def _between_times(
    source: SparkType, target: SparkType, mode: str, zone: datetime.tzinfo
) -> Callable[[Value], Value] | None:
    plain = pa.timestamp("us")
    zoned = pa.timestamp("us", tz="UTC")
    to_local = in_zone(zone)
    from_local = per_row(lambda local: texts.micros_of_local(local, zone), zoned)
    match source, target:
        case "date", "timestamp_ntz":
            return lambda value: value.cast(plain)
        case "date", "timestamp":
            return lambda value: from_local(value.cast(plain))
        case "timestamp_ntz", "date":
            return lambda value: pc.floor_temporal(value, unit="day").cast(pa.date32())
        case "timestamp", "date":
            return lambda value: pc.floor_temporal(to_local(value), unit="day").cast(pa.date32())
        case "timestamp", "timestamp_ntz":
            return to_local
        case "timestamp_ntz", "timestamp":
            return from_local
    if source == "timestamp" and is_integral(target):
        seconds = per_row(lambda micros: micros // _MICROS, pa.int64())
        shrink = caster("long", target, mode, "UTC")
        return lambda value: shrink(seconds(value.cast(pa.int64())))
    if source == "timestamp" and is_fractional(target):
        return lambda value: pc.divide(value.cast(pa.int64()).cast(pa.float64()), 1e6).cast(arrow_type(target))
    if target == "timestamp" and is_integral(source):

        def micros(seconds: int) -> int:
            return max(-(1 << 63), min((1 << 63) - 1, seconds * _MICROS))

        return per_row(micros, zoned)
    if target == "timestamp" and is_fractional(source):
        return per_row(lambda seconds: _micros_of_double(seconds, mode), zoned)
    return None


def _micros_of_double(seconds: float, mode: str) -> int | None:
    if seconds != seconds or abs(seconds) == float("inf"):
        if mode == "ansi":
            raise bad_cast(seconds, "double", "timestamp")
        return None
    return nearest_long(seconds * _MICROS)


def nearest_long(number: float) -> int:
    """Returns a number without its fraction, or what is nearest to it in 64 bits. NaN is not allowed."""
    if abs(number) >= 1 << 63:
        return (1 << 63) - 1 if number > 0 else -(1 << 63)
    return int(number)


def _nested(source: SparkType, target: SparkType, mode: str, zone: str) -> Callable[[Value], Value]:
    if not (isinstance(source, dict) and isinstance(target, dict) and source["type"] == target["type"]):
        raise UnsupportedExpressionError(f"a cast from {source} to {target}")
    result = arrow_type(target)
    if source["type"] == "struct":
        fields = [
            caster(old["type"], new["type"], mode, zone)
            for old, new in zip(source["fields"], target["fields"], strict=True)
        ]

        def structs(value: pa.Array) -> pa.Array:
            children = [convert(child) for convert, child in zip(fields, value.flatten(), strict=True)]
            typed = [child.cast(field.type) for child, field in zip(children, result, strict=True)]
            return pa.StructArray.from_arrays(typed, fields=list(result), mask=value.is_null())

        return _of_arrays(structs)
    if source["type"] == "array":
        element = caster(source["elementType"], target["elementType"], mode, zone)
        return _of_arrays(lambda value: with_elements(value, element(value.flatten()), result))
    keys = caster(source["keyType"], target["keyType"], mode, zone)
    items = caster(source["valueType"], target["valueType"], mode, zone)

    def maps(value: pa.Array) -> pa.Array:
        entries = as_list(value)
        flat = entries.flatten()
        return with_entries(entries, keys(flat.field(0)), items(flat.field(1)), result)

    return _of_arrays(maps)


def _of_arrays(convert: Callable[[pa.Array], pa.Array]) -> Callable[[Value], Value]:
    """Returns a conversion of arrays that also accepts a scalar."""
    return lambda value: convert(pa.repeat(value, 1))[0] if isinstance(value, pa.Scalar) else convert(value)
