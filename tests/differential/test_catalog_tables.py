"""Tables of Spark's catalog that streams write and read, by Spark and by the engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.jobmaster.gateway_values import RunRequest, SubmissionFailed
from ckpt_runtime.jobmaster.planning import PlanPreview
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.parity import shown
from tests.support.pipelines import table_programs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "table_programs.py"


def run(cluster: MiniCluster, function: str, *arguments: object, parallelism: int = 1) -> None:
    job = cluster.submit(
        PROGRAM,
        entry=f"table_programs:{function}",
        arguments=[str(argument) for argument in arguments],
        configuration=fast(restart_strategy__type="none"),
        parallelism=parallelism,
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)


def rows(frame: DataFrame) -> Counter[str]:
    return Counter(str(shown(row)) for row in frame.toArrow().to_pylist())


def facts(spark: SparkSession, table: str) -> list[tuple[str, str]]:
    """The entry of a table in the catalog, without what differs between two tables."""
    described = spark.sql(f"DESCRIBE TABLE EXTENDED {table}").collect()
    kept = [(row.col_name, row.data_type) for row in described]
    varying = ("Created Time", "Location", "Table", "Created By", "Partition Provider", "Last Access")
    return [each for each in kept if each[0] not in varying]


@pytest.mark.row("ps.1")
@pytest.mark.parametrize(
    ("format_", "columns"),
    [
        ("", "country,quantity"),
        pytest.param("json", "country", marks=pytest.mark.long),
        pytest.param("parquet", "", marks=pytest.mark.long),
        pytest.param("csv", "", marks=pytest.mark.long),
    ],
)
def test_table_that_a_stream_writes_has_the_entry_and_the_rows_of_the_one_that_spark_writes(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path, format_: str, columns: str
) -> None:
    name = f"written_{format_}_{len(columns)}"
    stream = spark.readStream.schema(table_programs.SCHEMA).parquet(orders)
    checkpoints = str(tmp_path / "spark")
    query = table_programs.write(stream, f"spark_{name}", format_, columns, checkpointLocation=checkpoints)
    query.awaitTermination()
    run(cluster, "pipeline", orders, f"engine_{name}", format_, columns, parallelism=2)
    assert facts(spark, f"engine_{name}") == facts(spark, f"spark_{name}")
    wanted = rows(spark.table(f"spark_{name}"))
    assert wanted.total() == 2_000
    assert rows(spark.read.table(f"engine_{name}")) == wanted
    # As in Spark, a second query adds its rows to a table that exists.
    run(cluster, "pipeline", orders, f"engine_{name}", format_, columns)
    spark.catalog.refreshTable(f"engine_{name}")
    assert spark.table(f"engine_{name}").count() == 4_000
    run(cluster, "copy", f"default.engine_{name}", tmp_path / "copy")
    given = rows(spark.read.schema(spark.table(f"engine_{name}").schema).parquet(str(tmp_path / "copy")))
    assert given == wanted + wanted
    for table in (f"engine_{name}", f"spark_{name}"):
        spark.sql(f"DROP TABLE {table}")


@pytest.mark.row("ps.1")
def test_table_with_a_path_is_written_to_that_path_and_read_by_streams_of_the_program(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path
) -> None:
    run(cluster, "pipeline", orders, "lies_there", "", "", tmp_path / "it's there")
    assert pq.read_table(tmp_path / "it's there").num_rows == 2_000
    assert dict(facts(spark, "lies_there"))["Type"] == "EXTERNAL"
    assert spark.table("lies_there").count() == 2_000
    spark.sql("DROP TABLE lies_there")
    job = cluster.submit(
        PROGRAM,
        entry="table_programs:both",
        arguments=[orders, "read_again", str(tmp_path / "out")],
        configuration=fast(),
    )
    output = tmp_path / "out"
    cluster.wait_until(
        lambda: sum(pq.read_metadata(file).num_rows for file in output.glob("*.parquet")) == 2_000,
        "all rows of the table to be read",
    )
    cluster.call(cluster.dispatcher.cancel_job(job))
    cluster.wait_for_status(job, JobStatus.CANCELED)
    spark.sql("DROP TABLE read_again")


@pytest.mark.row("ps.1", "ps.2")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("taken", "json", ""), "the table spark_catalog.default.taken has the format 'parquet'"),
        pytest.param(("taken", "", "country"), "name the same columns", marks=pytest.mark.long),
        (("looked_at", "", ""), "toTable to the view spark_catalog.default.looked_at"),
        pytest.param(("listed", "", "country"), "spark.sql.hive.manageFilesourcePartitions", marks=pytest.mark.long),
        (("nowhere.at_all", "", ""), "SCHEMA_NOT_FOUND"),
        pytest.param(("other.default.t", "", ""), "the catalog other", marks=pytest.mark.long),
        pytest.param(("t", "console", ""), "'console' in toTable", marks=pytest.mark.long),
        pytest.param(("not a name", "", ""), "PARSE_SYNTAX_ERROR", marks=pytest.mark.long),
    ],
)
def test_table_that_a_stream_cannot_write_is_refused_and_none_is_created(
    spark: SparkSession, cluster: MiniCluster, orders: str, arguments: tuple[str, ...], named: str
) -> None:
    spark.sql("CREATE TABLE IF NOT EXISTS taken (quantity INT) USING parquet")
    spark.sql("CREATE OR REPLACE VIEW looked_at AS SELECT * FROM taken")
    spark.sql("CREATE TABLE IF NOT EXISTS listed (q INT, country STRING) USING parquet PARTITIONED BY (country)")
    before = spark.sql("SHOW TABLES").collect()
    with pytest.raises(SubmissionFailed, match=named):
        cluster.submit(PROGRAM, arguments=[orders, *arguments])
    assert spark.sql("SHOW TABLES").collect() == before


@pytest.mark.row("ps.1")
def test_plan_that_is_only_shown_creates_no_table(spark: SparkSession, cluster: MiniCluster, orders: str) -> None:
    async def planned() -> PlanPreview:
        name, archive = pack_pipeline(PROGRAM)

        async def content() -> AsyncIterator[bytes]:
            yield archive

        stored = await cluster.dispatcher.store_pipeline(name, content())
        arguments = (orders, "only_planned", "", "")
        return await cluster.dispatcher.plan_pipeline(RunRequest(stored.id, arguments=arguments))

    assert any(vertex.operators[-1].kind == "sink" for vertex in cluster.call(planned()).graph.vertices)
    assert not spark.catalog.tableExists("only_planned")
