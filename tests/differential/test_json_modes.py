"""``from_json`` with the column of bad records and in the mode FAILFAST: Spark beside the engine on the same texts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import ckpt_runtime.expressions.functions  # noqa: F401 registers the functions
from ckpt_runtime.expressions.evaluation import Frame, compile_expression, evaluate
from ckpt_runtime.expressions.nodes import Call, Column
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError
from ckpt_runtime.graph.ddl import to_arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMA = (
    "n INT, name STRING, real DOUBLE, price DECIMAL(6,2), day DATE, flag BOOLEAN, tags ARRAY<INT>, "
    "inner STRUCT<a: INT, b: STRUCT<c: BIGINT>>, many ARRAY<STRUCT<a: INT>>, by MAP<STRING, INT>, bad STRING"
)
VALUES: dict[str, list[str]] = {
    "n": ["1", "-5", "null", '"x"', "1.5", "99999999999", "true", "{}", "[1]"],
    "name": ['"a"', '"é\\n"', "7", "null", '{"x": 1}', "true"],
    "real": ["1.5", "1e3", "NaN", '"Infinity"', '"x"', "[]", "3"],
    "price": ["1", "1.005", "99999", '"1,000.5"', '"x"', "12345.678"],
    "day": ['"2026-01-31"', '"2026-02-30"', '"soon"', "5"],
    "flag": ["true", "false", '"true"', "0"],
    "tags": ["[1, 2]", "[]", "[null]", '["x"]', "[1.5]", "3"],
    "inner": ['{"a": 1, "b": {"c": 2}}', '{"a": "x"}', '{"a": 1, "b": {"c": "x"}}', '{"b": 5}', "null", "[]", "1"],
    "many": ['[{"a": 1}, {"a": 2}]', '[{"a": "x"}, {"a": 3}]', "[null]", "[5]", "{}"],
    "by": ['{"k": 1}', '{"k": "x", "l": 2}', "[]", "null", "{}"],
}
TEXTS = [
    "",
    "  ",
    "null",
    "5",
    "[]",
    '[{"n": 1}]',
    "{",
    '{"n": 1',
    "{'n': 2}",
    '{"n": 3} more',
    '{"n": 1, "n": "x"}',
    "x",
]


def texts(count: int) -> list[str]:
    """Objects of which every other one holds only values that fit."""
    generator = random.Random(28)
    found = list(TEXTS)
    for at in range(count):
        names = generator.sample(sorted(VALUES), generator.randrange(1, 6))
        chosen = {name: generator.choice(VALUES[name]) if at % 2 else VALUES[name][0] for name in names}
        found.append("{" + ", ".join(f'"{name}": {value}' for name, value in chosen.items()) + "}")
    return found


def of_engine(given: list[str], schema: str, options: dict[str, str]) -> list[Any]:
    from pyspark.sql.pandas.types import from_arrow_schema

    arrow = to_arrow_schema(schema)
    call = Call(
        "JsonToStructs",
        (Column(0, "string"),),
        from_arrow_schema(arrow).jsonValue(),
        settings={"options": options, "zone": "UTC"},
    )
    evaluator = compile_expression(call)
    frame = Frame([pa.array(given, pa.string())], len(given))
    rows: list[Any] = evaluate(evaluator, frame, pa.struct(list(arrow))).to_pylist()
    return rows


def of_spark(spark: SparkSession, given: list[str], schema: str, options: dict[str, str]) -> list[Any]:
    from pyspark.sql import functions as F

    frame = spark.createDataFrame(list(enumerate(given)), "at INT, text STRING")
    parsed = frame.select("at", F.from_json("text", schema, options).alias("row"))
    rows = parsed.toArrow().sort_by("at").column("row").to_pylist()
    return list(rows)


@pytest.mark.row("ends.6")
def test_bad_records_of_from_json_are_kept_in_their_column_as_in_spark(spark: SparkSession) -> None:
    given = texts(400)
    options = {"columnNameOfCorruptRecord": "bad"}
    found, wanted = of_engine(given, SCHEMA, options), of_spark(spark, given, SCHEMA, options)
    different = [
        (text, mine, theirs)
        for text, mine, theirs in zip(given, found, wanted, strict=True)
        if repr(mine) != repr(theirs)
    ]
    assert different == []
    marked = [row["bad"] for row in found if row is not None]
    assert 100 < sum(text is not None for text in marked) < 300


@pytest.mark.row("ends.6")
def test_bad_record_fails_from_json_in_the_mode_failfast_as_in_spark(spark: SparkSession) -> None:
    options = {"mode": "FAILFAST"}
    good = ['{"n": 1}', "", '{"n": 2, "name": "x"}']
    assert of_engine(good, "n INT, name STRING", options) == of_spark(spark, good, "n INT, name STRING", options)
    for bad in ('{"n": "x"}', "{", "[]", "5"):
        with pytest.raises(EvaluationError, match="MALFORMED_RECORD_IN_PARSING"):
            of_engine([bad], "n INT, name STRING", options)
        with pytest.raises(Exception, match="MALFORMED_RECORD_IN_PARSING"):
            of_spark(spark, [bad], "n INT, name STRING", options)


def test_json_modes_that_spark_refuses_or_optimizes_away_are_refused() -> None:
    with pytest.raises(UnsupportedExpressionError, match="PERMISSIVE and FAILFAST"):
        of_engine([], "n INT", {"mode": "DROPMALFORMED"})
    with pytest.raises(UnsupportedExpressionError, match="columnNameOfCorruptRecord"):
        of_engine([], "n INT, _corrupt_record STRING", {})
    with pytest.raises(UnsupportedExpressionError, match="not a string"):
        of_engine([], "n INT, bad INT", {"columnNameOfCorruptRecord": "bad"})
