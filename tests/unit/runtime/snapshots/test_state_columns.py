"""A state's stored rows as the columns of a DataFrame: every type, in batches of a bounded size."""

from __future__ import annotations

import datetime
import re
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DecimalType, StringType, TimestampNTZType, TimestampType

from ckpt_runtime.graph.ddl import parse_ddl
from pyspark_ckpt.columns import BATCH_ROWS, StateColumns, TableError, UnsupportedColumnError, new_stored_schema

VALUES: list[tuple[pa.DataType, Any]] = [
    (pa.uint8(), 255),
    (pa.uint32(), 2**32 - 1),
    (pa.uint64(), Decimal(2**64 - 1)),
    (pa.float16(), 1.5),
    (pa.date64(), datetime.date(2024, 2, 29)),
    (pa.time32("ms"), datetime.time(1, 2, 3)),
    (pa.string_view(), "text"),
    (pa.large_string(), "text"),
    (pa.binary(3), b"abc"),
    (pa.duration("ms"), datetime.timedelta(days=-1)),
    (pa.decimal128(10, 2), Decimal("1.50")),
    (pa.dictionary(pa.int32(), pa.string()), "text"),
    (pa.list_(pa.uint16()), [1, None]),
    (pa.map_(pa.string(), pa.list_(pa.int8())), [("a", [1])]),
    (pa.struct([("a", pa.struct([("b", pa.float32())]))]), {"a": {"b": 0.5}}),
    (pa.timestamp("ms"), datetime.datetime(2024, 1, 1)),
    (pa.timestamp("us", "Europe/Berlin"), datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)),
]


