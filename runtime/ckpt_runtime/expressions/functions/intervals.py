"""Intervals, and arithmetic of dates and timestamps with them.

A day-time interval is a duration in microseconds, a year-month interval a number of months. Days and months are added
to the local time of the session's zone, as Java does: a day may have 23 or 25 hours.
"""

from __future__ import annotations

import calendar
import datetime
import decimal
import fractions
import operator
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions import texts
from ckpt_runtime.expressions.evaluation import Value, by_row, strict
from ckpt_runtime.expressions.nodes import Call, Literal
from ckpt_runtime.expressions.rows import per_row
from ckpt_runtime.expressions.types import (
    EvaluationError,
    SparkType,
    UnsupportedExpressionError,
    arrow_type,
    is_day_time,
    is_integral,
    is_year_month,
    value_type,
)

_LONG = pa.int64()
_DAY = 86_400_000_000
_MOST_MONTHS = (1 << 31) - 1
_MEAN_MONTH = 2_629_746_000_000


def whole_values(value: Value) -> Value:
    """Returns dates, timestamps and durations as integers, and other values as they are."""
    kind = value.type
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return value.cast(_LONG)
    return value.cast(pa.int32()) if pa.types.is_date32(kind) else value


def over_integers(compute: Callable[..., Any], result: pa.DataType, *, nulls: bool = False) -> Callable[..., Value]:
    """Returns a kernel whose dates are days, and whose timestamps and durations are microseconds."""
    inner = per_row(compute, result, nulls=nulls)
    return lambda *values: inner(*map(whole_values, values))


def shifted(micros: int, zone: datetime.tzinfo, months: int, days: int, rest: int) -> int:
    """Returns the moment that is months, days and microseconds later: first local months and days, then the rest."""
    if months or days:
        start = texts.local_of_micros(micros, zone)
        local = plus_months(start, months) + datetime.timedelta(days=days)
        shift = texts.micros_of_local(start, datetime.UTC) - micros
        micros = texts.micros_of_local(local, zone)
        # A local time that occurs twice keeps its offset.
        later = texts.micros_of_local(local, datetime.UTC) - shift
        if texts.local_of_micros(later, zone) == local:
            micros = later
    found = micros + rest
    if not -(1 << 63) <= found < 1 << 63:
        raise EvaluationError("DATETIME_OVERFLOW", "the timestamp is out of range")
    return found


def plus_months(date: Any, months: int) -> Any:
    """Returns the date, or date and time, some months later; the last day of a month where it has no such day."""
    years, month = divmod(date.year * 12 + date.month - 1 + months, 12)
    if not 1 <= years <= datetime.MAXYEAR:
        raise OverflowError(f"the year {years}")
    return date.replace(year=years, month=month + 1, day=min(date.day, calendar.monthrange(years, month + 1)[1]))


def _zone(call: Call) -> datetime.tzinfo:
    """Local times have no zone; the node of a function over them has the session's all the same."""
    if call.type == "timestamp_ntz":
        return datetime.UTC
    return texts.zone_of(str(call.settings.get("zone", "UTC")))


def parts_of(interval: Any, type_: SparkType) -> tuple[int, int, int]:
    """Returns months, days and microseconds of an interval. A day of a day-time interval is a local day."""
    if isinstance(interval, dict):
        return interval["months"], interval["days"], interval["micros"]
    if is_year_month(type_):
        return interval, 0, 0
    days = _whole(interval, _DAY)
    return 0, days, interval - days * _DAY


@strict("TimestampAddInterval", "TimestampAddYMInterval")
def _add_to_timestamp(call: Call) -> Callable[..., Value]:
    zone, type_ = _zone(call), call.arguments[1].type
    return over_integers(
        lambda moment, interval: shifted(moment, zone, *parts_of(interval, type_)), arrow_type(call.type)
    )


_MICROS = {"MICROSECOND": 1, "MILLISECOND": 1000, "SECOND": 1_000_000, "MINUTE": 60_000_000, "HOUR": 3_600_000_000}
_DAYS = {"DAY": 1, "DAYOFYEAR": 1, "WEEK": 7}
_MONTHS = {"MONTH": 1, "QUARTER": 3, "YEAR": 12}


