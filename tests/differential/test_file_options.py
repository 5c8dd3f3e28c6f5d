"""Options of the sources of files: Spark's own source and the engine's read the same directory."""

from __future__ import annotations

import gzip
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.connectors.file_rows import FileFormatError
from ckpt_runtime.connectors.file_sink import FileSink
from ckpt_runtime.connectors.file_source import FileSource
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import source_options, source_schema
from ckpt_runtime.sinks import SinkContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

further = pytest.mark.long
"""What `make test-long` runs in addition."""

Rows = list[str]
"""The rows of one discovery, sorted, as JSON texts."""


def of_spark(spark: SparkSession, format_: str, schema: str, options: dict[str, str], directory: Path) -> list[Rows]:
    """The rows of each micro-batch, or the condition of the error."""
    found: list[Rows] = []

    def keep(batch: DataFrame, _: int) -> None:
        found.append(shown(batch.toArrow()))

    frame = spark.readStream.format(format_).options(**options).schema(schema).load()
    writer = frame.writeStream.foreachBatch(keep).trigger(availableNow=True)
    writer.option("checkpointLocation", str(directory)).start().awaitTermination()
    return found


def of_engine(format_: str, schema: str, options: dict[str, str], state: Any = None) -> list[Rows]:
    """The rows of each discovery, read by one reader as a subtask does."""
    return [shown(rows) for rows in discoveries(format_, schema, options, state)]


def discoveries(format_: str, schema: str, options: dict[str, str], state: Any = None) -> Iterator[pa.Table]:
    declared = source_schema(format_, options, to_arrow_schema(schema))
    source_options(format_, options)
    source = FileSource(format_, options)
    enumerator = source.open_enumerator(declared, state, bounded=True)
    reader = source.open_reader(declared, subtask=0, parallelism=1)
    while splits := enumerator.discover():
        batches = []
        for split in splits:
            reader.add(split, None)
            while (rows := reader.read(1000)) is not None and not rows.ended:
                assert rows.batch is not None
                batches.append(rows.batch)
        if source.acknowledges:
            reader.completed({}, splits)
        yield pa.Table.from_batches(batches, declared)
    reader.close()


def shown(table: pa.Table) -> Rows:
    def text(value: Any) -> str:
        return str(value.replace(tzinfo=None) if hasattr(value, "tzinfo") else value)

    return sorted(json.dumps({name: text(value) for name, value in row.items()}) for row in table.to_pylist())


def put(file: Path, text: str | bytes, at: int = 1_700_000_000) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(file, (at, at))


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"maxFilesPerTrigger": "2"}, marks=further),
        pytest.param({"maxBytesPerTrigger": "25"}, marks=further),
        {"maxBytesPerTrigger": "5", "latestFirst": "true"},
        pytest.param({"maxFilesPerTrigger": "3", "latestFirst": "true", "maxFileAge": "1s"}, marks=further),
        pytest.param({"maxFileAge": "2s"}, marks=further),
        pytest.param({"fileNameOnly": "true", "recursiveFileLookup": "true"}, marks=further),
        pytest.param({"pathGlobFilter": "[0-2]{.txt,.log}"}, marks=further),
        {"pathGlobFilter": "[!0]*", "recursiveFileLookup": "true"},
    ],
    ids=str,
)
def test_discoveries_have_the_files_of_sparks_batches(
    spark: SparkSession, tmp_path: Path, options: dict[str, str]
) -> None:
    for at in range(6):
        put(tmp_path / "in" / f"{at}.txt", f"line {at:05}\n", 1_700_000_000 + at)
    put(tmp_path / "in" / "below" / "1.txt", "below\n", 1_700_000_009)
    put(tmp_path / "in" / "1.log", "log\n", 1_700_000_010)
    given = {"path": str(tmp_path / "in"), **options}
    rows = of_spark(spark, "text", "value STRING", given, tmp_path / "state")
    assert of_engine("text", "value STRING", given) == rows


