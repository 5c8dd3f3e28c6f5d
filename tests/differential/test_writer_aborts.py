"""What a task's ``write`` has returned goes to ``abort`` when another task fails: in Spark and in the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES
from tests.support.pipelines.early_writer import PARTITIONS, Early

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def in_spark(spark: SparkSession, directory: Path) -> None:
    """The last task starts when an earlier one has ended."""
    spark.dataSource.register(Early)
    given = {"directory": str(directory), "failing": str(PARTITIONS - 1)}
    rows = spark.readStream.format("early").options(**given).load()
    state = str(directory / "state")
    query = rows.writeStream.format("early").options(**given).option("checkpointLocation", state).start()
    try:
        with pytest.raises(StreamingQueryException, match="this task fails"):
            query.awaitTermination(120)
    finally:
        query.stop()


def in_the_engine(cluster: MiniCluster, directory: Path) -> None:
    job = cluster.submit(
        PIPELINES,
        entry="early_writer:pipeline",
        arguments=[str(directory), "1"],
        configuration={"execution.checkpointing.interval": "1 h", "restart-strategy.type": "none"},
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.FAILED, timeout_s=120)


@pytest.mark.row("io.2")
def test_what_a_task_returned_before_another_one_failed(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    for name, batch in (("spark", 0), ("engine", 1)):
        directory = tmp_path / name
        directory.mkdir()
        if name == "spark":
            in_spark(spark, directory)
        else:
            in_the_engine(cluster, directory)
        [told] = (directory / "aborted").read_text().splitlines()
        batch_id, files = json.loads(told)
        assert (batch_id, bool(files)) == (batch, True), name
        assert not list(directory.glob("staged-*")), name
        assert not (directory / "committed").exists(), name
