"""Ranks of nested values, and aggregates that are built on them."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.aggregates import GroupAggregate
from ckpt_runtime.operators.aggregates.accumulator import AggregateFailedError, Rows, ranks
from ckpt_runtime.operators.aggregates.registry import accumulator_for
from tests.support.groups import aggregate

ROW = pa.struct([("f", pa.float64()), ("s", pa.string()), ("l", pa.list_(pa.int32()))])


def sort_key(value: Any) -> Any:
    """What Python compares as Spark compares the value: null first, NaN last, structs and arrays part by part."""
    if value is None:
        return (0,)
    if isinstance(value, dict):
        return (1, tuple(map(sort_key, value.values())))
    if isinstance(value, list):
        return (1, tuple(map(sort_key, value)))
    if isinstance(value, float):
        return (1, math.isnan(value), 0.0 if math.isnan(value) else value)
    return (1, value)


def some_row(choice: Random) -> Any:
    numbers = [choice.choice([None, 1, 2]) for _ in range(choice.randrange(4))]
    return choice.choice(
        [
            None,
            *4
            * [
                {
                    "f": choice.choice([None, math.nan, -0.0, 0.0, 1.5, -math.inf]),
                    "s": choice.choice([None, "", "a", "ab", "é"]),
                    "l": choice.choice([None, numbers]),
                }
            ],
        ]
    )


def test_ranks_of_structs_and_arrays_compare_as_their_values_do_in_spark() -> None:
    choice = Random(7)
    for kind, values in (
        (ROW, [some_row(choice) for _ in range(300)]),
        (pa.list_(ROW), [[some_row(choice) for _ in range(choice.randrange(3))] for _ in range(200)]),
    ):
        array = pa.array([None, *values], kind).slice(1)  # with an offset
        kept = [at for at, value in enumerate(values) if value is not None]
        found = ranks(array)
        keys = [sort_key(values[at]) for at in kept]
        places = {key: place for place, key in enumerate(sorted(set(keys)))}
        by_rank = {rank: place for place, rank in enumerate(sorted({int(found[at]) for at in kept}))}
        assert [by_rank[int(found[at])] for at in kept] == [places[key] for key in keys]


def test_aggregates_of_structs_and_of_distinct_values_are_the_same_in_parts_and_at_once() -> None:
    choice = Random(3)
    rows = [some_row(choice) for _ in range(120)]
    groups = np.array([choice.randrange(4) for _ in rows], dtype=np.uint32)
    numbers = [choice.choice([None, 1, 2, 3]) for _ in rows]
    schema = pa.schema([("row", ROW), ("n", pa.int64()), ("t", pa.string())])
    columns = [pa.array(rows, ROW), pa.array(numbers, pa.int64()), pa.array([f"{n}" for n in numbers])]
    for one in (
        aggregate("Max", "row", result=ROW),
        aggregate("Min", "row", result=ROW),
        aggregate("MaxBy", "n", "row", result=pa.int64()),
        aggregate("CountDistinct", "row", result=pa.int64()),
        aggregate("Sum", "n", result=pa.int64(), settings={"distinct": True}),
        aggregate("ListAgg", "t", result=pa.string(), settings={"separator": "-", "order": "descending"}),
        aggregate("ListAgg", "t", result=pa.string(), settings={"separator": ",", "distinct": True}),
    ):
        accumulator = accumulator_for(one, schema)
        nothing = Rows(np.empty(0, np.uint32), [pa.nulls(0, field.type) for field in accumulator.stored])
        given = [columns[schema.get_field_index(name)] for name in one.columns]
        whole = accumulator.combined(4, nothing, Rows(groups, given))
        half = [column.slice(0, 50) for column in given]
        stored = accumulator.combined(4, nothing, Rows(groups[:50], half))
        rest = [column.slice(50) for column in given]
        in_parts = accumulator.combined(4, Rows(np.arange(4, dtype=np.uint32), stored), Rows(groups[50:], rest))
        assert str(accumulator.result(in_parts).to_pylist()) == str(accumulator.result(whole).to_pylist()), one


def test_group_of_which_no_row_counts_yet_has_the_result_of_no_values() -> None:
    price = pa.decimal128(10, 2)
    schema = pa.schema([("price", price), ("text", pa.string()), ("row", ROW)])
    none = Rows(np.empty(0, np.uint32), [])
    for one in (
        aggregate("Sum", "price", result=pa.decimal128(20, 2)),
        aggregate("Average", "price", result=pa.decimal128(14, 6)),
        aggregate("Average", "price", result=pa.decimal128(14, 6), settings={"distinct": True}),
        aggregate("Max", "text", result=pa.string()),
        aggregate("Min", "row", result=ROW),
        aggregate("MaxBy", "price", "row", result=price),
        aggregate("ListAgg", "text", result=pa.string(), settings={"separator": "-"}),
    ):
        accumulator = accumulator_for(one, schema)
        old = Rows(none.groups, [pa.nulls(0, field.type) for field in accumulator.stored])
        new = Rows(none.groups, [pa.nulls(0, schema.field(name).type) for name in one.columns])
        assert accumulator.result(accumulator.combined(2, old, new)).to_pylist() == [None, None], one


@pytest.mark.parametrize(
    ("function", "settings", "wanted"),
    [
        ("PercentileDisc", {"percentages": [0.0, 0.25, 0.5, 1.0]}, [[1.0, 1.0, 3.0, 9.0], [2.0, 2.0, 2.0, 2.0], None]),
        ("PercentileDisc", {"percentages": 0.26, "descending": True}, [4.0, 2.0, None]),
        ("Percentile", {"percentages": 0.25, "descending": True}, [5.25, 2.0, None]),
        ("Mode", {}, [9, 2, None]),
        ("Mode", {"least": True}, [1, 2, None]),
        ("Mode", {"least": False}, [9, 2, None]),
    ],
)
def test_percentiles_and_modes_take_the_values_that_the_order_says(
    function: str, settings: dict[str, Any], wanted: list[Any]
) -> None:
    kind = pa.int64() if function == "Mode" else pa.float64()
    result = pa.list_(kind) if isinstance(settings.get("percentages"), list) else kind
    values = {"Mode": [9, 1, 9, None, 1, 4, 2, None]}.get(function, [9, None, 1, 4, 3, None, 2, None])
    groups = np.array([0, 0, 0, 0, 0, 0, 1, 2], dtype=np.uint32)
    accumulator = accumulator_for(
        aggregate(function, "n", result=result, settings=settings), pa.schema([("n", pa.int64())])
    )
    nothing = Rows(np.empty(0, np.uint32), [pa.nulls(0, field.type) for field in accumulator.stored])
    stored = accumulator.combined(3, nothing, Rows(groups, [pa.array(values, pa.int64())]))
    assert accumulator.result(stored).to_pylist() == wanted


def of_one_group(one: GroupAggregate, values: list[Any], kind: pa.DataType) -> Any:
    """The result over the values, the first two of which are stored first."""
    accumulator = accumulator_for(one, pa.schema([("row", kind)]))
    rows = pa.array(values, kind)
    nothing = Rows(np.empty(0, np.uint32), [pa.nulls(0, field.type) for field in accumulator.stored])
    stored = accumulator.combined(1, nothing, Rows(np.zeros(2, np.uint32), [rows.slice(0, 2)]))
    old, new = Rows(np.zeros(1, np.uint32), stored), Rows(np.zeros(len(rows) - 2, np.uint32), [rows.slice(2)])
    [result] = accumulator.result(accumulator.combined(1, old, new)).to_pylist()
    return result


LISTED = pa.struct([("t", pa.string()), ("a", pa.float64()), ("b", pa.int32())])
"""A text, and two columns that order it."""


@pytest.mark.parametrize(
    ("orders", "wanted"),
    [
        ([["ascending", "nullsfirst"], ["ascending", "nullsfirst"]], "xdacb"),
        ([["ascending", "nullslast"], ["descending", "nullslast"]], "dcabx"),
        ([["descending", "nullslast"], ["ascending", "nullslast"]], "bacdx"),
        ([["descending", "nullsfirst"], ["descending", "nullsfirst"]], "xbcad"),
    ],
)
def test_texts_are_listed_in_the_order_of_other_columns(orders: list[list[str]], wanted: str) -> None:
    values = [("a", 1.0, 1), ("x", None, 1), ("b", math.nan, None), None, ("c", 1.0, 2), ("d", -math.inf, 7)]
    rows = [None if value is None else dict(zip("tab", value, strict=True)) for value in values]
    one = aggregate("ListAgg", "row", result=pa.string(), settings={"separator": "", "orders": orders})
    assert of_one_group(one, rows, LISTED) == wanted


def test_percentiles_with_frequencies_are_those_of_repeated_values() -> None:
    choice, kind = Random(5), pa.struct([("v", pa.int32()), ("n", pa.int64())])
    settings = {"percentages": [0.0, 0.1, 0.3, 0.5, 0.99, 1.0]}
    weighted = aggregate("Percentile", "row", result=pa.list_(pa.float64()), settings={**settings, "weighted": True})
    plain = aggregate("Percentile", "row", result=pa.list_(pa.float64()), settings=settings)
    for most in (0, 1, 5):
        rows = [{"v": choice.randrange(9), "n": choice.randrange(most + 1)} for _ in range(12)]
        repeated = [None, None, *(row["v"] for row in rows for _ in range(row["n"]))]
        assert of_one_group(weighted, [*rows, None], kind) == of_one_group(plain, repeated, pa.int32())
    assert of_one_group(weighted, [{"v": 7, "n": 1 << 40}, {"v": 1, "n": 1}, None], kind) == [1.0, *[7.0] * 5]
    with pytest.raises(AggregateFailedError, match="frequency -1 is negative"):
        of_one_group(weighted, [{"v": 7, "n": -1}, None, None], kind)
