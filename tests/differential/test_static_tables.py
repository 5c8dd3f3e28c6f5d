"""Joins of streams with static tables in the engine, and of the same rows in Spark."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.frontend import catalog_tables
from ckpt_runtime.frontend.analysis import ANALYZER
from ckpt_runtime.frontend.catalog_tables import StaticTables
from ckpt_runtime.frontend.typed_plan import AnalysisRequest, Files
from ckpt_runtime.jobmaster.gateway_values import ConfigurationRequest, SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast, wait_for_restarts
from tests.support.parity import shown
from tests.support.pipelines import static_programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "static_programs.py"


def write(directory: Path) -> None:
    """200 events, and static tables with nulls, repeated keys and keys that no event has."""
    choice = Random(4)
    start = datetime(2025, 12, 30, tzinfo=UTC)
    events = [
        {
            "id": at,
            "k": choice.choice(["a", "b", "c", "d", None]),
            "n": choice.choice([0, 1, 2, 3, None]),
            "price": choice.choice([Decimal("1.50"), Decimal("2.00"), Decimal("-3.25"), None]),
            "at": start + timedelta(minutes=30 * at),
            "tags": choice.choice([["x", None], ["x"], [], None]),
            "ratio": choice.choice([-0.0, float("nan"), 1.5, 2.5, None]),
        }
        for at in range(200)
    ]
    kinds = [
        *(("id", pa.int64()), ("k", pa.string()), ("n", pa.int32()), ("price", pa.decimal128(10, 2))),
        *(("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string())), ("ratio", pa.float64())),
    ]
    people = pa.table(
        {
            "k": ["a", "b", "b", None, "z"],
            "name": pa.array(["ann", "bob", None, "eve", "zoe"]).dictionary_encode(),
            "country": ["a", "b", "b", "c", None],
            "born": pa.array([0, -719_162, None, 20_000, 1], pa.date32()),
        }
    )
    for name, table in (("events", pa.Table.from_pylist(events, pa.schema(kinds))), ("people", people)):
        (directory / name).mkdir()
        pq.write_table(table, directory / name / "rows.parquet")
    (directory / "codes.csv").write_text("code,name\n1,one\n2,two\n3,three\n9,nine\n")
    (directory / "labels.json").write_text('{"k": "a", "label": "A"}\n{"k": "b"}\n{"k": null, "label": "?"}\n')
    (directory / "lines.txt").write_text("b\nc\nc\n")


def rows_of_spark(spark: SparkSession, directory: Path, names: Sequence[str]) -> dict[str, Counter[str]]:
    events = spark.read.schema(static_programs.EVENTS).parquet(str(directory / "events"))
    frames = static_programs.queries(spark, events, str(directory))
    return {name: Counter(str(shown(row)) for row in frames[name].toArrow().to_pylist()) for name in names}


def result(directory: Path, name: str) -> Counter[str]:
    return Counter(str(shown(row)) for row in pq.read_table(directory / "out" / name).to_pylist())


FEW = ("using", "collected", "written", "tables", "anti", "aggregated", "mixed", "not_in", "one_value")
OTHERS = (
    *("right", "nulls_match", "decimals", "sql", "in_or"),
    *("joined_statics", "two_in_a_row", "range", "between", "pandas", "times", "doubles", "nothing", "text"),
    *("sql_values", "with", "in", "exists", "after", "left", "semi", "cross", "arrays", "empty", "value_of_key"),
)


@pytest.mark.row("ps.5")
@pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_joins_with_static_tables_give_the_rows_of_spark_for_each_type_condition_and_kind_of_table(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, names: tuple[str, ...]
) -> None:
    write(tmp_path)
    job = cluster.submit(
        PROGRAM,
        arguments=[str(tmp_path), str(tmp_path / "out"), ",".join(names)],
        configuration=fast(restart_strategy__type="none"),
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    expected = rows_of_spark(spark, tmp_path, names)
    for name, wanted in expected.items():
        given = result(tmp_path, name)
        assert (not wanted) == (name == "nothing"), name
        if name == "after":  # windows that the watermark has not reached stay in state
            assert given, name
            assert not given - wanted, name
        else:
            assert given == wanted, name


@pytest.mark.row("ps.5")
def test_job_keeps_its_static_tables_through_a_killed_worker_and_a_change_of_its_configuration(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    write(tmp_path)
    [wanted] = rows_of_spark(spark, tmp_path, ["left"]).values()
    job = cluster.submit(
        PROGRAM,
        arguments=[str(tmp_path), str(tmp_path / "out"), "left", "30"],
        configuration=fast(),
        parallelism=2,
    )
    cluster.wait_for_checkpoints(job, 1)
    # From now on Spark would read other rows.
    other = pa.table({"k": ["a"], "name": ["new"], "country": ["a"], "born": pa.nulls(1, pa.date32())})
    pq.write_table(other, tmp_path / "people" / "rows.parquet")
    os.kill(cluster.worker_pids(job)[0], signal.SIGKILL)
    wait_for_restarts(cluster, job, 1)
    request = ConfigurationRequest({"execution.checkpointing.interval": "300 ms"}, None, partial=True)
    cluster.call(cluster.dispatcher.change_job_config(job, request))
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert result(tmp_path, "left") == wanted


@pytest.mark.row("ps.2", "ps.5")
@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("events.union(events_table)", "a stream and a static table cannot be combined by union"),
        ("people.join(events, 'k', 'left')", "LeftOuter needs the stream on the left"),
        pytest.param("events.join(people, 'k', 'full')", "a join of type FullOuter", marks=pytest.mark.long),
        pytest.param("people", "the frame reads no stream", marks=pytest.mark.long),
        ("events.join(people.select(F.udf(lambda k: k)('k').alias('k')), 'k')", "a Python function in a static table"),
        pytest.param("events.join(spark.sql('SHOW TABLES'), F.lit(True))", "the operation", marks=pytest.mark.long),
        (
            "spark.sql('SELECT id FROM events WHERE id > (SELECT count(*) FROM people WHERE name < events.k)')",
            "a scalar subquery that depends on the row",
        ),
        pytest.param("spark.sql('SELECT DISTINCT k FROM events')", "SELECT DISTINCT", marks=pytest.mark.long),
        pytest.param(
            "events.join(spark.createDataFrame([('a' * 5_000_000,)], 'k STRING'), 'k')",
            "createDataFrame",
            marks=pytest.mark.long,
        ),
        ("events.join(spark.read.parquet('/no/such/file'), 'k')", "PATH_NOT_FOUND"),
        ("people.write.bucketBy(2, 'k').saveAsTable('people') or events", "a program writes csv, json, orc, parquet"),
    ],
)
def test_static_table_that_cannot_be_joined_is_refused_by_name(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, query: str, named: str
) -> None:
    write(tmp_path)
    program = tmp_path / "refused.py"
    program.write_text(
        "from pyspark.sql import functions as F\n"
        "def pipeline(spark, directory):\n"
        f"    events = spark.readStream.format('replay').schema({static_programs.EVENTS!r})\n"
        "    events = events.load(directory + '/events')\n"
        "    events_table = spark.read.parquet(directory + '/events')\n"
        "    people = spark.read.parquet(directory + '/people')\n"
        "    events.createOrReplaceTempView('events')\n"
        "    people.createOrReplaceTempView('people')\n"
        f"    ({query}).writeStream.format('console').start()\n"
    )
    with pytest.raises(SubmissionFailed, match=named):
        cluster.submit(program, arguments=[str(tmp_path)])


@pytest.mark.row("ps.5")
def test_static_table_beyond_its_limit_or_not_read_in_time_is_refused_and_names_the_option(
    spark: SparkSession,
) -> None:
    from pyspark.sql.connect.proto import Relation

    relation = Relation()
    relation.range.end, relation.range.step = 100_000, 1
    request = AnalysisRequest(relation.SerializeToString(), with_rows=True)
    assert catalog_tables.SIZE_OPTION in ANALYZER.analyze(request, StaticTables(size_bytes=300_000)).unsupported
    assert catalog_tables.TIME_OPTION in ANALYZER.analyze(request, StaticTables(timeout_s=0.001)).unsupported
    fits = StaticTables()
    [node] = ANALYZER.analyze(request, fits).nodes
    assert list(fits.files) == [node.digest]
    relation.range.end = 200_000
    collected = AnalysisRequest(relation.SerializeToString(), collected=True)
    assert "the program collects have more than" in ANALYZER.analyze(collected, StaticTables()).unsupported
    written = AnalysisRequest(relation.SerializeToString(), collected=Files("parquet", "/no/directory", "error"))
    assert "only when it is submitted" in ANALYZER.analyze(written, StaticTables()).unsupported
