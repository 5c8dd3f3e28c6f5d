"""Stream writers whose ``write`` fails, in Spark and in the engine: what goes to ``commit`` and to ``abort``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.streaming import StreamingQuery

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import program_of
from tests.support.pipelines.early_writer import PARTITIONS, Early
from tests.support.pipelines.failing_writers import CASES, GOOD, Failing

pytestmark = [pytest.mark.spark, pytest.mark.slow]


def query_of(spark: SparkSession, source: type, options: Mapping[str, str]) -> StreamingQuery:
    """The source's rows into its own writer, in Spark."""
    spark.dataSource.register(source)  # type: ignore[type-abstract]
    name = source.name()  # type: ignore[attr-defined]
    writer = spark.readStream.format(name).options(**options).load().writeStream.format(name).options(**options)
    return writer.option("checkpointLocation", f"{options['directory']}/state").start()


def failure_of(query: StreamingQuery) -> str:
    try:
        with pytest.raises(StreamingQueryException) as failure:
            query.awaitTermination(120)
    finally:
        query.stop()
    return str(failure.value)


def submitted(cluster: MiniCluster, entry: str, *arguments: str, interval: str, parallelism: int) -> str:
    return cluster.submit(
        program_of(entry),
        entry=f"{entry}:pipeline",
        arguments=list(arguments),
        configuration={"execution.checkpointing.interval": interval, "restart-strategy.type": "none"},
        parallelism=parallelism,
    )


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.row("io.2")
def test_results_of_a_task_are_aborted_when_another_task_fails(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """Spark calls ``abort`` once for all tasks, the engine once in each subtask."""
    theirs, ours = tmp_path / "spark", tmp_path / "engine"
    theirs.mkdir()
    ours.mkdir()
    # The last task starts when an earlier one has ended.
    failed = failure_of(query_of(spark, Early, {"directory": str(theirs), "failing": str(PARTITIONS - 1)}))
    assert "this task fails" in failed
    job = submitted(cluster, "early_writer", str(ours), "1", interval="1 h", parallelism=2)
    cluster.wait_for_status(job, JobStatus.FAILED, timeout_s=120)
    [(batch, files)] = lines(theirs / "aborted")
    assert (batch, bool(files)) == (0, True)
    calls = lines(ours / "aborted")
    assert [batch for batch, _ in calls] == [1, 1]
    assert sorted(len(files) for _, files in calls) == [0, 1]
    # A task of Spark that has not ended yet may leave its file behind the call.
    assert not list(ours.glob("staged-*"))
    for directory in (theirs, ours):
        assert not (directory / "committed").exists(), directory


@pytest.mark.row("io.2")
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.long) if case in ("raises-arrow", "text") else case for case in CASES]
)
def test_writer_aborts_when_the_only_task_fails_after_a_committed_batch(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, case: str
) -> None:
    theirs, ours = tmp_path / "spark", tmp_path / "engine"
    theirs.mkdir()
    ours.mkdir()
    query = query_of(spark, Failing, {"directory": str(theirs), "case": case})
    query.processAllAvailable()
    (theirs / "more").touch()
    failed = failure_of(query)
    job = submitted(cluster, "failing_writers", str(ours), case, interval="100 ms", parallelism=1)
    cluster.wait_until(lambda: lines(ours / "calls"), "the first batch to be committed")
    (ours / "more").touch()
    cluster.wait_for_status(job, JobStatus.FAILED, timeout_s=120)
    assert lines(theirs / "calls") == [["committed", 0, GOOD], ["aborted", 1, [None]]]
    [(commit, first, rows), (abort, second, messages)] = lines(ours / "calls")
    assert (commit, first, rows) == ("committed", 0, GOOD)
    assert (abort, messages) == ("aborted", [None])
    assert second > first
    if case in ("none", "text"):
        kind = "NoneType" if case == "none" else "str"
        text = "[DATA_SOURCE_TYPE_MISMATCH] Expected 'WriterCommitMessage' as the return type of the `write` method, "
        assert f"{text}but got {kind}." in failed
        failure = cluster.of_job(job, lambda job: job.result()).failure
        assert failure is not None
        assert f"{text}but got {kind}." in failure.message
