"""Format ``csv``: the rows that Spark's reader and the engine's make of the same files."""

from __future__ import annotations

import gzip
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.connectors.file_rows import FileFormatError, open_rows
from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.formats import source_options, source_schema
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.pipelines import spark_sources

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

TYPED = (
    "flag BOOLEAN, tiny TINYINT, n INT, big BIGINT, single FLOAT, real DOUBLE, price DECIMAL(8,2), day DATE, "
    "at TIMESTAMP, local TIMESTAMP_NTZ, name STRING"
)
VALUES = {
    "flag": ["true", "FALSE", "yes", "1", " true"],
    "tiny": ["1", "-128", "128", "+7", "1.0", " 1"],
    "n": ["0", "-2147483648", "2147483648", "007", "1e3", "x"],
    "big": ["9223372036854775807", "9223372036854775808", "-5", "1 "],
    "single": ["1.5", "16777217", "1e39", "-.5", "5.", "1f", "NaN", "0x1.8p1"],
    "real": ["1.5", "-1E-3", "Inf", "-Inf", "Infinity", "1d", '"1,5"', " 2 ", "1e999", "NaN", "-NaN"],
    "price": ["1", "1.005", "-999999.99", "999999.995", "1e3", "9999999.5", "x"],
    "day": ["2026-01-31", "2026-2-3", "2026-02-30", "2026", "2026-01-01 10:00", "1500-02-28", "31.01.2026"],
    "at": ["2026-01-02 03:04:05", "2026-01-02T03:04:05.678901Z", "2026-01-02", "2026-01-02 03:04:05+02:00", "soon"],
    "local": ["2026-01-02 03:04:05.5", "2026-01-02T03:04", "2026-01-02 03:04:05Z", "x"],
    "name": ["a", "é", " ", '"quoted"', '"with, separator"', '""', '"say \\"x\\""', '"open', 'a"b', "NA", "\\"],
}


def typed_lines(rows: int) -> list[str]:
    """Rows of which most are good, with empty fields, and some with too few or too many of them."""
    generator = random.Random(3)
    lines = []
    for at in range(rows):
        fields = []
        for kind, values in VALUES.items():
            good = values[0] if kind != "name" else generator.choice(values)
            fields.append(generator.choice(values) if at % 3 == 0 else generator.choice([good, ""]))
        if at % 17 == 0:
            fields = fields[: generator.randrange(1, 11)]
        if at % 19 == 0:
            fields.append("more")
        lines.append(",".join(fields))
        if at % 23 == 0:
            lines.append(generator.choice(["", "  ", "#comment", "\t"]))
    return lines


def shown(rows: list[dict[str, Any]]) -> list[str]:
    """The rows in their order; times without zones, as the two readers give UTC in different ways."""

    def text(value: Any) -> str:
        if isinstance(value, float) and math.isnan(value):
            return "NaN"
        return repr(value.replace(tzinfo=None) if getattr(value, "tzinfo", None) else value)

    return [str({name: text(value) for name, value in row.items()}) for row in rows]


def of_spark(spark: SparkSession, path: Path, schema: str, options: dict[str, str]) -> list[str]:
    # toArrow keeps times in UTC, which collect() would turn into those of this machine.
    return shown(spark.read.options(**options).schema(schema).csv(str(path)).toArrow().to_pylist())


def of_engine(path: Path, schema: str, options: dict[str, str]) -> list[str]:
    given = {"path": str(path), **options}
    declared = source_schema("csv", given, to_arrow_schema(schema))
    batches = list(open_rows("csv", resolve(str(path)), declared, source_options("csv", given)))
    return shown(pa.Table.from_batches(batches, declared).to_pylist())


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"header": "true", "comment": "#", "nullValue": "NA", "emptyValue": "nothing"},
        {"escape": '"', "mode": "DROPMALFORMED", "columnPruning": "false"},
        {"ignoreLeadingWhiteSpace": "true", "ignoreTrailingWhiteSpace": "true", "nanValue": "x", "positiveInf": "1d"},
        {"dateFormat": "dd.MM.yyyy", "timestampFormat": "yyyy-MM-dd HH:mm:ss", "timeZone": "Europe/Berlin"},
        {
            "quote": "",
            "charset": "ISO-8859-1",
            "delimiter": ",",
            "inferSchema": "true",
            "locale": "en-US",
            "lineSep": "\r\n",
        },
    ],
    ids=str,
)
def test_csv_file_gives_the_rows_of_spark(spark: SparkSession, tmp_path: Path, options: dict[str, str]) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(typed_lines(600)).encode())
    rows = of_engine(file, TYPED, options)
    assert rows == of_spark(spark, file, TYPED, options)
    assert len(rows) > 300


@pytest.mark.row("ends.4")
def test_bad_records_of_csv_are_kept_in_their_column_as_in_spark(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("\n".join(typed_lines(300)))
    schema = TYPED.replace("big BIGINT,", "bad STRING, big BIGINT,")
    options = {"columnNameOfCorruptRecord": "bad", "columnPruning": "false"}
    rows = of_engine(file, schema, options)
    assert rows == of_spark(spark, file, schema, options)
    assert sum("'bad': 'None'" not in row for row in rows) > 50


@pytest.mark.row("ends.4")
def test_generated_lines_are_split_as_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    generator = random.Random(7)
    lines = ["".join(generator.choices('a"\\, "b,', k=generator.randrange(1, 12))) for _ in range(5_000)]
    file = tmp_path / "a.csv"
    file.write_text("\n".join(lines))
    schema = "a STRING, b STRING, c STRING"
    assert of_engine(file, schema, {}) == of_spark(spark, file, schema, {})


@pytest.mark.row("ends.4")
def test_first_bad_line_fails_in_mode_failfast_with_its_number(spark: SparkSession, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("n,name\n1,a\n\n2,b\nx,c\n")
    options = {"header": "true", "mode": "FAILFAST", "columnPruning": "false"}
    with pytest.raises(Exception, match="MALFORMED_RECORD_IN_PARSING|FAILED_READ_FILE"):
        of_spark(spark, file, "n INT, name STRING", options)
    with pytest.raises(FileFormatError, match=r"a\.csv: line 5: 'x' in column 'n' is not of type int32"):
        of_engine(file, "n INT, name STRING", options)


@pytest.mark.row("ends.4")
def test_csv_directory_is_copied_by_a_job_with_the_rows_of_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    source = tmp_path / "in" / "country=DE"
    source.mkdir(parents=True)
    (source / "a.csv").write_text("\n".join(typed_lines(100)))
    (source / "b.csv.gz").write_bytes(gzip.compress("\n".join(typed_lines(50)).encode()))
    schema = TYPED.replace("at TIMESTAMP, local TIMESTAMP_NTZ, ", "") + ", country STRING"
    arguments = ["csv", schema, '{"maxFilesPerTrigger": 1}', str(tmp_path / "in")]
    spark_sources.pipeline(spark, *arguments, str(tmp_path / "spark"))
    job = cluster.submit(
        PIPELINES / "spark_sources.py", arguments=[*arguments, str(tmp_path / "engine")], configuration=fast()
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    ours, theirs = (
        shown(
            [
                row
                for file in (tmp_path / side).rglob("[!._]*.parquet")
                for row in pq.ParquetFile(file).read().to_pylist()
            ]
        )
        for side in ("engine", "spark")
    )
    assert sorted(ours) == sorted(theirs)
    assert len(ours) > 100
