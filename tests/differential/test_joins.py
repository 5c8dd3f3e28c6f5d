"""Joins: columns and rows are those of Spark's join of the same rows with the same condition."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from ckpt_runtime.graph.output_schemas import JOIN_TYPES
from ckpt_runtime.graph.specs import JoinSide, JoinSpec
from ckpt_runtime.operators.operator import MAX_WATERMARK
from tests.support.joins import LEFT, RIGHT, Subtask

pytestmark = pytest.mark.spark

START = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
TIME = pa.timestamp("us", "UTC")
KEYS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.float64(), [0.0, -0.0, float("nan"), 1.5, None]),
    (pa.decimal128(5, 2), [Decimal("1.00"), Decimal("-0.01"), None]),
]
BOUNDS_MS = (-3000, 5000)


def side(choice: Random, letter: str, kind: pa.DataType, keys: list[Any]) -> pa.Table:
    """Rows twice, times null, keys null; the second key is not null on the left."""
    second = ["x", "y"] if letter == "l" else ["x", "y", None]
    rows = [
        {
            letter: choice.choice([None, 1, 2]),
            "m": choice.choice(second),
            "k": choice.choice(keys),
            f"{letter}t": choice.choice([None, *(START + dt.timedelta(seconds=second) for second in range(12))]),
        }
        for _ in range(25)
    ]
    fields = [(letter, pa.int32()), pa.field("m", pa.string(), letter == "r"), ("k", kind), (f"{letter}t", TIME)]
    return pa.Table.from_pylist([*rows, *rows[:5]], schema=pa.schema(fields))


def in_spark(spark: SparkSession, left: pa.Table, right: pa.Table, keys: list[str], how: str) -> DataFrame:
    """The join on the keys and on the times, which Spark's join by names cannot take; columns as that one has them.

    As in Spark's joins of streams, a row of an outer side without a time never comes out, and a full join pairs nulls.
    """
    one, other = (spark.createDataFrame(table) for table in (left, right))
    one, other = one.where("lt is not null"), other.where("rt is not null")
    paired = one.alias("l").join(
        other.alias("r"),
        on=[one[key].eqNullSafe(other[key]) if how == "full_outer" else one[key] == other[key] for key in keys]
        + [other.rt >= one.lt - dt.timedelta(seconds=3), other.rt <= one.lt + dt.timedelta(seconds=5)],
        how=how,
    )
    return paired.selectExpr(*_columns(one.join(other, keys, how).columns, keys, how))


def _columns(names: list[str], keys: list[str], how: str) -> list[str]:
    def of(name: str) -> str:
        if how == "left_semi":
            return f"l.{name}"
        if name in keys:
            return {"right_outer": f"r.{name}", "full_outer": f"coalesce(l.{name}, r.{name}) as {name}"}.get(
                how, f"l.{name}"
            )
        return name

    return [of(name) for name in names]


def in_the_engine(left: pa.Table, right: pa.Table, keys: list[str], how: str) -> tuple[list[str], list[Any]]:
    """The rows after all input, each side in two batches in turn."""
    sides = [JoinSide(table.schema, tuple(keys), time) for table, time in ((left, "lt"), (right, "rt"))]
    join = Subtask(JoinSpec(how, sides[0], sides[1], BOUNDS_MS))
    for start in (0, 15):
        for number, table in ((LEFT, left), (RIGHT, right)):
            for batch in table.slice(start, 15).to_batches():
                join.operator.process_batch(batch, number)
    join.operator.process_watermark(MAX_WATERMARK)
    return join.operator._result.schema.names, [tuple(row.values()) for row in join.take() if row != MAX_WATERMARK]


def counted(rows: list[Any]) -> Counter[str]:
    """Times without a zone; zero without a sign: both zeros are one key, and either may come out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dt.datetime):
            return value.replace(tzinfo=None)
        return value + 0.0 if isinstance(value, float) else value

    return Counter(repr([plain(value) for value in row]) for row in rows)


@pytest.mark.parametrize("how", JOIN_TYPES)
def test_columns_and_rows(spark: SparkSession, how: str) -> None:
    """NaN is NaN, and 0.0 is -0.0."""
    for seed, (kind, values) in enumerate(KEYS):
        choice = Random(seed)
        left, right = side(choice, "l", kind, values), side(choice, "r", kind, values)
        keys = ["k"] if seed % 2 else ["k", "m"]
        if seed % 2:
            right = right.rename_columns(["r", "n", "k", "rt"])
        theirs = in_spark(spark, left, right, keys, how)
        columns, ours = in_the_engine(left, right, keys, how)
        assert columns == theirs.columns, f"{how} on {keys}"
        assert counted(ours) == counted(theirs.collect()), f"{how} on {keys} of {kind}"
