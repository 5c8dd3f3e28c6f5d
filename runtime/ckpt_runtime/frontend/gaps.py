"""The gaps of session windows: calendar intervals that are constants become microseconds.

Spark expresses the end of a session as a timestamp plus a calendar interval. The interval is a cast text, or one of
several texts that CASE selects. The engine has no values of that type.
"""

from __future__ import annotations

import re

import msgspec

from ckpt_runtime.expressions.errors import UnsupportedExpressionError
from ckpt_runtime.expressions.nodes import Call, Expression, Literal

_MICROSECONDS = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_PART = re.compile(r"([+-]?\d+)\s+([a-z]+?)s?(?:\s+|$)", re.IGNORECASE)
_UTC = frozenset({"UTC", "Etc/UTC", "GMT", "Z", "+00:00"})


def with_gap(call: Call) -> Expression:
    """Returns a ``TimestampAddInterval`` with microseconds in place of its calendar interval.

    Raises UnsupportedExpressionError for an interval that is not made of constants, or has months or years.
    """
    time, interval = call.arguments
    if interval.type != "interval":
        return call
    gap = _microseconds(interval, call.settings.get("zone", ""))
    start = Call("PreciseTimestampConversion", (time,), "long")
    return Call("PreciseTimestampConversion", (Call("Add", (start, gap), "long"),), "timestamp")


def _microseconds(tree: Expression, zone: str) -> Expression:
    if isinstance(tree, Literal) and isinstance(tree.value, str):
        return Literal(str(_parsed(tree.value, zone)), "long")
    if isinstance(tree, Literal) and tree.value is None:
        return Literal(None, "long")
    if isinstance(tree, Call) and tree.function == "Cast":
        return _microseconds(tree.arguments[0], zone)
    if isinstance(tree, Call) and tree.function in ("CaseWhen", "If", "Coalesce"):
        arguments = tuple(
            _microseconds(argument, zone) if _is_value(tree, at) else argument
            for at, argument in enumerate(tree.arguments)
        )
        return msgspec.structs.replace(tree, arguments=arguments, type="long")
    raise UnsupportedExpressionError("an interval that is computed", "choose among constants such as '5 minutes'")


def _is_value(tree: Call, at: int) -> bool:
    """Whether an argument is a result and not a condition."""
    if tree.function == "If":
        return at > 0
    return tree.function == "Coalesce" or at % 2 == 1 or at == len(tree.arguments) - 1


def _parsed(text: str, zone: str) -> int:
    total, end = 0, 0
    text = text.strip().lower().removeprefix("interval ").strip()
    for part in _PART.finditer(text):
        unit = part[2].lower()
        if part.start() != end or unit not in _MICROSECONDS:
            break
        if unit in ("day", "week") and zone not in _UTC:
            raise UnsupportedExpressionError(f"the interval {text!r}", f"days differ in length in the zone {zone!r}")
        total, end = total + int(part[1]) * _MICROSECONDS[unit], part.end()
    if not text or end != len(text):
        raise UnsupportedExpressionError(f"the interval {text!r}", "use whole weeks, days, hours, minutes, seconds")
    return total
