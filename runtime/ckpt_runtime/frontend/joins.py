"""Joins of two streams: keys and time bounds are read from Spark's condition.

Equalities between the sides are keys. Comparisons of the two event time columns bound the time between two rows that
match. A condition on one side alone filters that side; where an outer join keeps the side's rows, those that fail the
condition are emitted alone. Any other condition filters the result of an inner join, and is part of what matches in
other joins.

The times of a comparison are sums of columns and constants (:class:`Linear`): ``rt <= lt + INTERVAL 5 SECONDS``,
``rt - lt <= INTERVAL 5 SECONDS`` and ``cast(rt AS long) <= cast(lt AS long) + 5`` all limit the time between two
columns. Numbers are seconds, as Spark casts timestamps. A cast to a whole number of seconds drops a fraction, so such a
sum is known up to a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

import msgspec
import pyarrow as pa

from ckpt_runtime.expressions.evaluation import Frame, compile_expression
from ckpt_runtime.expressions.functions.key_texts import key_text
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal, moved
from ckpt_runtime.expressions.types import (
    EvaluationError,
    UnsupportedExpressionError,
    arrow_type,
    is_day_time,
    is_fractional,
    is_integral,
)
from ckpt_runtime.frontend.generators import columns_of
from ckpt_runtime.frontend.struct_keys import is_window, leaves_of
from ckpt_runtime.frontend.typed_plan import Join, TypedColumn
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.output_schemas import SchemaDerivationError, join_output_schema
from ckpt_runtime.graph.specs import NO_BOUND_US, JoinSide, JoinSpec

_MILLISECOND, _SECOND, _HOUR, _DAY = 1_000, 1_000_000, 3_600_000_000, 86_400_000_000
TIMES = ("timestamp", "timestamp_ntz")
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
        return Linear({tree.index: 1}) if tree.type in TIMES else None
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


HOW = {
    "Inner": "inner",
    "LeftOuter": "left_outer",
    "RightOuter": "right_outer",
    "FullOuter": "full_outer",
    "LeftSemi": "left_semi",
}
"""The engine's name for each of Spark's join types that two streams may have."""
_MIRRORED = {
    "LessThan": "GreaterThan",
    "GreaterThan": "LessThan",
    "LessThanOrEqual": "GreaterThanOrEqual",
    "GreaterThanOrEqual": "LessThanOrEqual",
    "EqualTo": "EqualTo",
}
_COMPARISONS = frozenset(_MIRRORED)
_MAY_FILTER = {
    "inner": (True, True),
    "left_outer": (False, True),
    "right_outer": (True, False),
    "full_outer": (False, False),
    "left_semi": (True, True),
}
"""Whether a condition on one side may filter the left and the right side before the join."""


@dataclass(slots=True)
class Side:
    """One input of a join: its columns, the position of its event time, its keys and the filters in front of it.

    ``late`` is the position of the column by which late rows are dropped, None if no row is late. ``unmarked`` says
    that the side has no watermark, while the other one does: its event time is the column that the condition compares.
    Rows for which not all of ``needed`` are true match nothing; an outer join emits them alone.
    """

    columns: tuple[TypedColumn, ...]
    event_time: int | None
    late: int | None = None
    unmarked: bool = False
    keys: list[Expression] = field(default_factory=list)
    filters: list[Expression] = field(default_factory=list)
    needed: list[Expression] = field(default_factory=list)

    def prepared(self, letter: str) -> tuple[tuple[str, Expression], ...]:
        """Returns the join's input columns, with names that are unique among both sides: all columns, then the keys."""
        plain = [(f"{letter}{at}", Column(at, column.type)) for at, column in enumerate(self.columns)]
        return (*plain, *((f"{letter}_key{at}", key) for at, key in enumerate(self.keys)))


