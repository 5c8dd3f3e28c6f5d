"""Checks on values written to states: conversions, refusals, and that nothing changes in a snapshot."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql import Row

from ckpt_runtime.state.errors import StateSchemaError, StateValueError, StateValueTypeError
from ckpt_runtime.state.values import (
    check_readable,
    check_supported,
    from_arrow,
    java_text,
    row_coercer,
    state_from_arrow,
    to_arrow,
    user_key_maker,
    value_coercer,
)

STRUCT = pa.struct([("x", pa.int32()), ("y", pa.string())])
PLUS_TWO = dt.timezone(dt.timedelta(hours=2))


@dataclass
class Named:
    """An object of user code."""

    x: int
    y: str


@pytest.mark.parametrize(
    ("kind", "value", "stored"),
    [
        (pa.int32(), np.int64(5), 5),
        (pa.float64(), 3, 3.0),
        (pa.float32(), 0.1, float(np.float32(0.1))),
        (pa.float32(), np.float64(0.25), 0.25),
        (pa.bool_(), np.bool_(True), True),
        (pa.binary(), bytearray(b"ab"), b"ab"),
        (pa.string(), "héllo", "héllo"),
        (pa.decimal128(6, 2), Decimal("1.005"), Decimal("1.01")),
        (pa.decimal128(6, 2), 7, Decimal("7.00")),
        (pa.timestamp("us", "UTC"), dt.datetime(2024, 1, 1, 2), dt.datetime(2024, 1, 1, 2)),
        (pa.timestamp("us", "UTC"), dt.datetime(2024, 1, 1, 2, tzinfo=PLUS_TWO), dt.datetime(2024, 1, 1)),
        (pa.timestamp("us"), dt.datetime(2024, 1, 1, 2, tzinfo=PLUS_TWO), dt.datetime(2024, 1, 1, 2)),
        (pa.list_(pa.timestamp("us", "UTC")), [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)], [dt.datetime(2024, 1, 1)]),
        (pa.date32(), dt.datetime(2024, 1, 1, 5), dt.date(2024, 1, 1)),
        (pa.binary(), "é", "é".encode()),
        (pa.string(), 5, "5"),
        (pa.string(), True, "true"),
        (pa.string(), np.float64(1e10), "1.0E10"),
        (pa.string(), Decimal("1.50"), "1.50"),
        (pa.list_(pa.int64()), np.array([1, 2]), [1, 2]),
        (pa.map_(pa.string(), pa.int64()), {"a": None}, {"a": None}),
        (STRUCT, (1, "a"), Row(x=1, y="a")),
        (STRUCT, {"y": "a", "x": 1}, Row(x=1, y="a")),
        (STRUCT, {"x": 1, "z": 2}, Row(x=1, y=None)),
        (STRUCT, Row(x=1, y=None), Row(x=1, y=None)),
        (STRUCT, Row(a=1, b="a"), Row(x=1, y="a")),
        (STRUCT, Named(1, "a"), Row(x=1, y="a")),
        (pa.int64(), None, None),
    ],
)
def test_accepted_values_are_stored_as_a_snapshot_gives_them_back(kind: pa.DataType, value: Any, stored: Any) -> None:
    coerced = value_coercer("s", "f", kind)(value)
    assert coerced == stored
    assert type(coerced) is type(stored)
    assert state_from_arrow(to_arrow([coerced], kind)) == [stored]


@pytest.mark.parametrize(
    ("kind", "value", "error"),
    [
        (pa.int8(), 128, StateValueError),
        (pa.uint8(), -1, StateValueError),
        (pa.int64(), "1", StateValueTypeError),
        (pa.float64(), True, StateValueTypeError),
        (pa.float64(), 10**400, StateValueError),
        (pa.string(), b"a", StateValueTypeError),
        (pa.string(), "\ud800", StateValueError),
        (pa.bool_(), 1, StateValueTypeError),
        (pa.date32(), "2024-01-01", StateValueTypeError),
        (pa.string(), [1], StateValueTypeError),
        (pa.timestamp("us"), dt.date(2024, 1, 1), StateValueTypeError),
        (pa.timestamp("us"), pd.NaT, StateValueTypeError),
        (pa.date32(), pd.NaT, StateValueTypeError),
        (pa.decimal128(3, 1), Decimal("1000"), StateValueError),
        (pa.decimal128(3, 1), Decimal("NaN"), StateValueError),
        (pa.decimal128(3, 1), 1.5, StateValueTypeError),
        (pa.list_(pa.int64()), {1}, StateValueTypeError),
        (pa.list_(pa.int64()), ["a"], StateValueTypeError),
        (pa.map_(pa.string(), pa.int64()), {None: 1}, StateValueError),
        (STRUCT, (1,), StateValueError),
        (STRUCT, 5, StateValueTypeError),
        (STRUCT, "ab", StateValueTypeError),
        (STRUCT, Row(y="a", x=1), StateValueError),
    ],
)
def test_refused_values_name_state_and_field(kind: pa.DataType, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"state 'counts', field 'f"):
        value_coercer("counts", "f", kind)(value)


def test_null_needs_a_nullable_field() -> None:
    with pytest.raises(StateValueError, match="null in a field that is not nullable"):
        value_coercer("s", "f", pa.string(), nullable=False)(None)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_whole_values_may_be_tuples_lists_rows_and_dicts(width: int) -> None:
    names = ["a", "b", "c"][:width]
    coerce = row_coercer("s", pa.schema([(name, pa.int64()) for name in names]))
    expected = tuple(range(width))
    named = dict(zip(names, expected, strict=True))
    others = Row(**{f"other_{name}": number for name, number in named.items()})
    for value in (expected, list(expected), Row(**named), named, others, range(width)):
        assert coerce(value) == expected
        assert type(coerce(value)) is tuple
    with pytest.raises(StateValueError):
        coerce((*expected, 9))
    with pytest.raises(StateValueTypeError):
        coerce("abc"[:width])


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.1, "0.1"), (100.0, "100.0"), (-0.0, "-0.0"), (0.001, "0.001"), (1e-5, "1.0E-5"), (9999999.5, "9999999.5"),
        (1e7, "1.0E7"), (123456789.123, "1.23456789123E8"), (-2.5e300, "-2.5E300"), (float("nan"), "NaN"),
        (float("-inf"), "-Infinity"), (2**70, "1180591620717411303424"), (False, "false"),
    ],
)  # fmt: skip
def test_numbers_become_text_as_the_jvm_writes_them(value: Any, text: str) -> None:
    assert java_text(value) == text


def test_nested_keys_of_maps_are_found_again() -> None:
    schema = pa.schema([("s", pa.struct([("x", pa.list_(pa.float64()))])), ("z", pa.int64())])
    make, coerce = user_key_maker(schema), row_coercer("s", schema)
    entries = {make(coerce((Row(x=[1.0, float("nan")]), 1))): "a"}
    assert entries[make(coerce(({"x": [1.0, float("nan")]}, 1)))] == "a"
    assert make(coerce((None, None))) not in entries


def test_input_rows_hold_what_spark_puts_into_them() -> None:
    mapping = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64()))
    at = pa.array([dt.datetime(2024, 1, 1)], pa.timestamp("us", "UTC"))
    assert from_arrow(mapping) == [[("a", 1)]]
    assert from_arrow(pa.array([{"x": 1, "y": "a"}], STRUCT)) == [{"x": 1, "y": "a"}]
    assert from_arrow(at) == [dt.datetime(2024, 1, 1, tzinfo=dt.UTC)]
    assert to_arrow(from_arrow(mapping), mapping.type) == mapping


def test_nested_rows_of_results_go_by_name() -> None:
    rows = to_arrow([Row(y="a", x=1), Row(x=2), (3, "c"), {"y": "d"}], STRUCT)
    assert rows.to_pylist() == [{"x": 1, "y": "a"}, {"x": 2, "y": None}, {"x": 3, "y": "c"}, {"x": None, "y": "d"}]


def test_types_that_states_cannot_hold() -> None:
    with pytest.raises(StateSchemaError, match="here, field 't': type timestamp.ns. is not supported; cast"):
        check_supported(pa.schema([("t", pa.list_(pa.timestamp("ns")))]), "here")
    with pytest.raises(StateSchemaError, match="type time32"):
        check_supported(pa.schema([("t", pa.time32("s"))]), "here")
    check_readable(pa.schema([("t", pa.time32("s"))]), "here")
