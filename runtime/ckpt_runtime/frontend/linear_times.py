"""Times that a join's condition compares, as sums of columns and constants.

``rt <= lt + INTERVAL 5 SECONDS``, ``rt - lt <= INTERVAL 5 SECONDS`` and ``cast(rt AS long) <= cast(lt AS long) + 5``
all limit the time between two columns. Numbers are seconds, as Spark casts timestamps. A cast to a whole number of
seconds drops a fraction, so such a sum is known up to a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

import pyarrow as pa

from ckpt_runtime.expressions.evaluation import Frame, compile_expression
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import (
    EvaluationError,
    UnsupportedExpressionError,
    is_day_time,
    is_fractional,
    is_integral,
)
from ckpt_runtime.frontend.generators import columns_of

_SECOND, _HOUR, _DAY = 1_000_000, 3_600_000_000, 86_400_000_000
_TIMES = ("timestamp", "timestamp_ntz")
_OF_CONSTANTS = frozenset(
    {
        *("Cast", "UnaryMinus", "Add", "Subtract", "Multiply", "Divide", "MultiplyDTInterval", "DivideDTInterval"),
        *("MakeDTInterval", "MakeInterval"),
    }
)
"""Functions of constants that are computed."""
_UTC = frozenset({"", "UTC", "Etc/UTC", "GMT", "Z", "+00:00"})


@dataclass(frozen=True, slots=True)
class Linear:
    """Columns times factors, plus a number of microseconds that is at least ``least`` and at most ``most``."""

    columns: Mapping[int, int] = field(default_factory=dict)
    least: int = 0
    most: int = 0

    def plus(self, other: Linear) -> Linear:
        both = {
            at: self.columns.get(at, 0) + other.columns.get(at, 0) for at in self.columns.keys() | other.columns.keys()
        }
        return Linear({at: factor for at, factor in both.items() if factor}, *self._moved(other.least, other.most))

    def negated(self) -> Linear:
        return Linear({at: -factor for at, factor in self.columns.items()}, -self.most, -self.least)

    def minus(self, other: Linear) -> Linear:
        return self.plus(other.negated())

    def widened(self, least: int, most: int) -> Linear:
        """The same columns, with a number that is known less exactly."""
        return Linear(self.columns, *self._moved(least, most))

    def _moved(self, least: int, most: int) -> tuple[int, int]:
        return self.least + least, self.most + most


def linear(tree: Expression) -> Linear | None:
    """Returns a time, a length of time or a number of seconds as such a sum; None for anything else."""
    if isinstance(tree, Column):
        return Linear({tree.index: 1}) if tree.type in _TIMES else None
    if not columns_of([tree]):
        return _constant(tree)
    if not isinstance(tree, Call):
        return None
    parts = [linear(argument) for argument in tree.arguments]
    first, second = (parts[0], parts[1] if len(parts) == 2 else None) if parts else (None, None)
    if first is None:
        return None
    match tree.function:
        case "Cast" | "UnixSeconds":
            return _cast(first, tree.arguments[0].type, tree.type)
        case "UnaryMinus":
            return first.negated()
        case "Add" | "Subtract" | "TimeAdd" | "TimestampAddInterval" | "SubtractTimestamps" if second is not None:
            return _sum(tree, first, second)
    return None


def _sum(tree: Call, first: Linear, second: Linear) -> Linear:
    found = first.minus(second) if tree.function.startswith("Subtract") else first.plus(second)
    whole_days = max(abs(second.least), abs(second.most)) >= _DAY or tree.function == "SubtractTimestamps"
    if whole_days and str(tree.settings.get("zone", "")) not in _UTC:
        return found.widened(-_HOUR, _HOUR)  # a local day may have 23 or 25 hours
    return found


def _cast(value: Linear, source: object, target: object) -> Linear | None:
    if not isinstance(source, str) or not isinstance(target, str):
        return None
    if source == target:
        return value
    if source == "timestamp" and is_integral(target):
        return value.widened(1 - _SECOND, 0)
    if source == "timestamp" and is_fractional(target):
        return value.widened(-1, 1) if target == "double" else None
    return value if is_integral(source) and (is_integral(target) or target == "double") else None


def _constant(tree: Expression) -> Linear | None:
    """Returns a constant length of time, or a constant number of seconds; None for other constants."""
    kind = tree.type
    if not isinstance(kind, str) or not (is_day_time(kind) or is_integral(kind) or kind in ("double", "interval")):
        return None
    if not _is_computed(tree):
        return None
    try:
        value = compile_expression(tree)(Frame((), 1))
    except (EvaluationError, UnsupportedExpressionError):
        return None
    found = (value if isinstance(value, pa.Scalar) else value[0]).as_py()
    if found is None:
        return None
    if is_day_time(kind):
        micros = (value if isinstance(value, pa.Scalar) else value[0]).cast(pa.int64()).as_py()
        return Linear({}, micros, micros)
    if kind == "interval":
        micros = found["days"] * _DAY + found["micros"]
        return None if found["months"] else Linear({}, micros, micros)
    if isinstance(found, float) and not math.isfinite(found):
        return None
    exact = Decimal(found) * _SECOND
    return Linear({}, math.floor(exact), math.ceil(exact))


def _is_computed(tree: Expression) -> bool:
    if isinstance(tree, Call):
        return tree.function in _OF_CONSTANTS and all(map(_is_computed, tree.arguments))
    return isinstance(tree, Literal)