@strict("TimestampAdd")
def _add_units(call: Call) -> Callable[..., Value]:
    """Adds a number of units: months and days are local ones."""
    unit, zone = str(call.settings["unit"]).upper(), _zone(call)

    def add(count: int, moment: int) -> int:
        months, days, micros = (count * units.get(unit, 0) for units in (_MONTHS, _DAYS, _MICROS))
        if not all(-limit <= each < limit for each, limit in ((months, 1 << 31), (days, 1 << 31), (micros, 1 << 63))):
            raise EvaluationError("DATETIME_OVERFLOW", f"{count} times the unit {unit} is out of range")
        return shifted(moment, zone, months, days, micros)

    return over_integers(add, arrow_type(call.type))


@strict("TimestampDiff")
def _units_between(call: Call) -> Callable[..., Value]:
    """The number of whole units between two local times, which is negative if the second one is earlier."""
    unit, zone = str(call.settings["unit"]).upper(), texts.zone_of(str(call.settings.get("zone", "UTC")))

    def between(start: int, end: int) -> int:
        first, last = texts.local_of_micros(start, zone), texts.local_of_micros(end, zone)
        if unit not in _MONTHS:
            length = _MICROS.get(unit) or _DAYS[unit] * _DAY
            return _whole((last - first) // datetime.timedelta(microseconds=1), length)
        day = last.date()
        if day > first.date() and last.time() < first.time():
            day -= datetime.timedelta(days=1)
        elif day < first.date() and last.time() > first.time():
            day += datetime.timedelta(days=1)
        months = (day.year - first.year) * 12 + day.month - first.month
        return _whole(_whole(months * 32 + day.day - first.day, 32), _MONTHS[unit])

    return over_integers(between, _LONG)


def _whole(value: int, length: int) -> int:
    """Divides as Java does: towards zero."""
    return abs(value) // length * (1 if value >= 0 else -1)


@strict("TimeBucket")
def _time_bucket(call: Call) -> Callable[..., Value]:
    """Arguments: the size, the moment and the origin; size and origin are constant. Days and months are local ones."""
    size, zone = call.arguments[0], _zone(call)
    if not isinstance(size, Literal) or size.value is None:
        raise UnsupportedExpressionError("time_bucket with a size that is not constant")
    months, days, rest = parts_of(int(size.value), size.type)
    if days and rest and call.type == "timestamp":
        raise UnsupportedExpressionError(
            "time_bucket with a size of days and a part of a day",
            "days of a time zone may have 23 or 25 hours; cast the time to TIMESTAMP_NTZ",
        )
    length = months * _MEAN_MONTH + days * _DAY + rest

    def bucket(_size: int, moment: int, origin: int) -> int:
        def start(number: int) -> int:
            return shifted(origin, zone, number * months, number * days, number * rest)

        number = (moment - origin) // length
        while start(number) > moment:
            number -= 1
        while start(number + 1) <= moment:
            number += 1
        return start(number)

    return over_integers(bucket, arrow_type(call.type))


by_row("DateAddYMInterval")(plus_months)


@strict("DateAddInterval")
def _add_to_date(call: Call) -> Callable[..., Value]:
    def add(date: datetime.date, interval: dict[str, int]) -> datetime.date:
        if interval["micros"]:
            if call.mode == "ansi":
                raise EvaluationError("_LEGACY_ERROR_TEMP_2000", "hours, minutes and seconds cannot be added to a date")
            raise EvaluationError("UNSUPPORTED", "an interval with a time of day cannot be added to a date; cast it")
        return plus_months(date, interval["months"]) + datetime.timedelta(days=interval["days"])  # type: ignore[no-any-return]

    return per_row(add, arrow_type(call.type))


@strict("SubtractTimestamps", "SubtractDates")
def _between(call: Call) -> Callable[..., Value]:
    result = arrow_type(call.type)
    if call.function == "SubtractDates":
        return over_integers(lambda end, start: (end - start) * _DAY, result)
    zone = texts.zone_of(str(call.settings.get("zone", "UTC")))
    if call.arguments[0].type != "timestamp":
        zone = datetime.UTC

    def between(end: int, start: int) -> int:
        local = texts.local_of_micros(end, zone) - texts.local_of_micros(start, zone)
        return local // datetime.timedelta(microseconds=1)

    return over_integers(between, result)


@strict("MultiplyDTInterval", "DivideDTInterval", "MultiplyYMInterval", "DivideYMInterval")
def _scaled(call: Call) -> Callable[..., Value]:
    divides = call.function.startswith("Divide")
    by_zero = EvaluationError("INTERVAL_DIVIDED_BY_ZERO", "an interval is divided by zero; try_divide gives null")
    limit = 1 << (63 if "DT" in call.function else 31)

    def scale(interval: int, number: Any) -> int:
        if isinstance(number, float):
            if number != number or abs(number) == float("inf"):
                raise EvaluationError("INTERVAL_ARITHMETIC_OVERFLOW", f"an interval times or by {number}")
            # Spark multiplies and divides as doubles before it rounds.
            if divides and number == 0:
                raise by_zero
            exact = fractions.Fraction(interval / number if divides else interval * number)
        elif divides:
            if number == 0:
                raise by_zero
            exact = fractions.Fraction(interval) / fractions.Fraction(number)
        else:
            exact = fractions.Fraction(interval) * fractions.Fraction(number)
        size = int(abs(exact) + fractions.Fraction(1, 2))
        found = size if exact >= 0 else -size
        if not -limit <= found < limit:
            raise EvaluationError("INTERVAL_ARITHMETIC_OVERFLOW", "the interval is too long")
        return found

    return over_integers(scale, value_type(call.type))


_ARITHMETIC: dict[str, Callable[..., int]] = {
    "Add": operator.add,
    "Subtract": operator.sub,
    "UnaryMinus": operator.neg,
    "Abs": abs,
}


def interval_arithmetic(call: Call) -> Callable[..., Value]:
    """Returns the sum, difference, negation or size of day-time and year-month intervals."""
    if call.type == "interval":
        if call.function != "UnaryMinus":
            raise UnsupportedExpressionError("arithmetic of calendar intervals")
        return per_row(lambda interval: {name: -part for name, part in interval.items()}, value_type(call.type))
    compute = _ARITHMETIC.get(call.function)
    if compute is None:
        raise UnsupportedExpressionError(f"{call.function} of intervals")
    limit = 1 << (31 if is_year_month(call.type) else 63)

    def checked(*values: int) -> int | None:
        found = compute(*values)
        if -limit <= found < limit:
            return found
        if call.mode == "try":
            return None
        raise EvaluationError("INTERVAL_ARITHMETIC_OVERFLOW", "the interval is too long")

    return over_integers(checked, value_type(call.type))


def is_interval(type_: SparkType) -> bool:
    """Returns whether the type is one of the three kinds of intervals."""
    return type_ == "interval" or is_year_month(type_) or is_day_time(type_)


def _rest(value: int, size: int) -> int:
    """Java's remainder, which has the sign of the dividend."""
    return value % size if value >= 0 else -(-value % size)


_PARTS: dict[str, Callable[[int], Any]] = {
    "ExtractANSIIntervalYears": lambda months: _whole(months, 12),
    "ExtractANSIIntervalMonths": lambda months: _rest(months, 12),
    "ExtractANSIIntervalDays": lambda micros: _whole(micros, _DAY),
    "ExtractANSIIntervalHours": lambda micros: _rest(_whole(micros, 3_600_000_000), 24),
    "ExtractANSIIntervalMinutes": lambda micros: _rest(_whole(micros, 60_000_000), 60),
    "ExtractANSIIntervalSeconds": lambda micros: decimal.Decimal(_rest(micros, 60_000_000)).scaleb(-6),
}


@strict(*_PARTS)
def _part(call: Call) -> Callable[..., Value]:
    return over_integers(_PARTS[call.function], arrow_type(call.type))


@by_row("MakeDTInterval")
def _make_day_time(days: int, hours: int, minutes: int, seconds: decimal.Decimal) -> int:
    micros = int(seconds.scaleb(6).to_integral_value(decimal.ROUND_DOWN))
    found = days * _DAY + hours * 3_600_000_000 + minutes * 60_000_000 + micros
    if not -(1 << 63) <= found < 1 << 63:
        raise EvaluationError("INTERVAL_ARITHMETIC_OVERFLOW", "the interval is too long")
    return found


@by_row("MakeYMInterval")
def _make_year_month(years: int, months: int) -> int:
    found = years * 12 + months
    if not -_MOST_MONTHS - 1 <= found <= _MOST_MONTHS:
        raise EvaluationError("INTERVAL_ARITHMETIC_OVERFLOW", "the interval is too long")
    return found


@strict("MakeInterval")
def _make_calendar(call: Call) -> Callable[..., Value]:
    def make(
        years: int, months: int, weeks: int, days: int, hours: int, minutes: int, seconds: decimal.Decimal
    ) -> dict[str, int] | None:
        found = {
            "months": years * 12 + months,
            "days": weeks * 7 + days,
            "micros": hours * 3_600_000_000 + minutes * 60_000_000 + int(seconds.scaleb(6)),
        }
        if all(-(1 << bits) <= part < 1 << bits for part, bits in zip(found.values(), (31, 31, 63), strict=True)):
            return found
        if call.settings.get("failOnError", call.mode == "ansi"):
            raise EvaluationError("ARITHMETIC_OVERFLOW", "the interval is too long; try_make_interval gives null")
        return None

    return per_row(make, value_type(call.type))


@strict("Sequence")
def _sequence(call: Call) -> Callable[..., Value]:
    """Returns the values from the first to the last one: numbers, dates, or timestamps at an interval."""
    start = call.arguments[0].type
    result = arrow_type(call.type)
    if is_integral(start):
        return per_row(_numbers, result)
    step = call.arguments[2].type if len(call.arguments) > 2 else "interval day"
    zone = _zone(call) if start == "timestamp" else datetime.UTC
    size = _DAY if start == "date" else 1

    def times(first: int, last: int, interval: Any = _DAY) -> list[int]:
        parts = parts_of(interval, step)
        if size > 1 and parts[2]:
            raise EvaluationError("ILLEGAL_SEQUENCE", "the step between dates is not a number of whole days")
        forward = sum(part * unit for part, unit in zip(parts, (28 * _DAY, _DAY, 1), strict=True))
        first, last = first * size, last * size
        if (forward == 0 and first != last) or (forward > 0 and first > last) or (forward < 0 and first < last):
            raise _bad_sequence(first, last)
        found: list[int] = []
        moment = first
        while (moment <= last if forward >= 0 else moment >= last) and (forward or not found):
            found.append(moment // size)
            _check_length(found)
            months, days, rest = (len(found) * part for part in parts)
            moment = shifted(first, zone, months, days, rest)
        return found

    as_integers = pa.list_(pa.int32() if start == "date" else _LONG)

    def forward_or_back(first: int, last: int) -> list[int]:
        return times(first, last, _DAY if first <= last else -_DAY)

    inner = over_integers(times if len(call.arguments) > 2 else forward_or_back, as_integers)
    return lambda *values: inner(*values).cast(result)


_LONGEST = 1_000_000
"""Maximum number of elements of a sequence; more would fill the memory of a worker."""


def _check_length(found: list[int]) -> None:
    if len(found) > _LONGEST:
        raise EvaluationError(
            "COLLECTION_SIZE_LIMIT_EXCEEDED", f"a sequence has more than {_LONGEST} elements, the engine's limit"
        )


def _bad_sequence(first: int, last: int) -> EvaluationError:
    return EvaluationError("ILLEGAL_SEQUENCE", f"the step does not lead from {first} to {last}")


def _numbers(first: int, last: int, step: int | None = None) -> list[int]:
    by = step if step is not None else 1 if first <= last else -1
    if (by == 0 and first != last) or (by > 0 and first > last) or (by < 0 and first < last):
        raise _bad_sequence(first, last)
    if by and abs(last - first) // abs(by) >= _LONGEST:
        _check_length([0] * (_LONGEST + 1))
    return [first] if by == 0 else list(range(first, last + (1 if by > 0 else -1), by))
