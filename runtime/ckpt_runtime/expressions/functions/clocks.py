"""The current time, and timestamps made from their parts.

The current time is the time at which an operator gets a batch of rows: it is the same for all rows of the batch, as in
a batch of Spark's. After a recovery, rows are computed again with the time at that point, as in Spark.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions import texts
from ckpt_runtime.expressions.errors import EvaluationError, UnsupportedExpressionError
from ckpt_runtime.expressions.evaluation import Evaluator, Frame, Value, function, strict
from ckpt_runtime.expressions.functions.casts import caster
from ckpt_runtime.expressions.nodes import Call
from ckpt_runtime.expressions.rows import per_row
from ckpt_runtime.expressions.types import arrow_type, value_type


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
