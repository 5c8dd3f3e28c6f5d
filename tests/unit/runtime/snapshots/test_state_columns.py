"""A state's stored rows as the columns of a DataFrame: every type, in batches of a bounded size."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DecimalType, StringType, TimestampNTZType, TimestampType

from pyspark_ckpt.columns import BATCH_ROWS, StateColumns, UnsupportedColumnError

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
