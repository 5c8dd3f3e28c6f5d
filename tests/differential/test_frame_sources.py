"""DataFrames of the session's own Spark as streams: the rows that Spark itself reads, through kills and a rescale."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, all_run, fast
from tests.support.outputs import hidden, visible
from tests.support.pipelines.spark_frames import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "spark_frames.py"


def grow(spark: SparkSession, source: Path, first: int, rows: int) -> None:
    """Adds rows to the table."""
    frame = spark.range(first, first + rows, 1, 2).selectExpr(
        "id AS n",
        "IF(id % 7 = 0, NULL, concat('é', id)) AS name",
        "CAST(id / 8 AS DECIMAL(10,2)) AS price",
        "timestamp_seconds(id * 100000) AS at",
        "IF(id % 5 = 0, NULL, array(CAST(id AS STRING), NULL)) AS tags",
    )
    frame.write.mode("append").parquet(str(source))


def expected(spark: SparkSession, source: Path, condition: str) -> Counter[str]:
    rows = spark.read.schema(SCHEMA).parquet(str(source)).where(condition).selectExpr("*", "n * 2 AS twice")
    return Counter(map(str, rows.toArrow().to_pylist()))


def written(output: Path) -> Counter[str]:
    names = [name for name in output.glob("*.parquet") if not name.name.startswith((".", "_"))]
    return Counter(str(row) for name in names for row in pq.ParquetFile(name).read().to_pylist())


@pytest.mark.long
@pytest.mark.row("ends.2")
def test_frame_of_spark_is_a_bounded_stream(spark: SparkSession, cluster: MiniCluster, tmp_path: Path) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    grow(spark, source, 0, 3_000)
    job = cluster.submit(PROGRAM, arguments=["whole", str(source), str(output)], configuration=fast(), parallelism=2)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert written(output) == expected(spark, source, "n % 2 = 0")


@pytest.mark.long
@pytest.mark.row("ends.2")
def test_ranges_of_frames_are_read_once_through_kills_and_a_rescale(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    grow(spark, source, 0, 500)
    options = fast(execution__checkpointing__dir=str(tmp_path / "checkpoints"))
    arguments = ["growing", str(source), str(output)]
    job = cluster.submit(PROGRAM, arguments=arguments, configuration=options, parallelism=2)
    for number in range(1, 4):
        cluster.wait_until(lambda: all_run(cluster, job), "all subtasks to run")
        grow(spark, source, 500 * number, 500)
        if number < 3:
            os.kill(cluster.worker_pids(job)[number % 2], signal.SIGKILL)
    cluster.wait_until(lambda: len(visible(output)) >= 2_000, "the rows of all ranges")
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    again = cluster.submit(PROGRAM, arguments=arguments, configuration=options, parallelism=3, savepoint=savepoint)
    grow(spark, source, 2_000, 100)
    cluster.wait_until(lambda: len(visible(output)) >= 2_100, "the rows behind the savepoint")
    cluster.savepoint(again, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(again, JobStatus.FINISHED)
    assert written(output) == expected(spark, source, "true")
    assert hidden(output) == []
