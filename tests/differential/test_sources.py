"""Spark's own sources and the engine's: the same PySpark program over the same directories."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.parity import shown
from tests.support.pipelines import spark_sources

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "spark_sources.py"


def rows_of(directory: Path) -> Counter[str]:
    return Counter(
        str(shown(row)) for file in directory.rglob("*.parquet") for row in comparable(pq.ParquetFile(file)).to_pylist()
    )


def comparable(file: pq.ParquetFile) -> pa.Table:
    """Spark writes times as INT96 without a zone, and bytes of a text that are no UTF-8 as they are."""
    table = file.read()
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if pa.types.is_timestamp(field.type):
            table = table.set_column(at, field.name, column.cast(pa.timestamp("us")))
        elif pa.types.is_string(field.type):
            raw = column.cast(pa.binary()).to_pylist()
            texts = [None if text is None else text.decode("utf-8", "replace") for text in raw]
            table = table.set_column(at, field.name, pa.array(texts, pa.string()))
    return table


def compare(
    spark: SparkSession,
    cluster: MiniCluster,
    source: Path,
    output: Path,
    format_: str,
    schema: str,
    options: dict[str, Any],
) -> Counter[str]:
    """Runs the program in both systems and returns the rows, which are equal."""
    given = json.dumps(options)
    spark_sources.pipeline(spark, format_, schema, given, str(source), str(output / "spark"))
    arguments = [format_, schema, given, str(source), str(output / "engine")]
    job = cluster.submit(PROGRAM, arguments=arguments, configuration=fast())
    cluster.wait_for_status(job, JobStatus.FINISHED)
    rows = rows_of(output / "engine")
    assert rows == rows_of(output / "spark")
    return rows


def typed_table(rows: int) -> pa.Table:
    start = datetime(1965, 1, 1, tzinfo=UTC)
    return pa.table(
        {
            "flag": pa.array([None if at % 5 == 0 else at % 2 == 0 for at in range(rows)], pa.bool_()),
            "small": pa.array([at % 100 for at in range(rows)], pa.int16()),
            "big": pa.array([None if at % 7 == 0 else at * 10**9 for at in range(rows)], pa.int64()),
            "real": pa.array([at / 7 for at in range(rows)], pa.float32()),
            "price": pa.array([Decimal(at).scaleb(-2) for at in range(rows)], pa.decimal128(10, 2)),
            "name": pa.array([None if at % 3 == 0 else f"é{at}" for at in range(rows)], pa.string()),
            "day": pa.array([date(1500, 1, 1) + timedelta(days=997 * at) for at in range(rows)], pa.date32()),
            "at": pa.array([start + timedelta(hours=31 * at) for at in range(rows)], pa.timestamp("us", "UTC")),
            "tags": pa.array([[str(at), None] for at in range(rows)], pa.list_(pa.string())),
        }
    )


@pytest.mark.row("ends.4")
def test_parquet_directory_with_partitions_gives_the_rows_of_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    source = tmp_path / "in"
    for at, country in enumerate(("DE", "__HIVE_DEFAULT_PARTITION__", "a%2Fb")):
        directory = source / f"country={country}" / f"number={at}"
        directory.mkdir(parents=True)
        nanoseconds = pa.array([number * 10**9 + 1 for number in range(20 + at)], pa.timestamp("ns"))
        table = typed_table(20 + at)
        as_spark = at == 2  # which stores times as INT96
        table = table if as_spark else table.append_column("exact", nanoseconds)
        place = directory / "part-0.parquet"
        pq.write_table(table, place, row_group_size=8, use_deprecated_int96_timestamps=as_spark)
        (directory / "_hidden.parquet").write_text("this is not a file of Parquet")
    schema = (  # the column country is not declared, and number not at its place
        "number BIGINT, FLAG BOOLEAN, small INT, big BIGINT, real DOUBLE, price DECIMAL(12,2), name STRING, day DATE, "
        "at TIMESTAMP, tags ARRAY<STRING>, missing STRING, exact BIGINT"
    )
    spark.conf.set("spark.sql.legacy.parquet.nanosAsLong", "true")  # without it, Spark reads no such column
    rows = compare(spark, cluster, source, tmp_path, "parquet", schema, {"maxFilesPerTrigger": 1})
    spark.conf.unset("spark.sql.legacy.parquet.nanosAsLong")
    assert rows.total() == 63


@pytest.mark.row("ends.4")
def test_orc_directory_gives_the_rows_of_spark(spark: SparkSession, cluster: MiniCluster, tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    orc.write_table(typed_table(50).drop_columns(["at"]), source / "part-0.orc")
    schema = "small SMALLINT, big BIGINT, price DECIMAL(10,2), name STRING, tags ARRAY<STRING>, missing INT"
    assert compare(spark, cluster, source, tmp_path, "orc", schema, {}).total() == 50


@pytest.mark.row("ends.4")
@pytest.mark.parametrize(
    "options",
    [{}, {"wholetext": True}, {"lineSep": ";"}, {"recursiveFileLookup": True}, {"pathGlobFilter": "*.txt"}],
    ids=str,
)
def test_text_directory_gives_the_rows_of_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, options: dict[str, Any]
) -> None:
    source = tmp_path / "in"
    (source / "below").mkdir(parents=True)
    (source / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo;\rthree\n\nfour")
    (source / "b.txt.gz").write_bytes(gzip.compress("fünf\nsix;\n".encode()))
    (source / "c.log").write_bytes(b"bad \xff byte\n")
    (source / "empty.txt").write_bytes(b"")
    (source / "below" / "d.txt").write_bytes(b"below\n")
    compare(spark, cluster, source, tmp_path, "text", "", options)


@pytest.mark.row("ends.4")
def test_json_directory_gives_the_rows_of_spark(spark: SparkSession, cluster: MiniCluster, tmp_path: Path) -> None:
    source = tmp_path / "in" / "country=DE"
    source.mkdir(parents=True)
    lines = [
        '{"n": 1, "price": 1.005, "name": "a", "at": "2026-01-02T03:04:05.678+02:00", "inner": {"tags": ["x", null]}}',
        '{"n": 2.0, "name": 5, "day": "1500-02-28", "at": "2026-01-02 03:04:05", "inner": {"tags": "none"}}',
        '{"n": 99999999999, "flag": "yes", "price": "2.5", "inner": null}',
        '{"N": 1, "unknown": [1, {}]}',
        "{bad",
        "",
        "   ",
        "null",
        "17",
        '[{"n": 3}, {"n": 4, "flag": true}]',
        "[]",
        "[1]",
        '{"n": 5} and more',
    ]
    (source / "a.json").write_text("\n".join(lines))
    (source / "b.json.gz").write_bytes(gzip.compress(b'{"n": 6, "name": "f\\u00fcnf"}\r\n{"n": 7}'))
    for codec in ("snappy", "deflate"):  # more than a block
        written = spark.range(30, numPartitions=1).selectExpr("INT(id) AS n", "repeat(uuid(), 1000) AS name")
        written.write.mode("append").option("compression", codec).json(str(source))
    schema = (
        "n INT, price DECIMAL(10,2), name STRING, flag BOOLEAN, day DATE, at TIMESTAMP, "
        "inner STRUCT<tags: ARRAY<STRING>>, country STRING"
    )
    assert compare(spark, cluster, tmp_path / "in", tmp_path, "json", schema, {}).total() > 70