@pytest.mark.row("203.9")
@pytest.mark.parametrize(("kind", "value"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_every_type_keeps_its_values(kind: pa.DataType, value: Any) -> None:
    stored = pa.schema([("key.id", pa.int64()), ("value.v", kind)])
    given = int(value) if kind == pa.uint64() else value
    batch = pa.record_batch([pa.array([1, 2]), pa.array([given, None], kind)], schema=stored)
    (table,) = StateColumns("value", stored).tables([(7, batch)])
    table.validate(full=True)
    assert table.column("key_group").to_pylist() == [7, 7]
    assert [row["id"] for row in table.column("key").to_pylist()] == [1, 2]
    assert [row["v"] for row in table.column("value").to_pylist()] == [value, None]


def test_types_are_sparks() -> None:
    stored = pa.schema(
        [
            ("key.id", pa.string_view()),
            ("value.local", pa.timestamp("s")),
            ("value.at", pa.timestamp("s", "UTC")),
            ("value.big", pa.uint64()),
            ("expires_at", pa.int64()),
        ]
    )
    schema = StateColumns("value", stored).spark_schema
    assert schema.names == ["key_group", "key", "value", "expires_at"]
    assert schema["key"].dataType["id"].dataType == StringType()
    kinds = [field.dataType for field in schema["value"].dataType]
    assert kinds == [TimestampNTZType(), TimestampType(), DecimalType(20, 0)]


def test_the_columns_of_each_kind() -> None:
    def names(kind: str, *columns: str) -> list[str]:
        return StateColumns(kind, pa.schema([(name, pa.int64()) for name in columns])).spark_schema.names[1:]

    assert names("map", "key.a", "user_key.b", "value.c", "expires_at") == ["key", "user_key", "value", "expires_at"]
    assert names("timers", "key.a", "time") == ["key", "time"]
    assert names("rows", "key.a", "value.b", "matched") == ["key", "value", "matched"]
    # An aggregate may have any name.
    assert names("aggregate", "key.a", "time", "matched", "value.x", "sum#count") == ["key", "value"]
    stored = pa.schema([("key.a", pa.int64()), ("time", pa.int64())])
    assert StateColumns("aggregate", stored).spark_schema["value"].dataType.names == ["time"]


@pytest.mark.parametrize(
    "kind", [pa.decimal256(60, 0), pa.month_day_nano_interval(), pa.list_(pa.decimal256(50, 0))], ids=str
)
def test_a_type_that_spark_lacks_is_refused_by_name(kind: pa.DataType) -> None:
    with pytest.raises(UnsupportedColumnError, match=r"column 'value\.v': Spark has no type for"):
        StateColumns("value", pa.schema([("key.id", pa.int64()), ("value.v", kind)]))


def test_rows_come_in_batches_of_a_bounded_size_and_in_order() -> None:
    stored = pa.schema([("key.id", pa.int64()), ("value.v", pa.int64())])
    sizes = [1, 5, BATCH_ROWS * 2 + 3, 0, 7, BATCH_ROWS]
    batches = []
    for group, size in enumerate(sizes):
        numbers = pa.array(range(size), pa.int64())
        batches.append((group, pa.record_batch([numbers, numbers], schema=stored)))
    tables = list(StateColumns("value", stored).tables(iter(batches)))
    assert all(0 < table.num_rows <= BATCH_ROWS for table in tables)
    found = [row for table in tables for row in table.to_pylist()]
    assert [(row["key_group"], row["key"]["id"]) for row in found] == [
        (group, number) for group, size in enumerate(sizes) for number in range(size)
    ]


# --- and back


@pytest.mark.row("203.9")
@pytest.mark.parametrize(("kind", "value"), VALUES, ids=[str(kind) for kind, _ in VALUES])
def test_rows_come_back_as_they_were(kind: pa.DataType, value: Any) -> None:
    stored = pa.schema([("key.id", pa.int64()), ("value.v", kind), ("expires_at", pa.int64())])
    given = int(value) if kind == pa.uint64() else value
    batch = pa.record_batch([pa.array([1, 2]), pa.array([given, None], kind), pa.array([5, None])], schema=stored)
    columns = StateColumns("value", stored)
    columns.check_table(columns.spark_schema)
    (table,) = columns.tables([(7, batch)])
    assert columns.stored_rows(table).equals(batch)


VALUE = StateColumns("value", pa.schema([("key.id", pa.int64()), ("value.a", pa.int32()), ("value.b", pa.string())]))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ("key struct<id: bigint>", r"the state has the columns \['key', 'value'\], the table has \['key'\]"),
        ("key struct<id: bigint>, value struct<a: int>", r"column 'value' has the fields \['a', 'b'\] in the state"),
        ("key struct<id: bigint>, value struct<a: int, b: int, c: int>", "in the table"),
        ("key bigint, value struct<a: int, b: int>", r"column 'key' has the fields \['id'\] in the state, None in"),
        ("key struct<id: bigint>, value struct<a: int, b: int>, more int", "'more'"),
        (
            "key struct<id: bigint>, value struct<a: string, b: string>",
            "'value.a' has the type int32 in the state, stri",
        ),
        (
            "key struct<id: timestamp>, value struct<a: int, b: string>",
            "'key.id' has the type int64 in the state, time",
        ),
    ],
)
def test_a_table_with_other_columns_is_refused(columns: str, reason: str) -> None:
    with pytest.raises(TableError, match=reason):
        VALUE.check_table(from_arrow_schema(parse_ddl(columns)))


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        ("bigint", "timestamp"),
        ("timestamp", "bigint"),
        ("date", "timestamp"),
        ("boolean", "int"),
        ("string", "binary"),
        ("struct<x: int, y: int>", "struct<a: int, b: int>"),
        ("struct<x: int, y: int>", "struct<x: int>"),
        ("array<struct<x: date>>", "array<struct<x: int>>"),
        ("map<string, struct<x: int>>", "map<string, struct<x: string>>"),
        ("map<string, int>", "array<int>"),
    ],
)
def test_a_type_that_would_lose_or_change_its_values_is_refused(wanted: str, given: str) -> None:
    """Arrow would read a timestamp as its number, cut the time off, and drop fields of another name."""
    stored = pa.schema([("key.id", pa.int64()), ("value.v", parse_ddl(f"v {wanted}").field("v").type)])
    state = StateColumns("value", stored)
    with pytest.raises(TableError, match=r"column 'value\.v' has the type"):
        state.check_table(from_arrow_schema(parse_ddl(f"key struct<id: bigint>, value struct<v: {given}>")))


def test_times_of_timers_are_numbers() -> None:
    table = from_arrow_schema(parse_ddl("key struct<id: int>, time timestamp"))
    columns = StateColumns("timers", new_stored_schema("timers", table))
    with pytest.raises(TableError, match="column 'time' has the type int64 in the state, timestamp"):
        columns.check_table(table)


def test_fields_go_by_name() -> None:
    table = from_arrow_schema(parse_ddl("value struct<b: string, a: bigint>, key struct<id: int>"))
    VALUE.check_table(table)
    rows = pa.record_batch(
        {"value": pa.array([{"b": "x", "a": 1}]), "key": pa.array([{"id": 3}], pa.struct([("id", pa.int32())]))}
    )
    assert VALUE.stored_rows(rows).to_pylist() == [{"key.id": 3, "value.a": 1, "value.b": "x"}]


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([{"key": None, "value": {"a": 1, "b": ""}}], "column 'key' is null in 1 rows"),
        ([{"key": {"id": 1}, "value": {"a": 2**40, "b": ""}}], "column 'value.a' does not fit the state's type int32"),
    ],
)
def test_values_that_do_not_fit_are_refused(rows: list[dict[str, Any]], reason: str) -> None:
    table = pa.RecordBatch.from_pylist(
        rows,
        schema=pa.schema(
            [("key", pa.struct([("id", pa.int64())])), ("value", pa.struct([("a", pa.int64()), ("b", pa.string())]))]
        ),
    )
    with pytest.raises(TableError, match=reason):
        VALUE.stored_rows(table)


