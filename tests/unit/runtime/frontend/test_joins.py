"""Conditions of joins in parts: keys, bounds on event time, filters, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.frontend.joins import Conditions, Side, conditions_of
from ckpt_runtime.frontend.typed_plan import Join, TypedColumn
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.specs import NO_BOUND_US

K, AT, KEY, THEN = (Column(0, "string"), Column(1, "timestamp"), Column(2, "string"), Column(3, "timestamp"))
EQUAL = Call("EqualTo", (K, KEY), "boolean")


def interval(micros: int) -> Literal:
    return Literal(str(micros), "interval day to second")


def later(time: Column, micros: int) -> Call:
    return Call("TimestampAddInterval", (time, interval(micros)), "timestamp")


def later_by(time: Column, length: Expression, zone: str = "UTC") -> Call:
    return Call("TimestampAddInterval", (time, length), "timestamp", settings={"zone": zone})


def compared(function: str, one: Expression, other: Expression) -> Call:
    return Call(function, (one, other), "boolean")


def conditions(*parts: Expression, how: str = "Inner", event_time: int | None = 1) -> Conditions:
    condition = parts[0]
    for part in parts[1:]:
        condition = Call("And", (condition, part), "boolean")
    sides = [
        Side((TypedColumn("k", "string"), TypedColumn("at", "timestamp")), event_time),
        Side((TypedColumn("key", "string"), TypedColumn("then", "timestamp")), event_time),
    ]
    return conditions_of(Join(columns=(), how=how, condition=condition), *sides)


def test_equality_of_columns_of_both_sides_is_a_key_in_either_order() -> None:
    for one, other in ((K, KEY), (KEY, K)):
        found = conditions(compared("EqualTo", one, other))
        assert (found.left.keys, found.right.keys) == ([K], [Column(0, "string")])


def seconds(time: Expression) -> Call:
    return Call("Cast", (time,), "long")


def plus(number: Expression, other: Expression, kind: str = "long") -> Call:
    return Call("Add", (number, other), kind, "ansi")


DAY = interval(86_400_000_000)


@pytest.mark.parametrize(
    ("part", "exact", "kept"),
    [
        # The time between both, and a constant that is computed.
        (
            ("LessThanOrEqual", Call("SubtractTimestamps", (THEN, AT), "interval day to second"), interval(7)),
            (None, 7),
            False,
        ),
        (("LessThan", THEN, later_by(AT, plus(interval(3), interval(4), "interval day to second"))), (None, 6), False),
        (("LessThan", THEN, later_by(AT, Literal("0,1,5", "interval"))), (None, 86_400_000_004), False),
        # Whole seconds: the times may differ by almost a second more.
        (("LessThanOrEqual", seconds(THEN), plus(seconds(AT), Literal("5", "long"))), (None, 5_999_999), True),
        (("GreaterThan", seconds(THEN), seconds(AT)), (-999_998, None), True),
        (("LessThanOrEqual", Call("Cast", (THEN,), "double"), Call("Cast", (AT,), "double")), (None, 2), True),
        # A local day may be longer.
        (("LessThanOrEqual", THEN, later_by(AT, DAY, zone="Europe/Vienna")), (None, 90_000_000_000), True),
        (("LessThanOrEqual", THEN, later_by(AT, Literal("1,0,0", "interval"))), None, True),
        (("LessThan", seconds(THEN), Literal("5", "long")), None, False),
    ],
)
def test_bound_is_read_from_sums_and_casts_of_times_and_the_condition_kept_where_it_says_more(
    part: tuple[str, Expression, Expression], exact: tuple[int | None, int | None] | None, kept: bool
) -> None:
    found = conditions(EQUAL, compared(*part))
    assert tuple(found.bounds) == (exact or (None, None))
    assert bool(found.rest) is kept


@pytest.mark.parametrize(
    ("parts", "exact", "within"),
    [
        (
            [("GreaterThanOrEqual", THEN, AT), ("LessThanOrEqual", THEN, later(AT, 5_000_000))],
            (0, 5_000_000),
            (0, 5000),
        ),
        ([("LessThan", AT, THEN), ("LessThan", THEN, later(AT, 2_000))], (1, 1_999), (0, 2)),
        ([("GreaterThan", later(THEN, 1_000), AT), ("GreaterThan", AT, later(THEN, -500))], (-999, 499), (-1, 1)),
        ([("EqualTo", THEN, AT)], (0, 0), (0, 0)),
    ],
)
def test_comparisons_of_event_times_are_bounds_to_the_microsecond(
    parts: list[tuple[str, Expression, Expression]], exact: tuple[int, int], within: tuple[int, int]
) -> None:
    spec = conditions(EQUAL, *(compared(*part) for part in parts), how="FullOuter").spec()
    assert (spec.exact, spec.within_ms) == (exact, within)


def test_condition_on_one_side_filters_it_and_separates_rows_that_an_outer_join_keeps() -> None:
    mine, theirs = (compared("GreaterThan", column, Literal("a", "string")) for column in (K, KEY))
    found = conditions(EQUAL, mine, theirs)
    assert (found.left.filters, len(found.right.filters)) == ([mine], 1)
    assert found.right.filters[0] == compared("GreaterThan", Column(0, "string"), Literal("a", "string"))
    assert conditions(EQUAL, theirs, how="LeftOuter").right.filters
    kept = conditions(EQUAL, mine, how="LeftOuter").left
    assert (kept.filters, kept.needed) == ([], [mine])


@pytest.mark.parametrize("of_event_time", [True, False])
def test_equality_of_windows_of_event_time_bounds_the_time_by_their_ends(of_event_time: bool) -> None:
    fields = [{"name": name, "type": "timestamp", "nullable": True, "metadata": {}} for name in ("start", "end")]
    window: dict[str, Any] = {"type": "struct", "fields": fields}
    sides = [Side((TypedColumn("w", window), TypedColumn("v", "long")), None) for _ in range(2)]
    condition = compared("EqualTo", Column(0, window), Column(2, window))
    join = Join(columns=(), how="LeftOuter", condition=condition)
    if not of_event_time:
        with pytest.raises(PlanError, match="watermark"):
            conditions_of(join, *sides).spec()
        return
    spec = conditions_of(msgspec.structs.replace(join, windows=(0, 0)), *sides).spec()
    assert [spec.left.schema.field(key).type for key in spec.left.keys] == [pa.timestamp("us", "UTC")] * 2
    assert (spec.exact, spec.left.event_time, spec.right.event_time) == ((0, 0), "l_key1", "r_key1")


def test_other_condition_filters_an_inner_join_and_is_part_of_what_matches_in_an_outer_one() -> None:
    other = compared("GreaterThan", K, KEY)
    moved = compared("GreaterThan", K, Column(3, "string"))
    assert conditions(EQUAL, other).remaining() == [moved]
    assert conditions(EQUAL, other).spec().condition is None
    assert conditions(EQUAL, compared("EqualTo", AT, THEN), other, how="LeftOuter").spec().condition == compared(
        "GreaterThan", K, Column(4, "string")
    )


def test_equality_in_which_nulls_match_compares_whether_values_are_null_and_a_constant_in_their_place() -> None:
    found = conditions(compared("EqualNullSafe", K, KEY))
    assert found.left.keys == [
        Call("IsNull", (K,), "boolean"), Call("Coalesce", (K, Literal("", "string")), "string"),
    ]  # fmt: skip
    assert len(found.right.keys) == 2


@pytest.mark.parametrize(
    ("function", "fails", "kept"), [("GreaterThan", "Left", "Right"), ("LessThan", "Right", "Left")]
)
def test_bound_of_one_side_suffices_for_inner_joins_and_for_outer_joins_of_that_side(
    function: str, fails: str, kept: str
) -> None:
    bound = compared(function, THEN, AT)
    for how in ("Inner", f"{kept}Outer"):
        spec = conditions(EQUAL, bound, how=how).spec()
        assert spec.exact in ((1, NO_BOUND_US), (-NO_BOUND_US, -1))
    for how in (f"{fails}Outer", "FullOuter"):
        with pytest.raises(PlanError, match="would be kept for ever"):
            conditions(EQUAL, bound, how=how).spec()


def test_join_without_key_or_outer_join_without_bounds_is_refused() -> None:
    with pytest.raises(PlanError, match="needs an equality"):
        conditions(compared("GreaterThan", K, KEY)).spec()
    with pytest.raises(PlanError, match="watermark"):
        conditions(EQUAL, how="LeftOuter").spec()