@pytest.mark.row("ends.4")
def test_patterns_in_paths_read_what_spark_reads(spark: SparkSession, tmp_path: Path) -> None:
    for place in (
        "x/u/f/a",
        "y/u/f/a",
        "x/v/f/a",
        "y/v/g/a",
        "x/_w/f/a",
        "x/v/_hidden",
        "x/u/country=DE/day=2026-1-2/b",
    ):
        put(tmp_path / "in" / f"{place}.json", f'{{"place": "{place}"}}\n')
    schema = "place STRING, country STRING, day DATE"
    patterns = ["{x,y}/v/*", "[x]/u/f", "*/?/f/*.json", "{x/u/f,y/v}/*", "x/*/f", "no*/x", "x/v/*"]
    for number, pattern in enumerate(patterns):
        given = {"path": f"{tmp_path}/in/{pattern}"}
        rows = of_spark(spark, "json", schema, given, tmp_path / f"state{number}")
        assert of_engine("json", schema, given) == rows, pattern
        assert (pattern == "no*/x") == (rows == [])
    given = {"path": f"{tmp_path}/in/x/u/country=*/day=*", "basePath": f"{tmp_path}/in/x/u"}
    rows = of_spark(spark, "json", schema, given, tmp_path / "based")
    assert of_engine("json", schema, given) == rows
    assert '"country": "DE", "day": "2026-01-02"' in rows[0][0]
    wrong = {**given, "basePath": f"{tmp_path}/in/y"}
    with pytest.raises(Exception, match="Wrong basePath"):
        of_spark(spark, "json", schema, wrong, tmp_path / "wrong")
    with pytest.raises(ValueError, match=r"option 'basePath': file://.*/x/u/.* is not below file://.*/in/y"):
        of_engine("json", schema, wrong)


VALUES = {
    "INT": ["+7", "007", "-3", "2147483648", "x", " 7"],
    "TINYINT": ["300", "5"],
    "BIGINT": ["+9", "9223372036854775808"],
    "DOUBLE": ["1e3", "+2", "NaN", "1d", "x"],
    "FLOAT": ["1.1"],
    "DECIMAL(5,2)": ["1.005", "1e2", "99999", "x"],
    "DATE": ["2026-1-2", "2026", "2026-02-30"],
    "TIMESTAMP": ["2026-01-02 03%3A04%3A05", "2026-1-2T3%3A04", "2026-01-02", "x"],
    "TIMESTAMP_NTZ": ["2026-01-02 03%3A04%3A05.5"],
    "BOOLEAN": ["true", "TRUE", "1"],
    "STRING": ["a%20b", "%C3%A9", "é", "100%", "%zz", "a+b", "__HIVE_DEFAULT_PARTITION__", ""],
}


BAD = {
    "INT": ["2147483648", "x", " 7"],
    "BIGINT": ["9223372036854775808"],
    "DOUBLE": ["x"],
    "DECIMAL(5,2)": ["x"],
    "DATE": ["2026-02-30"],
    "TIMESTAMP": ["x"],
    "BOOLEAN": ["1"],
    "STRING": [""],
}


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(
    "kind", [kind if kind in ("INT", "STRING") else pytest.param(kind, marks=further) for kind in VALUES]
)
def test_values_of_directories_are_those_of_spark(spark: SparkSession, tmp_path: Path, kind: str) -> None:
    """All good values of a type are partitions of one directory; each bad one is alone, and an error in both."""
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    schema = f"value STRING, part {kind}"
    good = tmp_path / "good"
    for at, value in enumerate(VALUES[kind]):
        if value in BAD.get(kind, ()):
            lone = tmp_path / f"bad{at}"
            put(lone / f"part={value}" / "a.txt", f"{value}\n")
            with pytest.raises(ValueError, match=r"of a directory is no|gives column 'part' no value"):
                of_engine("text", schema, {"path": str(lone)})
            with pytest.raises((PySparkException, Py4JJavaError), match="PARTITION"):
                of_spark(spark, "text", schema, {"path": str(lone)}, tmp_path / f"state{at}")
        else:
            put(good / f"part={value}" / f"{at}.txt", f"{value}\n")
            put(good / f"part={value}" / "plain" / f"{at}.txt", f"{value}, below\n")
    given = {"path": str(good)}
    rows = of_spark(spark, "text", schema, given, tmp_path / "state")
    assert of_engine("text", schema, given) == rows
    assert len(rows[0]) == 2 * len(list(good.iterdir()))


