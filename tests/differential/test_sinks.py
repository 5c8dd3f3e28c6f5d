"""Sinks of PySpark programs: content exact through kills, read by something else than the engine."""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.jobmaster.gateway_errors import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.docs.markdown import blocks
from tests.support.jobs import PIPELINES, fast

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 20_000
[EXAMPLE] = [block for block in blocks("python") if "class SqliteSink" in block.text]


def numbers(directory: Path, rows: int = ROWS) -> str:
    source = directory / "numbers.parquet"
    pq.write_table(pa.table({"n": pa.array(range(rows), pa.int64())}), source)
    return str(source)


def in_database(database: Path) -> list[tuple[object, ...]]:
    with sqlite3.connect(database) as connection:
        return connection.execute("SELECT * FROM rows ORDER BY 1").fetchall()


@pytest.mark.row("ends.5")
def test_sink_of_the_documentation_writes_the_rows_of_a_program(cluster: MiniCluster, tmp_path: Path) -> None:
    program, database = tmp_path / "documented.py", tmp_path / "orders.db"
    program.write_text(EXAMPLE.text)
    source = tmp_path / "orders.parquet"
    pq.write_table(pa.table({"customer": ["a", None, "b"], "amount": [1.0, 2.5, None]}), source)
    job = cluster.submit(program, arguments=[str(source), str(database)], configuration=fast())
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert in_database(database) == [(None, 2.5), ("a", 1.0), ("b", None)]
    with pytest.raises(SubmissionFailed, match=r"SqliteSink: option 'path' is the absolute path of a database"):
        cluster.submit(program, arguments=[str(source), "orders.db"])


@pytest.mark.row("ends.5")
def test_sink_whose_process_is_killed_at_each_step_has_every_row_once(cluster: MiniCluster, tmp_path: Path) -> None:
    """Then the job stops with a savepoint, from which two jobs start: what the savepoint covers is there once."""
    directory, faults, database = tmp_path / "program", tmp_path / "faults", tmp_path / "rows.db"
    directory.mkdir()
    faults.mkdir()
    (directory / "documented.py").write_text(EXAMPLE.text)
    shutil.copy(PIPELINES / "killed_sink.py", directory)
    source = numbers(tmp_path)

    def start(rate: int, target: Path, savepoint: str | None = None) -> str:
        arguments = [source, str(rate), str(target), str(faults)]
        return cluster.submit(
            directory,
            entry="killed_sink:pipeline",
            arguments=arguments,
            configuration=fast(execution__checkpointing__interval="100ms"),
            parallelism=2,
            savepoint=savepoint,
        )

    job = start(500, database)
    cluster.wait_for_checkpoints(job, 2)
    for step in ("write", "prepare", "notified", "committed", "notified"):
        (faults / step).touch()
        cluster.wait_until(lambda step=step: not (faults / step).exists(), f"a kill at {step}")  # type: ignore[misc]
    cluster.wait_for_checkpoints(job, 1)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    before = in_database(database)
    assert 0 < len(before) < ROWS
    assert len(set(before)) == len(before)
    copy = tmp_path / "copy.db"
    shutil.copy(database, copy)
    for target in (database, copy):
        cluster.wait_for_status(start(0, target, savepoint), JobStatus.FINISHED)
        assert [n for (n,) in in_database(target)] == list(range(ROWS))


@pytest.mark.row("ends.5")
def test_partitioned_directory_is_read_by_spark_as_its_own(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """Texts that need escaping, nulls, and more values than files may be open."""
    days = [date(2026, 1, 1), None, date(1969, 12, 31)]
    countries = ["AT", "a/b=c:d", "100%", "", None, "é", *(f"c{at}" for at in range(70))]
    rows = [{"n": at, "country": countries[at % len(countries)], "day": days[at % 3]} for at in range(600)]
    schema = pa.schema([("n", pa.int64()), ("country", pa.string()), ("day", pa.date32())])
    source, ours, theirs = tmp_path / "rows.parquet", tmp_path / "ours", tmp_path / "theirs"
    pq.write_table(pa.Table.from_pylist(rows, schema), source)
    program = PIPELINES / "partitioned_sink.py"
    job = cluster.submit(program, arguments=[str(source), str(ours)], configuration=fast(), parallelism=2)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    frame = spark.read.parquet(str(source))
    frame.write.partitionBy("country", "day").parquet(str(theirs))

    def directories(root: Path) -> set[str]:
        return {str(path.parent.relative_to(root)) for path in root.rglob("*.parquet")}

    def read(root: Path) -> Counter[str]:
        found = spark.read.schema("n BIGINT, country STRING, day DATE").parquet(str(root))
        return Counter(map(str, found.toArrow().to_pylist()))

    assert directories(ours) == directories(theirs)
    assert read(ours) == read(theirs)
    assert not list(ours.rglob(".part-*"))


@pytest.mark.row("ends.5")
@pytest.mark.parametrize(
    ("format_", "columns", "problem"),
    [
        ("parquet", "missing", "no column 'missing'"),
        ("parquet", "n,country,day", "all columns are named"),
        ("noop", "country", "'noop' has no directories"),
    ],
)
def test_partitions_that_a_sink_cannot_write_are_refused_when_the_program_is_planned(
    cluster: MiniCluster, tmp_path: Path, format_: str, columns: str, problem: str
) -> None:
    arguments = [str(tmp_path / "rows.parquet"), str(tmp_path / "out"), format_, columns]
    with pytest.raises(SubmissionFailed, match=problem):
        cluster.submit(PIPELINES / "partitioned_sink.py", arguments=arguments)