def test_null_where_the_state_has_not_null_is_refused() -> None:
    columns = StateColumns("timers", pa.schema([("key.id", pa.int64()), pa.field("time", pa.int64(), nullable=False)]))
    rows = pa.record_batch({"key": pa.array([{"id": 1}]), "time": pa.array([None], pa.int64())})
    with pytest.raises(TableError, match="column 'time' is null"):
        columns.stored_rows(rows)


_ITEM = pa.field("item", pa.int64(), nullable=False)
_STRUCT = pa.struct([pa.field("x", pa.int64(), nullable=False), ("y", pa.int64())])
_GIVEN_STRUCT = pa.struct([("y", pa.int64()), ("x", pa.int64())])


@pytest.mark.parametrize(
    ("stored", "given", "good", "bad", "path"),
    [
        (pa.list_(_ITEM), pa.list_(pa.int64()), [1], [1, None], "value.v[]"),
        (pa.large_list(_ITEM), pa.list_(pa.int32()), [1], [None], "value.v[]"),
        (pa.list_(pa.list_(_ITEM)), pa.list_(pa.list_(pa.int64())), [[1], None], [[], [None]], "value.v[][]"),
        (
            pa.map_(pa.string(), _ITEM),
            pa.map_(pa.string(), pa.int64()),
            [("a", 1), ("b", 2)],
            [("a", 1), ("b", None)],
            "value.v{value}",
        ),
        (_STRUCT, _GIVEN_STRUCT, {"y": None, "x": 1}, {"y": 1, "x": None}, "value.v.x"),
        (pa.list_(_STRUCT), pa.list_(_GIVEN_STRUCT), [{"y": None, "x": 1}, None], [{"y": 1, "x": None}], "value.v[].x"),
        (
            pa.struct([pa.field("s", _STRUCT, nullable=False)]),
            pa.struct([("s", _GIVEN_STRUCT)]),
            {"s": {"y": None, "x": 1}},
            {"s": None},
            "value.v.s",
        ),
        (pa.list_(_ITEM), pa.list_(pa.null()), [], [None], "value.v[]"),
    ],
    ids=str,
)
def test_null_inside_of_a_value_is_refused_where_the_state_has_not_null(
    stored: pa.DataType, given: pa.DataType, good: Any, bad: Any, path: str
) -> None:
    """Whatever the table's schema says. Below a null there is no value."""
    columns = StateColumns("value", pa.schema([("key.id", pa.int64()), ("value.v", stored)]))
    schema = pa.schema([("key", pa.struct([("id", pa.int64())])), ("value", pa.struct([("v", given)]))])

    def table(*values: Any) -> pa.RecordBatch:
        rows = [{"key": {"id": number}, "value": {"v": value}} for number, value in enumerate(values)]
        return pa.RecordBatch.from_pylist(rows, schema=schema)

    kept = columns.stored_rows(table(good, None, good)).column("value.v")
    assert kept.equals(pa.array([good, None, good], stored))
    for rows in (table(good, None, bad), table(bad, good, bad).slice(1)):
        with pytest.raises(TableError, match=rf"column '{re.escape(path)}' is null in 1 place,.* NOT NULL"):
            columns.stored_rows(rows)


@pytest.mark.parametrize(
    ("kind", "columns", "stored"),
    [
        ("value", "key struct<id: bigint>, value struct<v: string>", ["key.id", "value.v"]),
        ("list", "key_group int, key struct<a: int, b: date>, value struct<v: int>", ["key.a", "key.b", "value.v"]),
        (
            "map",
            "key struct<id: bigint>, user_key struct<name: string>, value struct<v: int>, expires_at bigint",
            ["key.id", "user_key.name", "value.v", "expires_at"],
        ),
        ("timers", "key struct<id: bigint>, time bigint", ["key.id", "time"]),
    ],
)
def test_a_new_state_takes_its_schema_from_the_table(kind: str, columns: str, stored: list[str]) -> None:
    table = from_arrow_schema(parse_ddl(columns))
    schema = new_stored_schema(kind, table)
    assert schema.names == stored
    StateColumns(kind, schema).check_table(table)


@pytest.mark.parametrize(
    ("kind", "columns"),
    [
        ("value", "key struct<id: bigint>"),
        ("value", "key struct<id: bigint>, value bigint"),
        ("value", "key struct<id: bigint>, value struct<v: int>, other int"),
        ("timers", "key struct<id: bigint>, time bigint, expires_at bigint"),
    ],
)
def test_a_table_that_makes_no_state_is_refused(kind: str, columns: str) -> None:
    with pytest.raises(TableError):
        new_stored_schema(kind, from_arrow_schema(parse_ddl(columns)))