@pytest.mark.row("ends.4")
@pytest.mark.parametrize("clean", ["archive", pytest.param("delete", marks=further)])
def test_files_that_were_read_are_moved_or_deleted_as_by_spark(spark: SparkSession, tmp_path: Path, clean: str) -> None:
    """Spark cleans the files of a batch when a later one has been committed; the last batch of both stays or goes."""
    left: list[Counter[str]] = []
    for side in ("spark", "engine"):
        source, archive = tmp_path / side / "in", tmp_path / side / "archive"
        for at in range(3):
            put(source / f"country=DE/{at}.txt", f"line {at}\n", 1_700_000_000 + at)
        given = {"path": str(source), "cleanSource": clean, "maxFilesPerTrigger": "1"}
        given |= {"sourceArchiveDir": str(archive)} if clean == "archive" else {}
        schema = "value STRING, country STRING"
        if side == "spark":
            spark.conf.set("spark.sql.streaming.fileSource.cleaner.numThreads", "0")
            of_spark(spark, "text", schema, given, tmp_path / "state")
        else:
            of_engine("text", schema, given)
        assert not list(source.rglob("0.txt"))
        moved = [file.relative_to(archive) for file in archive.rglob("*.txt")]
        left.append(Counter(str(file).replace(str(source)[1:], "") for file in moved if file.name != "2.txt"))
    assert left[0] == left[1]
    assert left[0].total() == (2 if clean == "archive" else 0)


DOCUMENTS = [
    '{"a":\n 1,\n"b": "é"}\n{"a": 9}',
    '[{"a":1},\n {"a":"x"},\n 5]',
    '\ufeff{"a": 5}',
    "  \n ",
    '{"a": 1',
    "x",
    "",
    '{"a": "q"}',
    "null",
    "[]",
    '{"a": 1}]',
    '[{"a":1},{"a":2}',
    '[[{"a":1}]]',
    '[{"a":3},\n{"a":4, "b": "1\\n2"}]',
    '{"b": 1.50 }',
    '{"a": 6, "b": {"x" : 1.50, \'y\': [ -0, 1E2, NaN ]} }',
    '[{"b": [ ]}, {"b": {"ü": "\\u00fc", "z": true }, "a": 7}, {"b": false}]',
]


def each_file(
    spark: SparkSession, format_: str, schema: str, options: dict[str, str], directory: Path
) -> dict[str, list[Any]]:
    """The rows that Spark reads of each file, in their order."""
    frame = spark.read.format(format_).options(**options).schema(schema).load(str(directory))
    found: dict[str, list[Any]] = {}
    for row in frame.selectExpr("*", "_metadata.file_name AS file").collect():
        found.setdefault(row.file, []).append(tuple(row)[:-1])
    return found


