"""Dates and timestamps: parts, arithmetic, truncation, patterns, zones, the current time. The node has the time zone.

The current time is the time at which an operator gets a batch of rows: it is the same for all rows of the batch, as in
a batch of Spark's. After a recovery, rows are computed again with the time at that point, as in Spark.
"""

from __future__ import annotations

import calendar
import datetime
import decimal
import math
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions import patterns, texts
from ckpt_runtime.expressions.evaluation import Evaluator, Frame, Value, by_row, function, kernel_of, strict
from ckpt_runtime.expressions.functions.casts import caster, in_zone, nearest_long
from ckpt_runtime.expressions.functions.intervals import plus_months
from ckpt_runtime.expressions.nodes import Call, Expression, Literal
from ckpt_runtime.expressions.rows import per_row
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, arrow_type, value_type

_INT = pa.int32()
_DATE = pa.date32()
_STRING = pa.string()
_TIMESTAMP = pa.timestamp("us", tz="UTC")
_LONG = pa.int64()


def _zone(call: Call) -> datetime.tzinfo:
    return texts.zone_of(str(call.settings.get("zone", "UTC")))


def _local(call: Call) -> Callable[[Value], Value]:
    """Returns the conversion of the first argument to local times; dates and times without a zone stay unchanged."""
    return in_zone(_zone(call)) if call.arguments[0].type == "timestamp" else lambda value: value


_PARTS = {
    "Year": "year",
    "Quarter": "quarter",
    "Month": "month",
    "DayOfMonth": "day",
    "DayOfYear": "day_of_year",
    "WeekOfYear": "iso_week",
    "Hour": "hour",
    "Minute": "minute",
    "Second": "second",
}


@strict(*_PARTS)
def _part(call: Call) -> Callable[..., Value]:
    part, local = kernel_of(_PARTS[call.function]), _local(call)
    return lambda value: part(local(value)).cast(_INT)


@strict("DayOfWeek", "WeekDay")
def _day_of_week(call: Call) -> Callable[..., Value]:
    """Sunday is 1 for ``dayofweek`` and 6 for ``weekday``."""
    local = _local(call)
    if call.function == "WeekDay":
        return lambda value: pc.day_of_week(local(value), count_from_zero=True, week_start=1).cast(_INT)
    return lambda value: pc.day_of_week(local(value), count_from_zero=False, week_start=7).cast(_INT)


@strict("SecondWithFraction")
def _second_with_fraction(call: Call) -> Callable[..., Value]:
    kind, local = arrow_type(call.type), _local(call)
    micros = per_row(_decimal_seconds, kind)
    return lambda value: micros(local(value))


def _decimal_seconds(moment: datetime.datetime) -> decimal.Decimal:
    return decimal.Decimal(moment.second * 1_000_000 + moment.microsecond).scaleb(-6)


by_row("DayName")(lambda date: patterns.DAYS[date.weekday()][:3])
by_row("MonthName")(lambda date: patterns.MONTHS[date.month - 1][:3])
strict("DateDiff")(lambda _: lambda end, start: pc.subtract(end.cast(_INT), start.cast(_INT)))
by_row("AddMonths")(plus_months)
by_row("LastDay")(lambda date: date.replace(day=calendar.monthrange(date.year, date.month)[1]))


@strict("PreciseTimestampConversion", "UnixDate", "DateFromUnixDate")
def _counted(call: Call) -> Callable[..., Value]:
    """Timestamps as microseconds, dates as days, and back; Spark computes windows of such numbers."""
    kind = arrow_type(call.type)
    return lambda value: value.cast(kind)


@strict("DateAdd", "DateSub")
def _add_days(call: Call) -> Callable[..., Value]:
    add = kernel_of("add" if call.function == "DateAdd" else "subtract")  # Java wraps around

    def run(date: Value, days: Value) -> Value:
        return add(date.cast(_INT), days.cast(_INT)).cast(_DATE)

    return run


@strict("NextDay")
def _next_day(call: Call) -> Callable[..., Value]:
    short = {name[:length].upper(): at for at, name in enumerate(patterns.DAYS) for length in (2, 3, len(name))}

    def following(date: datetime.date, day: str) -> datetime.date | None:
        wanted = short.get(day.upper())
        if wanted is None:
            if call.mode == "ansi":
                raise EvaluationError("ILLEGAL_DAY_OF_WEEK", f"{day!r} is not a day of the week")
            return None
        return date + datetime.timedelta(days=(wanted - date.weekday() - 1) % 7 + 1)

    return per_row(following, _DATE)


