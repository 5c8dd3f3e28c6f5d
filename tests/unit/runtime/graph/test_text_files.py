"""Lines of CSV become rows; the differential tests compare many more with Spark's."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.expressions.csv_reader import Dialect, fields_of
from ckpt_runtime.graph.bad_rows import BadRecordError
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import source_options, source_schema
from ckpt_runtime.graph.text_files import CsvRows

SCHEMA = pa.schema([("n", pa.int32()), ("name", pa.string())])
BAD_ROWS = {"columnPruning": "false"}


def rows_of(lines: list[str], schema: pa.Schema = SCHEMA, **options: str) -> list[dict[str, Any]]:
    reader = CsvRows(source_options("csv", {"path": "/in", **options}), schema)
    return reader.rows([line.encode() for line in lines]).to_pylist()


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("a,b", ["a", "b"]),
        ('"a,b",c', ["a,b", "c"]),
        ('"say \\"x\\"",\\"', ['say "x"', '\\"']),
        ('"" a",b', ['"" a"', "b"]),
        ('"a" ,b', ["a", "b"]),
        ('"open,b', ["open,b"]),
        ('"', ['"']),
        (",", ["", ""]),
    ],
)
def test_fields_of_a_line_are_those_of_univocity(line: str, fields: list[str]) -> None:
    assert fields_of(line, Dialect()) == fields


@pytest.mark.parametrize("quoted", [False, True])
def test_lines_that_arrow_splits_and_others_give_the_same_rows(quoted: bool) -> None:
    lines = ["1,a", "", "2,", ",b", "x,c", "  "]
    lines += ['3,"d"'] if quoted else ["3,d"]
    found = [(row["n"], row["name"]) for row in rows_of(lines)]
    assert found == [(1, "a"), (2, None), (None, "b"), (None, "c"), (3, "d")]


def test_bad_records_are_marked_dropped_or_fail_as_the_mode_says() -> None:
    lines = ["1,a", "#x", "2,b,c", "y,d", "4"]
    options = {**BAD_ROWS, "comment": "#"}
    with_column = pa.schema([("n", pa.int32()), ("_corrupt_record", pa.string()), ("name", pa.string())])
    assert [tuple(row.values()) for row in rows_of(lines, with_column, **options)] == [
        (1, None, "a"),
        (2, "2,b,c", "b"),
        (None, "y,d", "d"),
        (4, "4", None),
    ]
    assert rows_of(lines, mode="dropmalformed", **options) == [{"n": 1, "name": "a"}]
    with pytest.raises(BadRecordError, match="it has 3 fields, but the schema has 2") as caught:
        rows_of(lines, mode="FAILFAST", **options)
    assert caught.value.line == 2


def test_line_feed_within_a_record_fails_where_spark_would_end_the_record() -> None:
    assert [row["name"] for row in rows_of(["1,a\nb"], lineSep=";")] == ["a\nb"]
    with pytest.raises(BadRecordError, match="it has a line feed, at which Spark ends records") as caught:
        rows_of(["1,a", "2,a\nb"], lineSep="\r\n")
    assert caught.value.line == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"mode": "IGNORE"}, "'mode': 'IGNORE' is not one of"),
        ({"mode": "FAILFAST"}, "set columnPruning to false"),
        ({"columnNameOfCorruptRecord": "name"}, "set columnPruning to false"),
        ({"columnNameOfCorruptRecord": "n", **BAD_ROWS}, "must be a STRING"),
        ({"multiLine": "true", "lineSep": ";"}, "lines end as the first line of a file does: remove it"),
        ({"sep": "||"}, "is not one character"),
        ({"escape": ""}, "without an escape character"),
        ({"quote": "''"}, "more than one character"),
        ({"encoding": "windows-1252"}, "'windows-1252' is not one of UTF-8"),
        ({"encoding": "UTF-16"}, "the byte order of a line in UTF-16 is unknown"),
        ({"encoding": "UTF-16LE"}, "UTF-16LE needs option lineSep, or multiLine"),
        ({"ignoreTrailingWhiteSpace": "true"}, "set ignoreLeadingWhiteSpace"),
        ({"dateFormat": "e"}, "does not know the letters"),
        ({"lineSep": ""}, "'lineSep': it is empty"),
        ({"locale": "de-DE"}, "'de-DE' is not one of en-us"),
        ({"inferSchemas": "true"}, "does not know it"),
    ],
)
def test_options_that_cannot_be_read_as_in_spark_are_refused(options: dict[str, str], problem: str) -> None:
    schema = SCHEMA.append(pa.field("day", pa.date32()))
    with pytest.raises(PlanError, match=problem):
        source_schema("csv", {"path": "/in", **options}, schema)


def test_column_that_no_field_holds_is_refused() -> None:
    with pytest.raises(PlanError, match="column 'tags' is list"):
        source_schema("csv", {"path": "/in"}, pa.schema([("tags", pa.list_(pa.string()))]))


@pytest.mark.parametrize("enforced", ["true", "false"])
def test_header_is_compared_with_the_schema_when_it_is_not_enforced(enforced: str) -> None:
    reader = CsvRows(source_options("csv", {"path": "/in", "enforceSchema": enforced}), SCHEMA)
    assert reader.header(b"  ") is None
    assert reader.header(b"N,Name") == ""
    problem = reader.header(b"n,title")
    assert problem is not None
    assert bool(problem) == (enforced == "false")