def compare_files(spark: SparkSession, format_: str, schema: str, options: dict[str, str], directory: Path) -> int:
    """Asserts that the rows of each file are the same, and returns their number."""
    wanted = each_file(spark, format_, schema, options, directory)
    total = 0
    for file in sorted(directory.iterdir()):
        tables = discoveries(format_, schema, {"path": str(file), **options})
        rows = [tuple(row.values()) for table in tables for row in table.to_pylist()]
        assert rows == wanted.get(file.name, []), (file.read_bytes(), options)
        total += len(rows)
    return total


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(
    "options",
    [
        {"multiLine": "true"},
        pytest.param({"multiLine": "true", "encoding": "UTF-16"}, marks=further),
        pytest.param({"multiLine": "true", "encoding": "UTF-32"}, marks=further),
        pytest.param({"multiLine": "true", "encoding": "ISO-8859-1"}, marks=further),
        {"encoding": "UTF-16LE", "lineSep": "\n"},
        pytest.param({"encoding": "UTF-16BE", "lineSep": ";"}, marks=further),
        pytest.param({"encoding": "ISO-8859-1", "lineSep": "\n"}, marks=further),
    ],
    ids=str,
)
def test_json_documents_give_the_rows_of_spark(spark: SparkSession, tmp_path: Path, options: dict[str, str]) -> None:
    for at, text in enumerate(DOCUMENTS):
        # Encodings of one byte have no byte order mark.
        put(tmp_path / f"{at:02}.json", text.encode(options.get("encoding", "utf-8"), "ignore"))
    schema = "a INT, b STRING, bad STRING"
    given = {"columnNameOfCorruptRecord": "bad", **options}
    assert compare_files(spark, "json", schema, given, tmp_path) >= 12
    if "encoding" not in options:
        put(tmp_path / "packed.json.gz", gzip.compress(DOCUMENTS[-2].encode()))
        for at, name in enumerate(("utf-16-le", "utf-16-be", "utf-32-le", "utf-16")):
            put(tmp_path / f"other{at}.json", DOCUMENTS[0].encode(name))
        compare_files(spark, "json", schema, given, tmp_path)
    compare_files(spark, "json", "a INT, b STRING", {**options, "mode": "DROPMALFORMED"}, tmp_path)


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(
    ("end", "options"),
    [
        pytest.param("\n", {"encoding": "UTF-16LE", "nullValue": "a", "emptyValue": "e"}, marks=further),
        ("\r\n", {}),
        pytest.param("\r", {}, marks=further),
        pytest.param("\n", {"ignoreLeadingWhiteSpace": "true", "ignoreTrailingWhiteSpace": "true"}, marks=further),
        pytest.param("\n", {"comment": "#", "header": "true", "escape": '"', "encoding": "UTF-16"}, marks=further),
    ],
    ids=str,
)
def test_generated_csv_of_several_lines_is_split_as_by_spark(
    spark: SparkSession, tmp_path: Path, end: str, options: dict[str, str]
) -> None:
    generator = random.Random(11)
    for at in range(150):
        text = "".join(generator.choices(["a", '"', "\\", ",", " ", "é", end, end, "#"], k=generator.randrange(5, 25)))
        put(tmp_path / f"{at:03}.csv", text.encode(options.get("encoding", "utf-8")))
    given = {"multiLine": "true", "columnPruning": "false", "columnNameOfCorruptRecord": "bad", **options}
    assert compare_files(spark, "csv", "a STRING, b STRING, c STRING, bad STRING", given, tmp_path) > 100


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(
    "encoding", ["UTF-16BE", *(pytest.param(name, marks=further) for name in ("UTF-16LE", "ISO-8859-1", "US-ASCII"))]
)
def test_csv_lines_in_another_encoding_are_those_of_spark(spark: SparkSession, tmp_path: Path, encoding: str) -> None:
    put(tmp_path / "a.csv", '1,é\r\nx,2\n3,"q"\n\n4,ß\n'.encode(encoding, "ignore"))
    given = {"encoding": encoding, "lineSep": "\n", "columnNameOfCorruptRecord": "bad", "columnPruning": "false"}
    assert compare_files(spark, "csv", "a INT, b STRING, bad STRING", given, tmp_path) == 4