@strict("MonthsBetween")
def _months_between(call: Call) -> Callable[..., Value]:
    def between(end: datetime.datetime, start: datetime.datetime, round_off: bool) -> float:
        months = (end.year - start.year) * 12 + end.month - start.month
        last = all(moment.day == calendar.monthrange(moment.year, moment.month)[1] for moment in (end, start))
        if end.day == start.day or last:
            return float(months)
        seconds = (end.day - start.day) * 86_400 + _of_day(end) - _of_day(start)
        found = months + seconds / (31 * 86_400)
        if not round_off:
            return found
        return float(decimal.Decimal(repr(found)).quantize(decimal.Decimal("1e-8"), decimal.ROUND_HALF_UP))

    compute = per_row(between, pa.float64())
    local = in_zone(_zone(call))
    return lambda end, start, round_off: compute(local(end), local(start), round_off)


def _of_day(moment: datetime.datetime) -> int:
    return moment.hour * 3600 + moment.minute * 60 + moment.second


_UNITS = {
    **dict.fromkeys(("YEAR", "YYYY", "YY"), "year"),
    "QUARTER": "quarter",
    **dict.fromkeys(("MONTH", "MM", "MON"), "month"),
    "WEEK": "week",
    **dict.fromkeys(("DAY", "DD"), "day"),
    "HOUR": "hour",
    "MINUTE": "minute",
    "SECOND": "second",
    "MILLISECOND": "millisecond",
    "MICROSECOND": "microsecond",
}
_UNITS_OF_DATES = frozenset({"year", "quarter", "month", "week"})


@strict("TruncDate", "TruncTimestamp")
def _truncate(call: Call) -> Callable[..., Value]:
    """``trunc(date, unit)`` and ``date_trunc(unit, timestamp)``; the unit is constant."""
    of_date = call.function == "TruncDate"
    unit = _constant(call.arguments[1 if of_date else 0], "a unit of truncation")
    name = _UNITS.get(unit.upper())
    kind = arrow_type(call.type)
    if name is None or (of_date and name not in _UNITS_OF_DATES):
        return lambda *values: pc.if_else(pc.is_valid(values[0]), pa.scalar(None, kind), pa.scalar(None, kind))
    if of_date:
        return lambda date, _: pc.floor_temporal(date, unit=name).cast(kind)
    to_local = in_zone(_zone(call))
    back = caster("timestamp_ntz", "timestamp", "ansi", str(call.settings.get("zone", "UTC")))
    return lambda _, moment: back(pc.floor_temporal(to_local(moment), unit=name).cast(pa.timestamp("us")))


def _constant(tree: Expression, what: str) -> str:
    if not isinstance(tree, Literal):
        raise UnsupportedExpressionError(f"{what} that is not constant")
    return str(tree.value)


def _tokens(tree: Expression, *, zoned: bool = True, written: bool = False) -> tuple[patterns.Token, ...]:
    return patterns.tokens_of(_constant(tree, "a date pattern"), zoned=zoned, written=written)


_SHOWN = ("day", "hour", "minute", "second")
_FINENESS = {"H": 1, "h": 1, "a": 1, "m": 2, "s": 3, "S": 4}
"""By pattern letter: the index in ``_SHOWN`` of the unit that it needs. Letters of dates need days; ``S`` needs all."""


@strict("DateFormatClass")
def _date_format(call: Call) -> Callable[..., Value]:
    tokens, zone = _tokens(call.arguments[1], written=True), _zone(call)
    if patterns.has_offset(tokens):  # which a local time that occurs twice does not tell
        zoned = per_row(lambda micros: patterns.write(texts.zoned_of_micros(micros, zone), tokens), _STRING)
        return lambda value, _: zoned(value.cast(_LONG))
    local = in_zone(zone)
    compute = per_row(lambda moment: patterns.write(moment, tokens), _STRING)
    finest = max((_FINENESS[token.letter] for token in tokens if token.letter in _FINENESS), default=0)
    if finest == len(_SHOWN):
        return lambda value, _: compute(local(value))
    # Python runs once per distinct value, and few are left after truncation to the finest unit that the pattern shows.
    return lambda value, _: compute(pc.floor_temporal(local(value), unit=_SHOWN[finest]))


