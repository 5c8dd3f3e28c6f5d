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
    ("v VARCHAR(20), c CHAR(3)", t.StructType().add("v", "string").add("c", "string")),
]


@pytest.mark.parametrize(("ddl", "struct"), SAME)
def test_types_are_those_of_pyspark(ddl: str, struct: t.StructType | None) -> None:
    schema = parse_ddl(ddl.replace("it''s", "its"))
    if struct is not None:
        assert schema.equals(pyspark_arrow_schema(struct, timezone="UTC"))
        assert to_arrow_schema(struct).equals(schema)


@pytest.mark.parametrize(
    "ddl",
    ["", "  ", "a", "a INTT", "a INT b INT", "a INT,", "a ARRAY<INT", "a MAP<INT>", "a DECIMAL(40,2)", "a DECIMAL(3,4)",
     "a INT; DROP", "a INT, a STRING", "(a INT)", "a INT)"],
)  # fmt: skip
def test_what_cannot_be_read_is_named(ddl: str) -> None:
    with pytest.raises(PlanError, match="outputStructType: .*DDL schema"):
        parse_ddl(ddl, "outputStructType")


def test_backquoted_names_may_hold_anything() -> None:
    assert parse_ddl("`a ``b``, c` INT").names == ["a `b`, c"]


def test_an_arrow_schema_is_taken_as_it_is() -> None:
    schema = pa.schema([("a", pa.uint8())])
    assert to_arrow_schema(schema) is schema


def test_other_objects_are_refused() -> None:
    with pytest.raises(
        PlanError, match="schema: expected an Arrow schema, a DDL string or a PySpark StructType, not dict"
    ):
        to_arrow_schema({"a": "int"})