@pytest.mark.row("ends.6")
@pytest.mark.parametrize(
    ("format_", "text", "problem"),
    [
        ("json", '{"a": 1,\n "b":', r"record 1: it is not JSON of the schema's types"),
        ("csv", '1,"a\nb"\n2,c\nx,"d\n"\n', r"record 3: 'x' in column 'a' is not of type int32"),
    ],
)
def test_bad_record_of_several_lines_fails_in_mode_failfast_as_in_spark(
    spark: SparkSession, tmp_path: Path, format_: str, text: str, problem: str
) -> None:
    put(tmp_path / "a", text)
    options = {"multiLine": "true", "mode": "FAILFAST"} | ({"columnPruning": "false"} if format_ == "csv" else {})
    with pytest.raises(Exception, match="MALFORMED_RECORD_IN_PARSING|FAILED_READ_FILE"):
        each_file(spark, format_, "a INT, b STRING", options, tmp_path)
    with pytest.raises(Exception, match=problem):
        of_engine(format_, "a INT, b STRING", {"path": str(tmp_path), **options})


OTHER_TYPES: list[tuple[pa.Array, str]] = [
    (pa.array([1, None], pa.int16()), "DOUBLE"),
    (pa.array([-100, None], pa.int32()), "DECIMAL(12,2)"),
    (pa.array([-100, None], pa.int64()), "DECIMAL(22,2)"),
    (pa.array([255, None], pa.uint8()), "SMALLINT"),
    (pa.array([4_294_967_295, None], pa.uint32()), "BIGINT"),
    (pa.array([18_446_744_073_709_551_615, None], pa.uint64()), "DECIMAL(20,0)"),
    (pa.array([Decimal("-1.50"), None]).cast(pa.decimal128(10, 2)), "DECIMAL(13,5)"),
    (pa.array([date(1960, 1, 2), None]), "TIMESTAMP_NTZ"),
    (pa.array(["é", None]).cast(pa.binary()), "STRING"),
    (pa.array([b"ab", None], pa.binary(2)), "BINARY"),
    (pa.nulls(2), "INT"),
    (pa.array([{"x": 1, "y": "q"}, None]), "STRUCT<Y: STRING, z: INT, x: BIGINT>"),
    (pa.array([{"x": 1}, None]), "STRUCT<z: INT>"),
    (pa.array([[{"a": 1, "b": 2}, None], None]), "ARRAY<STRUCT<b: BIGINT, a: BIGINT>>"),
    (
        pa.array([[("k", {"a": 1})], None], pa.map_(pa.string(), pa.struct([("a", pa.int32())]))),
        "MAP<STRING, STRUCT<a: INT, n: INT>>",
    ),
]


