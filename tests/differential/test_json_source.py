"""Format ``json``: the rows that Spark's reader and the engine's make of the same files, good and bad ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from ckpt_runtime.connectors.file_rows import FileFormatError, open_rows
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.formats import source_options, source_schema
from ckpt_runtime.storage.filesystem import resolve

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMA = "n INT, name STRING, price DECIMAL(6,2), at TIMESTAMP, tags ARRAY<INT>, inner STRUCT<a: INT>"
GOOD = ['{"n": 1, "name": "a"}', '{"price": 1.5, "tags": [1, 2], "at": "2026-01-02 03:04:05"}', '{"inner": {"a": 1}}']
ODD = [
    "",
    "  ",
    "null",
    "17",
    "{",
    '{"n": 1} and more',
    '{"n": 1}{"n": 2}',
    '{"n": "x", "name": "b"}',
    '{"n": 1.5, "tags": ["x"]}',
    '{"inner": {"a": "x"}, "n": 4}',
    '{"at": "soon", "n": 5}',
    "[]",
    "[1]",
    "[null]",
    '{"name": { "a" : [1.50, "\\/"] }, "n": 6}',
    '{"name": -0.10, "tags": [ 7 ]}',
    '["x", {"n": 1}]',
    '[{"n": 1}, null]',
    '[null, {"n": 1}]',
    '[{"n": 1}, 5]',
    '[{"n": 3}, {"n": 4, "name": "c"}]',
    '[{"n": "x"}, {"n": 4}]',
    '[{"n": 3}, {"n": "x", "name": "d"}]',
    '[{"n": 3}, {"n": 4}',
    '[{"n": 3}] more',
    '[[{"n": 3}]]',
    '[{"n": 3}, []]',
]


def lines() -> list[str]:
    generator = random.Random(4)
    return [*ODD, *(generator.choice(GOOD if at % 3 else ODD) for at in range(200))]


def of_spark(spark: SparkSession, path: Path, schema: str, options: dict[str, str]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = spark.read.options(**options).schema(schema).json(str(path)).toArrow().to_pylist()
    return rows


def of_engine(path: Path, schema: str, options: dict[str, str]) -> list[dict[str, Any]]:
    given = {"path": str(path), **options}
    declared = source_schema("json", given, to_arrow_schema(schema))
    batches = list(open_rows("json", resolve(str(path)), declared, source_options("json", given)))
    rows: list[dict[str, Any]] = pa.Table.from_batches(batches, declared).to_pylist()
    return rows


@pytest.mark.row("ends.6")
@pytest.mark.parametrize(
    ("schema", "options"),
    [
        (SCHEMA, {}),
        (f"{SCHEMA}, _corrupt_record STRING", {}),
        (SCHEMA.replace("price", "bad STRING, price"), {"columnNameOfCorruptRecord": "bad"}),
        (SCHEMA, {"mode": "dropMalformed"}),
        (f"{SCHEMA}, _corrupt_record STRING", {"mode": "DROPMALFORMED"}),
    ],
    ids=["nulls", "column", "another column", "dropped", "dropped with a column"],
)
def test_bad_records_of_json_are_those_of_spark_in_each_mode(
    spark: SparkSession, tmp_path: Path, schema: str, options: dict[str, str]
) -> None:
    file = tmp_path / "a.json"
    # Spark's column of bad records would have the bytes themselves, which are no text.
    unreadable = b'\n{"n": 8, "name": "\xff"}\n{"n": 9, "\xc3": "x"}\n' if schema == SCHEMA else b""
    file.write_bytes("\n".join(lines()).encode() + unreadable)
    found, wanted = of_engine(file, schema, options), of_spark(spark, file, schema, options)
    assert [str(row) for row in found] == [str(row) for row in wanted]
    assert len(found) > 100


@pytest.mark.row("ends.6")
def test_bad_record_fails_json_in_mode_failfast_as_in_spark(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for line in ("", "17", '{"n": 1} and more', '{"n": "x"}', "[]", '[{"n": 1}, null]', '[{"n": 3}, {"n": 4}]', "[1]"):
        file.write_text(f"{GOOD[0]}\n{line}\n")
        wanted = of_spark_or_none(spark, file)
        if wanted is None:
            with pytest.raises(FileFormatError, match=r"a\.json: line 2: "):
                of_engine(file, SCHEMA, {"mode": "FAILFAST"})
        else:
            assert str(of_engine(file, SCHEMA, {"mode": "FAILFAST"})) == str(wanted), line


def of_spark_or_none(spark: SparkSession, file: Path) -> list[dict[str, Any]] | None:
    """The rows that Spark reads in mode FAILFAST; None if it fails because of a bad record."""
    try:
        return of_spark(spark, file, SCHEMA, {"mode": "FAILFAST"})
    except Exception as error:
        if "MALFORMED_RECORD_IN_PARSING" in str(error):
            return None
        raise
