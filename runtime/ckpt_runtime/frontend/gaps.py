"""The gaps of session windows: calendar intervals that are constants become microseconds.

Spark expresses the end of a session as a timestamp plus a calendar interval. The interval is often a cast text, or one
of several texts that CASE selects: then the sum is one of integers, for which Arrow has a kernel.
"""

from __future__ import annotations

import msgspec

from ckpt_runtime.expressions.nodes import Call, Expression, Literal
from ckpt_runtime.expressions.texts import parse_interval

_DAY = 86_400_000_000
_UTC = frozenset({"UTC", "Etc/UTC", "GMT", "Z", "+00:00"})


def with_gap(call: Call) -> Call:
    """Returns a ``TimestampAddInterval`` with microseconds in place of its calendar interval, if this is possible.

    It is not for an interval that is computed, has months, or has days of a zone in which these differ in length.
    """
    time, interval = call.arguments
    gap = _microseconds(interval, call.settings.get("zone", "")) if interval.type == "interval" else None
    if gap is None:
        return call
    start = Call("PreciseTimestampConversion", (time,), "long")
    return Call("PreciseTimestampConversion", (Call("Add", (start, gap), "long"),), "timestamp")


def _microseconds(tree: Expression, zone: str) -> Expression | None:
    """Returns the length of an interval, None if it is not made of constants of equal length."""
    if isinstance(tree, Literal):
        return _length(tree, zone)
    if not isinstance(tree, Call):
        return None
    if tree.function == "Cast":
        return _microseconds(tree.arguments[0], zone)
    if tree.function not in ("CaseWhen", "If", "Coalesce"):
        return None
    arguments = [
        _microseconds(argument, zone) if _is_value(tree, at) else argument for at, argument in enumerate(tree.arguments)
    ]
    known = tuple(argument for argument in arguments if argument is not None)
    return msgspec.structs.replace(tree, arguments=known, type="long") if len(known) == len(arguments) else None


def _is_value(tree: Call, at: int) -> bool:
    """Whether an argument is a result and not a condition."""
    if tree.function == "If":
        return at > 0
    return tree.function == "Coalesce" or at % 2 == 1 or at == len(tree.arguments) - 1


def _length(literal: Literal, zone: str) -> Literal | None:
    if literal.value is None:
        return Literal(None, "long")
    if literal.type == "interval":
        months, days, micros = map(int, str(literal.value).split(","))
    else:
        parsed = parse_interval(str(literal.value))
        if parsed is None:
            return Literal(None, "long")  # as in Spark, whose cast gives null
        months, days, micros = parsed["months"], parsed["days"], parsed["micros"]
    if months or (days and zone not in _UTC):
        return None
    return Literal(str(days * _DAY + micros), "long")