@pytest.mark.row("ends.4")
def test_parquet_columns_of_other_types_than_the_declared_ones_have_the_values_of_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One file has a column of each, in another order than the schema; both refuse what is ambiguous."""
    names = [f"c{at}" for at in range(len(OTHER_TYPES))]
    columns = dict(zip(names, (array for array, _ in OTHER_TYPES), strict=True))
    pq.write_table(pa.table({name: columns[name] for name in reversed(names)}), tmp_path / "a.parquet")
    schema = ", ".join(f"{name} {kind}" for name, (_, kind) in zip(names, OTHER_TYPES, strict=True))
    wanted = shown(spark.read.schema(schema).parquet(str(tmp_path)).toArrow())
    assert of_engine("parquet", schema, {"path": str(tmp_path)}) == [wanted]
    pq.write_table(pa.table({"a": [1], "A": [2]}), tmp_path / "a.parquet")
    with pytest.raises(Exception, match=r"(?i)duplicate"):
        spark.read.schema("a BIGINT").parquet(str(tmp_path)).collect()
    with pytest.raises(FileFormatError, match="it has several columns 'a': a, A"):
        of_engine("parquet", "a BIGINT", {"path": str(tmp_path)})


@pytest.mark.row("ends.4")
def test_directory_that_sparks_sink_has_written_gives_the_files_that_its_log_names(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The log of four batches is shortened on the way; one file was never committed, and one is gone."""
    source, plain, parted = tmp_path / "in", tmp_path / "plain", tmp_path / "parted"
    for at in range(4):
        put(source / f"{at}.txt", f"{at}\n", 1_700_000_000 + at)
    spark.conf.set("spark.sql.streaming.fileSink.log.compactInterval", "3")
    lines = spark.readStream.format("text").option("maxFilesPerTrigger", 1).load(str(source))
    for output, frame in ((plain, lines), (parted, lines.selectExpr("value", "value IN ('1', '2') AS `a%b`"))):
        writer = frame.writeStream.format("text").option("checkpointLocation", f"{output}-state")
        writer = writer.partitionBy(*frame.columns[1:]) if frame.columns[1:] else writer
        writer.trigger(availableNow=True).start(str(output)).awaitTermination()
    spark.conf.unset("spark.sql.streaming.fileSink.log.compactInterval")
    assert (plain / "_spark_metadata" / "2.compact").exists()
    next(file for file in plain.glob("*.txt") if file.read_text() == "2\n").unlink()
    for place in (plain, parted / "a%25b=true"):
        put(place / "part-uncommitted.txt", "uncommitted\n")
    (tmp_path / "no-batch" / "_spark_metadata").mkdir(parents=True)
    put(tmp_path / "no-batch" / "part-0.txt", "uncommitted\n")
    for number, (path, options, uncommitted) in enumerate(
        [
            (plain, {}, False),
            (plain, {"latestFirst": "true"}, False),
            (plain / "*", {}, True),
            (parted, {}, False),
            (tmp_path / "no-batch", {}, False),
        ]
    ):
        given = {"path": str(path), **options}
        schema = "value STRING, `a%b` BOOLEAN" if path == parted else "value STRING"
        rows = of_spark(spark, "text", schema, given, tmp_path / f"state{number}")
        assert of_engine("text", schema, given) == rows, given
        assert ("uncommitted" in str(rows)) == uncommitted
    cleaned = {"path": str(plain), "cleanSource": "delete"}
    with pytest.raises(Exception, match="Clean up source files is not supported when reading from the output"):
        of_spark(spark, "text", "value STRING", cleaned, tmp_path / "cleaned")
    with pytest.raises(
        ValueError, match=r"option 'cleanSource': the log _spark_metadata of Spark's sink names the fil"
    ):
        of_engine("text", "value STRING", cleaned)
    with pytest.raises(
        PlanError, match=r"a streaming query of Spark has written to 'file:///.*/plain', and Spark reads"
    ):
        FileSink("parquet", {"path": str(plain)}).open_writer(
            pa.schema([("n", pa.int64())]), SinkContext("0" * 16, "f" * 32, "out", 0, 1, 0)
        )


@pytest.mark.row("ends.4")
def test_files_that_are_no_parquet_or_are_gone_are_left_out_by_the_options_of_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    put(tmp_path / "in" / "0.parquet", "this is no footer", 1_700_000_000)
    pq.write_table(pa.table({"n": [1, 2]}), tmp_path / "in" / "1.parquet")
    given = {"path": str(tmp_path / "in"), "ignoreCorruptFiles": "true"}
    rows = of_spark(spark, "parquet", "n BIGINT", given, tmp_path / "state")
    assert of_engine("parquet", "n BIGINT", given) == rows == [['{"n": "1"}', '{"n": "2"}']]
    with pytest.raises(FileFormatError, match=r"0\.parquet: it cannot be read as format 'parquet'"):
        of_engine("parquet", "n BIGINT", {**given, "ignoreCorruptFiles": "false"})
    source = FileSource("parquet", {**given, "ignoreMissingFiles": "true"})
    declared = to_arrow_schema("n BIGINT")
    splits = source.open_enumerator(declared, None, bounded=True).discover()
    (tmp_path / "in" / "1.parquet").unlink()
    for position in (None, 1):  # the second reader continues behind a row
        reader = source.open_reader(declared, subtask=0, parallelism=1)
        reader.add(splits[1], position)
        assert (rest := reader.read(10)) is not None
        assert (rest.position, rest.batch, rest.ended) == (position or 0, None, True)
        reader.close()