@dataclass(slots=True)
class Conditions:
    """A join's condition in parts. ``bounds`` are of the right event time minus the left one, in microseconds.

    ``windows`` are the columns of the left and the right side that are windows of event time, None on a side without.
    ``ends`` is the position of the key that is the end of such windows; event time is that key then. ``kept`` is how
    much longer than a bound says Spark keeps rows: by a millisecond, where the bound itself is included.
    """

    left: Side
    right: Side
    how: str
    windows: tuple[int | None, int | None] = (None, None)
    ends: int | None = None
    bounds: list[int | None] = field(default_factory=lambda: [None, None])
    kept: list[int] = field(default_factory=lambda: [0, 0])
    rest: list[Expression] = field(default_factory=list)

    def add(self, condition: Expression | None) -> None:
        """Splits a condition into its parts."""
        if condition is None:
            return
        if isinstance(condition, Call) and condition.function == "And":
            for argument in condition.arguments:
                self.add(argument)
        elif not self._add_bound(condition) and not self._add_key(condition) and not self._add_filter(condition):
            self.rest.append(condition)

    def _side_of(self, tree: Expression) -> int | None:
        """Returns 0 or 1 for an expression over columns of one side, None for others."""
        sides = {int(at >= len(self.left.columns)) for at in columns_of([tree])}
        return sides.pop() if len(sides) == 1 else None

    def _own(self, tree: Expression) -> Expression:
        """Returns an expression of the right side over its own columns."""
        width = len(self.left.columns)
        return moved(tree, lambda at: at - width)

    def _add_key(self, condition: Expression) -> bool:
        if not isinstance(condition, Call) or condition.function not in ("EqualTo", "EqualNullSafe"):
            return False
        one, other = condition.arguments
        if (self._side_of(one), self._side_of(other)) == (1, 0):
            one, other = other, one
        if (self._side_of(one), self._side_of(other)) != (0, 1):
            return False
        other = self._own(other)
        if not is_window(one.type) or one.type != other.type:
            nulls_match = condition.function == "EqualNullSafe"
            self.left.keys += _compared(one, nulls_match=nulls_match)
            self.right.keys += _compared(other, nulls_match=nulls_match)
            return True
        self.left.keys += [leaf for _, leaf in leaves_of(one)]
        self.right.keys += [leaf for _, leaf in leaves_of(other)]
        if self._are_event_windows(one, other):
            # As with an equality of event times, a row matches until the watermark reaches the end of its window.
            self.ends, self.bounds, self.kept = len(self.left.keys) - 1, [0, 0], [0, 0]
        return True

    def _are_event_windows(self, one: Expression, other: Expression) -> bool:
        """Whether windows of a key are those of event time, of both sides or of the only one that has event time."""
        given = ((at, tree) for at, tree in zip(self.windows, (one, other), strict=True) if at is not None)
        return self.windows != (None, None) and all(tree == Column(at, tree.type) for at, tree in given)

    def _add_filter(self, condition: Expression) -> bool:
        number = self._side_of(condition)
        if number is None:
            return False
        side = self.left if number == 0 else self.right
        own = condition if number == 0 else self._own(condition)
        (side.filters if _MAY_FILTER[self.how][number] else side.needed).append(own)
        return True

    def _add_bound(self, condition: Expression) -> bool:
        """Takes over the bound that a condition sets; returns whether the bound says all that the condition does."""
        if not isinstance(condition, Call) or condition.function not in _COMPARISONS:
            return False
        left, right = (linear(argument) for argument in condition.arguments)
        if left is None or right is None or None in (self.left.event_time, self.right.event_time):
            return False
        assert self.right.event_time is not None
        compared, at = left.minus(right), self.right.event_time + len(self.left.columns)
        if compared.columns == {self.left.event_time: -1, at: 1}:
            compared, function = compared.negated(), _MIRRORED[condition.function]
        elif compared.columns == {self.left.event_time: 1, at: -1}:
            function = condition.function
        else:
            return False
        # The left time minus the right one, plus a number that is at least ``least`` and at most ``most``, is compared
        # with 0: the right time minus the left one is compared with that number.
        exact = compared.least == compared.most
        kept = 0 if not exact or function == "EqualTo" else _MILLISECOND if function.endswith("OrEqual") else 1
        if function in ("LessThan", "LessThanOrEqual", "EqualTo"):
            least = compared.least + (function == "LessThan")
            if self.bounds[0] is None or least > self.bounds[0]:
                self.bounds[0], self.kept[0] = least, kept
        if function in ("GreaterThan", "GreaterThanOrEqual", "EqualTo"):
            most = compared.most - (function == "GreaterThan")
            if self.bounds[1] is None or most < self.bounds[1]:
                self.bounds[1], self.kept[1] = most, kept
        # An equality is a key, too.
        return function != "EqualTo" and exact

    def spec(self) -> JoinSpec:
        """Returns the join. Raises PlanError without keys, or if the bounds do not limit how long rows are kept."""
        if not self.left.keys:
            raise PlanError("join", "a join of streams needs an equality between a column of each side")
        exact = self._exact_bounds()
        if exact is None and self.how != "inner":
            raise PlanError(
                "join",
                f"a {self.how} join of streams needs a watermark on both sides (withWatermark), and a condition that "
                "bounds the time between two matching rows, such as right_time BETWEEN left_time AND left_time + "
                "INTERVAL 1 HOUR: otherwise it is never certain that a row has no match",
            )
        within = None if exact is None else (exact[0] // 1000, -(-exact[1] // 1000))
        sides = [
            JoinSide(
                pa.schema([(name, arrow_type(tree.type)) for name, tree in side.prepared(letter)]),
                tuple(f"{letter}_key{at}" for at in range(len(side.keys))),
                None if within is None else f"{letter}{side.event_time if self.ends is None else f'_key{self.ends}'}",
                late_by="" if side.unmarked else None if side.late is None else f"{letter}{side.late}",
            )
            for letter, side in (("l", self.left), ("r", self.right))
        ]
        condition = None if self.how == "inner" else all_of(self.remaining())
        kept = (0, 0) if exact is None else (self.kept[0], self.kept[1])
        spec = JoinSpec(self.how, sides[0], sides[1], within, exact, condition, kept)
        try:
            join_output_schema(spec)
        except SchemaDerivationError as error:
            raise PlanError("join", str(error)) from None
        return spec

    def _exact_bounds(self) -> tuple[int, int] | None:
        """Returns the bounds in microseconds, None without any.

        Raises PlanError for an outer join that could never emit a row alone, because a later row might match it.
        """
        lower, upper = self.bounds
        if lower is None and upper is None:
            return None
        left = self.how in ("left_outer", "full_outer", "left_semi")
        right = self.how in ("right_outer", "full_outer")
        if (upper is None and left) or (lower is None and right):
            missing, first, second = ("upper", "left", "right") if upper is None else ("lower", "right", "left")
            raise PlanError(
                "join",
                f"its condition has no {missing} bound for the time between two matching rows, so a row of the "
                f"{first} side would be kept for ever and never emitted without a match: limit how much later the "
                f"row of the {second} side may be",
            )
        return -NO_BOUND_US if lower is None else lower, NO_BOUND_US if upper is None else upper

    def joined(self, columns: Sequence[TypedColumn]) -> list[Expression]:
        """Returns the result's columns over those of the join, which has each side's keys after its columns."""
        width = len(self.left.columns)
        behind = width + len(self.left.keys)
        return [Column(at if at < width else at - width + behind, column.type) for at, column in enumerate(columns)]

    def remaining(self) -> list[Expression]:
        """Returns the conditions on joined rows, over the columns of the join."""
        width, keys = len(self.left.columns), len(self.left.keys)
        return [moved(tree, lambda at: at + keys * (at >= width)) for tree in self.rest]


def conditions_of(node: Join, left: Side, right: Side) -> Conditions:
    """Splits the condition of a join into its parts. Raises PlanError."""
    windows = (None, None) if isinstance(node.windows, msgspec.UnsetType) else node.windows
    for side, other in ((left, right), (right, left)):
        if side.unmarked and node.condition is not None:
            side.event_time = _equal_time(node.condition, side, other, is_left=side is left)
    conditions = Conditions(left, right, HOW[node.how], windows)
    conditions.add(node.condition)
    return conditions


def _equal_time(condition: Expression, side: Side, other: Side, *, is_left: bool) -> int | None:
    """Returns the column of a side that has to be equal to the other side's event time, None without one."""
    if other.event_time is None:
        return None
    width = len(side.columns if is_left else other.columns)
    marked = other.event_time + (width if is_left else 0)
    for part in parts_of(condition):
        if isinstance(part, Call) and part.function == "EqualTo":
            pair = [tree.index for tree in part.arguments if isinstance(tree, Column) and tree.type in TIMES]
            own = [at for at in pair if at != marked and (at < width) == is_left]
            if len(pair) == 2 and len(own) == 1 and marked in pair:
                return own[0] - (0 if is_left else width)
    return None


def _compared(tree: Expression, *, nulls_match: bool) -> list[Expression]:
    """Returns the keys by which an equality compares a value; a null among them matches nothing.

    Structs are compared by their fields, in which nulls are equal, and arrays by their texts. Where nulls are equal,
    one key is true if the value is null, and another one has a constant in place of the null.
    """
    if isinstance(tree.type, dict) and tree.type["type"] != "struct":
        tree = key_text(tree)
    kind = tree.type
    missing = Call("IsNull", (tree,), "boolean")
    if isinstance(kind, dict) and kind["type"] == "struct":
        known = missing if nulls_match else Call("If", (missing, Literal(None, "boolean"), missing), "boolean")
        fields = [
            Call("GetStructField", (tree,), field["type"], settings={"ordinal": at})
            for at, field in enumerate(kind["fields"])
        ]
        return [known, *(key for field in fields for key in _compared(field, nulls_match=True))]
    if not nulls_match or not isinstance(kind, str):
        return [tree]
    constants: dict[str, str | bool] = {"boolean": False, "string": "", "binary": "", "float": "0.0", "double": "0.0"}
    constant = Literal(constants.get(kind, "0"), kind)
    return [missing, Call("Coalesce", (tree, constant), kind)]


def parts_of(condition: Expression) -> list[Expression]:
    """Returns the conditions that all have to be true for a condition to be true, in their order."""
    if isinstance(condition, Call) and condition.function == "And":
        return [part for argument in condition.arguments for part in parts_of(argument)]
    return [condition]


def all_of(conditions: Sequence[Expression]) -> Expression | None:
    """Returns a condition that is true where all of these are, None for none."""
    if not conditions:
        return None
    first, *others = conditions
    for other in others:
        first = Call("And", (first, other), "boolean")
    return first
