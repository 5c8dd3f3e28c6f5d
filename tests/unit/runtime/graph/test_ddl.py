"""DDL schemas: the same Arrow types as PySpark gives, and errors that show the text."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import types as t
from pyspark.sql.pandas.types import to_arrow_schema as pyspark_arrow_schema

from ckpt_runtime.graph.ddl import parse_ddl, to_arrow_schema
from ckpt_runtime.graph.errors import PlanError

SAME = [
    ("a INT", t.StructType().add("a", "integer")),
    ("a BIGINT NOT NULL, b STRING", t.StructType().add("a", "long", False).add("b", "string")),
    ("a: smallint, b: tinyint", t.StructType().add("a", "short").add("b", "byte")),
    (
        "t TIMESTAMP, n TIMESTAMP_NTZ, d DATE",
        t.StructType().add("t", "timestamp").add("n", "timestamp_ntz").add("d", "date"),
    ),
    ("x DOUBLE, f FLOAT, r REAL, ok BOOLEAN", None),
    ("m DECIMAL(10,2), n DECIMAL", t.StructType().add("m", t.DecimalType(10, 2)).add("n", t.DecimalType(10, 0))),
    ("b BINARY COMMENT 'it''s'", None),
    ("l ARRAY<ARRAY<INT>>", t.StructType().add("l", t.ArrayType(t.ArrayType(t.IntegerType())))),
    ("m MAP<STRING, BIGINT>", t.StructType().add("m", t.MapType(t.StringType(), t.LongType()))),
    (
        "s STRUCT<x: INT NOT NULL, `y z`: ARRAY<STRING>>",
        t.StructType().add("s", t.StructType().add("x", "integer", False).add("y z", t.ArrayType(t.StringType()))),
    ),
    ("struct<a: int, b: string>", t.StructType().add("a", "integer").add("b", "string")),
    (
        "v VARCHAR(20), c CHAR(3), d CHARACTER(4)",
        t.StructType().add("v", "string").add("c", "string").add("d", "string"),
    ),
    (
        "`a b` bigint NOT NULL COMMENT 'it\\'s', `x``y` long, c int COMMENT \"d\" NOT NULL",
        t.StructType().add("a b", "long", False).add("x`y", "long").add("c", "integer", False),
    ),
    (
        "a array<map<string,struct<x:int,y:decimal(10,2) NOT NULL>>>",
        t.StructType().add(
            "a",
            t.ArrayType(
                t.MapType(
                    t.StringType(),
                    t.StructType().add("x", t.IntegerType()).add("y", t.DecimalType(10, 2), nullable=False),
                )
            ),
        ),
    ),
    ("struct<a:double,b:struct<>>", t.StructType().add("a", "double").add("b", t.StructType())),
    ("a dec(5), c numeric(7, 3)", t.StructType().add("a", t.DecimalType(5, 0)).add("c", t.DecimalType(7, 3))),
    (
        "i interval day to second, j INTERVAL HOUR, array array<int>",
        t.StructType()
        .add("i", t.DayTimeIntervalType(0, 3))
        .add("j", t.DayTimeIntervalType(1, 1))
        .add("array", t.ArrayType(t.IntegerType())),
    ),
]


@pytest.mark.parametrize(("ddl", "struct"), SAME)
def test_types_are_those_of_pyspark(ddl: str, struct: t.StructType | None) -> None:
    schema = parse_ddl(ddl.replace("it''s", "its"))
    if struct is not None:
        assert schema.equals(pyspark_arrow_schema(struct, timezone="UTC"))
        assert to_arrow_schema(struct).equals(schema)


@pytest.mark.parametrize(
    ("ddl", "text"),
    [
        ("", "an empty DDL schema"),
        ("  ", "an empty DDL schema"),
        ("a", "a type expected at the end"),
        ("int", "a type expected at the end"),
        ("a INTT", "unknown type 'intt'"),
        ("a INT,", "a field name expected at the end"),
        ("a INT b INT", "the end expected at 6, not 'b',"),
        ("a INT)", "the end expected at 5"),
        ("(a INT)", "a field name expected at 0"),
        ("a ARRAY<INT", "'>' expected at the end"),
        ("a MAP<INT>", "',' expected at 9"),
        ("a DECIMAL(40,2)", r"decimal\(40,2\) is outside"),
        ("a DECIMAL(3,4)", r"decimal\(3,4\) is outside"),
        ("a DECIMAL(x)", "'x' is not a number"),
        ("a DECIMAL(1,1,1)", r"'\)' expected at 13"),
        ("a VARCHAR", r"'\(' expected at the end"),
        ("a INT NOT INT", "'null' expected"),
        ("a INT COMMENT b", "a quoted text expected"),
        ("a INT; DROP", "unexpected character at 5"),
        ("a INT, a STRING", "repeated field 'a'"),
        ("a " + "array<" * 200 + "int" + ">" * 200, "nested deeper"),
        ("a INTERVAL YEAR TO MONTH", "only day to second"),
    ],
)
def test_schema_text_that_cannot_be_parsed_is_named(ddl: str, text: str) -> None:
    with pytest.raises(PlanError, match=f"outputStructType: .*{text}.*") as caught:
        parse_ddl(ddl, "outputStructType")
    assert "DDL schema" in str(caught.value)


def test_backquoted_names_may_hold_anything() -> None:
    assert parse_ddl("`a ``b``, c` INT").names == ["a `b`, c"]


def test_other_schemas_are_taken_as_they_are_or_refused() -> None:
    schema = pa.schema([("a", pa.uint8())])
    assert to_arrow_schema(schema) is schema
    with pytest.raises(
        PlanError, match="schema: expected an Arrow schema, a DDL string or a PySpark StructType, not dict"
    ):
        to_arrow_schema({"a": "int"})
