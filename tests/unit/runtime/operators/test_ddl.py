"""DDL strings against PySpark's own types."""

from __future__ import annotations

import pytest
from pyspark.sql import types as t

from ckpt_runtime.operators.ddl import DdlError, parse_schema

CASES = {
    "a int": t.StructType().add("a", t.IntegerType()),
    "a INT, b: string": t.StructType().add("a", t.IntegerType()).add("b", t.StringType()),
    "`a b` bigint NOT NULL COMMENT 'it\\'s', `x``y` long": t.StructType(
        [t.StructField("a b", t.LongType(), False, {"comment": "it's"}), t.StructField("x`y", t.LongType())]
    ),
    "a array<map<string,struct<x:int,y:decimal(10,2) NOT NULL>>>": t.StructType().add(
        "a",
        t.ArrayType(
            t.MapType(
                t.StringType(),
                t.StructType([t.StructField("x", t.IntegerType()), t.StructField("y", t.DecimalType(10, 2), False)]),
            )
        ),
    ),
    "struct<a:double,b:struct<>>": t.StructType().add("a", t.DoubleType()).add("b", t.StructType()),
    "a decimal, b dec(5), c numeric(7, 3)": t.StructType()
    .add("a", t.DecimalType(10, 0)).add("b", t.DecimalType(5, 0)).add("c", t.DecimalType(7, 3)),
    "a timestamp, b timestamp_ntz, c date, d boolean, e binary, f float, g tinyint, h smallint": t.StructType()
    .add("a", t.TimestampType()).add("b", t.TimestampNTZType()).add("c", t.DateType()).add("d", t.BooleanType())
    .add("e", t.BinaryType()).add("f", t.FloatType()).add("g", t.ByteType()).add("h", t.ShortType()),
    "a interval day to second, b char(3), c varchar(9), array array<int>": t.StructType()
    .add("a", t.DayTimeIntervalType(0, 3)).add("b", t.CharType(3)).add("c", t.VarcharType(9))
    .add("array", t.ArrayType(t.IntegerType())),
}  # fmt: skip


@pytest.mark.parametrize("ddl", CASES)
def test_strings_give_sparks_types(ddl: str) -> None:
    assert parse_schema(ddl) == CASES[ddl]


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("", "a field name expected at the end"),
        ("int", "a type expected at the end"),
        ("a int,", "a field name expected"),
        ("a int b string", "the end expected at 6, not 'b'"),
        ("a array<int", "'>' expected at the end"),
        ("a frob", "unknown type 'frob'"),
        ("a decimal(40,2)", r"decimal\(40,2\) is not allowed"),
        ("a decimal(x)", "'x' is not a number"),
        ("a varchar", "'\\(' and a length"),
        ("a int not int", "'null' expected"),
        ("a int; drop", "unexpected character at 5"),
        ("a " + "array<" * 200 + "int" + ">" * 200, "nested deeper"),
        ("a interval year to month", "only day to second"),
    ],
)
def test_what_is_not_ddl_is_named(ddl: str, text: str) -> None:
    with pytest.raises(DdlError, match=text):
        parse_schema(ddl)