@strict("FromUnixTime")
def _from_unix_time(call: Call) -> Callable[..., Value]:
    tokens, zone = _tokens(call.arguments[1], written=True), _zone(call)
    compute = per_row(lambda seconds: patterns.write(texts.zoned_of_micros(seconds * 1_000_000, zone), tokens), _STRING)
    return lambda value, _: compute(value)


@strict("UnixTimestamp", "ToUnixTimestamp")
def _unix_timestamp(call: Call) -> Callable[..., Value]:
    source = call.arguments[0].type
    if source == "string":
        tokens, zone = _tokens(call.arguments[1]), _zone(call)
        parse = _reader(call, tokens, lambda local, of: texts.micros_of_local(local, of or zone) // 1_000_000)
        compute = per_row(parse, _LONG)
        return lambda value, _: compute(value)
    seconds = per_row(lambda micros: micros // 1_000_000, _LONG)
    moments = caster(source, "timestamp", "ansi", str(call.settings.get("zone", "UTC")))
    return lambda value, _: seconds(moments(value).cast(_LONG))


def _reader(
    call: Call,
    tokens: tuple[patterns.Token, ...],
    convert: Callable[[datetime.datetime, datetime.tzinfo | None], Any],
) -> Callable[[str], Any]:
    """``convert`` gets local times, with the zone of those whose text has an offset."""
    fails = bool(call.settings.get("failOnError", call.mode == "ansi"))

    def parse(text: str) -> Any:
        found = patterns.read(text, tokens)
        if found is None:
            if fails:
                raise EvaluationError(
                    "CANNOT_PARSE_TIMESTAMP", f"{text!r} does not fit the pattern; try_to_timestamp gives null"
                )
            return None
        return convert(*found)

    return parse


@strict("ParseToTimestamp", "ParseToDate")
def _parse(call: Call) -> Callable[..., Value]:
    source, zone = call.arguments[0].type, str(call.settings.get("zone", "UTC"))
    mode = "ansi" if call.settings.get("failOnError", True) else "try"
    if len(call.arguments) == 1 or source != "string":
        convert = caster(source, call.type, mode, zone)
        return lambda value, *_: convert(value)
    tokens, kind = _tokens(call.arguments[1], zoned=call.type != "timestamp_ntz"), arrow_type(call.type)
    of_session = texts.zone_of(zone)
    of_zone = of_session if call.type == "timestamp" else datetime.UTC

    def result(local: datetime.datetime, of_text: datetime.tzinfo | None) -> Any:
        if call.type != "date":
            return texts.micros_of_local(local, of_text or of_zone)
        if of_text is not None:  # the date is that of the session's zone
            local = texts.local_of_micros(texts.micros_of_local(local, of_text), of_session)
        return local.date()

    compute = per_row(_reader(call, tokens, result), kind)
    return lambda value, _: compute(value)


_UNIX = {"UnixSeconds": 1_000_000, "UnixMillis": 1_000, "UnixMicros": 1}
_FROM_UNIX = {"SecondsToTimestamp": 1_000_000, "MillisToTimestamp": 1_000, "MicrosToTimestamp": 1}


@strict(*_UNIX)
def _unix_time(call: Call) -> Callable[..., Value]:
    size = _UNIX[call.function]
    compute = per_row(lambda micros: micros // size, _LONG)
    return lambda value: compute(value.cast(_LONG))


@strict(*_FROM_UNIX)
def _of_unix_time(call: Call) -> Callable[..., Value]:
    size = _FROM_UNIX[call.function]

    def micros(value: Any) -> int | None:
        if isinstance(value, float):
            return nearest_long(value * size) if math.isfinite(value) else None
        found = int(value * size)
        if not -(1 << 63) <= found < 1 << 63:
            raise EvaluationError("ARITHMETIC_OVERFLOW", "long overflow")
        return found

    return per_row(micros, _TIMESTAMP)


@strict("FromUTCTimestamp", "ToUTCTimestamp")
def _shift_zone(call: Call) -> Callable[..., Value]:
    def shift(micros: int, name: str) -> int:
        try:
            zone = texts.zone_of(name)
        except ValueError as error:
            raise EvaluationError("INVALID_TIMEZONE", str(error)) from None
        if call.function == "FromUTCTimestamp":
            return texts.micros_of_local(texts.local_of_micros(micros, zone), datetime.UTC)
        return texts.micros_of_local(texts.local_of_micros(micros, datetime.UTC), zone)

    compute = per_row(shift, _TIMESTAMP)
    return lambda value, name: compute(value.cast(_LONG), name)


@strict("MakeDate")
def _make_date(call: Call) -> Callable[..., Value]:
    def make(year: int, month: int, day: int) -> datetime.date | None:
        try:
            return datetime.date(year, month, day)
        except ValueError as error:
            if call.mode == "ansi":
                raise EvaluationError("DATETIME_FIELD_OUT_OF_BOUNDS", f"{year}-{month}-{day}: {error}") from None
            return None

    return per_row(make, _DATE)


@function("CurrentTimestamp", "Now", "CurrentDate", "LocalTimestamp")
def _now(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    kind = arrow_type("timestamp")
    convert = caster("timestamp", call.type, "ansi", str(call.settings.get("zone", "UTC")))

    def run(frame: Frame) -> Value:
        if frame.moment is None:
            raise UnsupportedExpressionError(f"the function {call.function}", "this operator has no current time")
        return convert(pa.scalar(frame.moment, kind))

    return run


@strict("MakeTimestamp")
def _make_timestamp(call: Call) -> Callable[..., Value]:
    """Arguments: year, month, day, hour, minute, seconds with a fraction and, where given, a time zone."""
    session = str(call.settings.get("zone", "UTC"))
    fails = bool(call.settings.get("failOnError", call.mode == "ansi"))

    def make(
        year: int, month: int, day: int, hour: int, minute: int, seconds: decimal.Decimal, zone: str = session
    ) -> int | None:
        try:
            of_zone = texts.zone_of(zone)
        except ValueError as error:
            raise EvaluationError("INVALID_TIMEZONE", str(error)) from None
        whole = int(seconds)
        micros = int((seconds - whole).scaleb(6))
        try:
            if whole == 60 and micros:
                raise ValueError("the fraction of the second 60 is not 0")
            local = datetime.datetime(year, month, day, hour, minute, 0 if whole == 60 else whole, micros)
            local += datetime.timedelta(minutes=whole == 60)
        except (ValueError, OverflowError) as error:
            if fails:
                raise EvaluationError(
                    "DATETIME_FIELD_OUT_OF_BOUNDS", f"{error}; try_make_timestamp gives null instead"
                ) from None
            return None
        return texts.micros_of_local(local, of_zone if call.type == "timestamp" else datetime.UTC)

    return per_row(make, arrow_type(call.type))


@strict("MakeTimestampFromDateTime", "MakeTimestampNTZ")
def _of_date(call: Call) -> Callable[..., Value]:
    """Midnight of a date; the engine has no times of day."""
    if len(call.arguments) > 1:
        raise UnsupportedExpressionError("a timestamp of a date and a time of day")
    return caster("date", call.type, "ansi", str(call.settings.get("zone", "UTC")))


@strict("ConvertTimezone")
def _convert_zone(call: Call) -> Callable[..., Value]:
    def convert(source: str, target: str, micros: int) -> int:
        try:
            old, new = texts.zone_of(source), texts.zone_of(target)
        except ValueError as error:
            raise EvaluationError("INVALID_TIMEZONE", str(error)) from None
        moment = texts.micros_of_local(texts.local_of_micros(micros, datetime.UTC), old)
        return texts.micros_of_local(texts.local_of_micros(moment, new), datetime.UTC)

    inner = per_row(convert, arrow_type(call.type))
    return lambda source, target, local: inner(source, target, local.cast(pa.int64()))


@function("TryEval")
def _try_eval(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """Null for rows whose argument fails. A batch with an error is halved until the failing rows are found."""
    kind = value_type(call.type)
    evaluator = arguments[0]

    def run(frame: Frame) -> Value:
        try:
            return evaluator(frame)
        except EvaluationError:
            if frame.length == 1:
                return pa.nulls(1, kind)
        half = frame.length // 2
        first = pa.array([at < half for at in range(frame.length)])
        parts: list[Any] = [run(frame.part(mask)) for mask in (first, pc.invert(first))]
        sizes = half, frame.length - half
        arrays = [
            pa.repeat(part, size) if isinstance(part, pa.Scalar) else part
            for part, size in zip(parts, sizes, strict=True)
        ]
        return pa.concat_arrays([array.cast(kind) for array in arrays])

    return run
