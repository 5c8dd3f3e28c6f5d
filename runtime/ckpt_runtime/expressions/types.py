"""Spark's data types, in the JSON form that Spark publishes for schemas, and the Arrow types that hold their values.

A type is ``"integer"`` or ``{"type": "array", "elementType": …}``: what ``DataType.jsonValue()`` returns. Plans are
stored with it because it outlives releases of Spark and of Arrow.

The errors of expressions are those that are raised at planning time, and those that a row causes.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias

import pyarrow as pa


class UnsupportedExpressionError(Exception):
    """An expression that the engine cannot compute as Spark does. Raised when the plan is made."""

    def __init__(self, what: str, why: str = "the engine does not compute it as Spark does") -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
        self.why = why
        self.place = ""

    def called_in(self, place: str) -> UnsupportedExpressionError:
        """Adds the author's file and line to the message, if they are known and the message lacks them."""
        if place and not self.place:
            self.place = place
            self.args = (f"{self.args[0]} (called in {place})",)
        return self


class UnsupportedTypeError(UnsupportedExpressionError):
    """A type that the engine does not support."""

    def __init__(self, type_: object) -> None:
        collated = isinstance(type_, str) and " collate " in type_
        way = "; it compares text by its bytes: use lower(...) of a plain string" if collated else ""
        if isinstance(type_, str) and type_.startswith("time("):
            way = ", and Spark has it behind spark.sql.timeType.enabled, which is off: use a timestamp"
        super().__init__(f"the type {type_}", f"the engine does not support its values{way}")


class EvaluationError(Exception):
    """A row for which Spark in ANSI mode fails too. ``condition`` is Spark's name of the error."""

    def __init__(self, condition: str, message: str) -> None:
        super().__init__(f"[{condition}] {message}")
        self.condition = condition


class ServiceError(RuntimeError):
    """A service that an expression calls did not answer: no row is bad because of that, and the job fails."""


SparkType: TypeAlias = str | dict[str, Any]

_SIMPLE: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "byte": pa.int8(),
    "short": pa.int16(),
    "integer": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "binary": pa.binary(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "void": pa.null(),
}
_DECIMAL = re.compile(r"decimal\((\d+),(-?\d+)\)")
_CHARACTERS = re.compile(r"(var)?char\(\d+\)")
_DAY_TIME = re.compile(r"interval (day|hour|minute|second)( to (hour|minute|second))?")
_YEAR_MONTH = re.compile(r"interval (year|month)( to month)?")
CALENDAR_INTERVAL = pa.struct([("months", pa.int32()), ("days", pa.int32()), ("micros", pa.int64())])


def arrow_type(type_: SparkType) -> pa.DataType:
    """Returns the Arrow type of a Spark type's values.

    Timestamps with a zone are microseconds in UTC; day-time intervals are durations in microseconds.

    Raises UnsupportedTypeError for types that the engine does not support: collations, calendar and year-month
    intervals, variants, times, user-defined types.
    """
    if isinstance(type_, str):
        simple = _SIMPLE.get(type_)
        if simple is not None:
            return simple
        if decimal := _DECIMAL.fullmatch(type_):
            return pa.decimal128(int(decimal[1]), int(decimal[2]))
        if _CHARACTERS.fullmatch(type_):
            return pa.string()
        if _DAY_TIME.fullmatch(type_):
            return pa.duration("us")
        raise UnsupportedTypeError(type_)
    kind = type_["type"]
    if kind == "array":
        return pa.list_(arrow_type(type_["elementType"]))
    if kind == "map":
        return pa.map_(arrow_type(type_["keyType"]), arrow_type(type_["valueType"]))
    if kind == "struct":
        names = [field["name"] for field in type_["fields"]]
        if len(set(names)) < len(names):
            raise UnsupportedTypeError(f"struct with two fields named {max(names, key=names.count)}")
        return pa.struct([pa.field(field["name"], arrow_type(field["type"])) for field in type_["fields"]])
    raise UnsupportedTypeError(kind)


def value_type(type_: SparkType) -> pa.DataType:
    """Returns the Arrow type of values inside an expression: besides those of columns, the other two intervals.

    Year-month intervals are a number of months; calendar intervals are structs of months, days and microseconds.
    """
    if isinstance(type_, str):
        if _YEAR_MONTH.fullmatch(type_):
            return pa.int32()
        if type_ == "interval":
            return CALENDAR_INTERVAL
    return arrow_type(type_)


def is_year_month(type_: SparkType) -> bool:
    """Returns whether the type is an interval of years and months."""
    return isinstance(type_, str) and _YEAR_MONTH.fullmatch(type_) is not None


def is_day_time(type_: SparkType) -> bool:
    """Returns whether the type is an interval of days, hours, minutes and seconds."""
    return isinstance(type_, str) and _DAY_TIME.fullmatch(type_) is not None


def is_integral(type_: SparkType) -> bool:
    """Returns whether the type is one of the four integers."""
    return type_ in ("byte", "short", "integer", "long")


def is_fractional(type_: SparkType) -> bool:
    """Returns whether the type is ``float`` or ``double``."""
    return type_ in ("float", "double")


def decimal_of(type_: SparkType) -> tuple[int, int] | None:
    """Returns precision and scale of a decimal type, and None for any other type."""
    found = _DECIMAL.fullmatch(type_) if isinstance(type_, str) else None
    return (int(found[1]), int(found[2])) if found else None
