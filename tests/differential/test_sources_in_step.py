"""Streams that meet batch by batch, in jobs that are killed, rescaled and continued from savepoints, beside Spark."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.scheduler.replacement import ParallelismBounds
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import UNALIGNED, program_of
from tests.support.pipelines import sources_in_step
from tests.support.side_by_side import ROCKSDB

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

UNEQUAL = {"left": 6, "right": 4}


class Run:
    """Queries in Spark, and in jobs of the engine that continue each other."""

    def __init__(self, cluster: MiniCluster, directory: Path, names: str, continues: str = "yes") -> None:
        self.cluster = cluster
        self.directory = directory
        self.names = names
        self.continues = continues
        self.slow = directory / "slow"
        self.job_id = ""

    def in_spark(self, spark: SparkSession) -> list[Counter[str]]:
        session = spark.newSession()
        session.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
        if sources_in_step.PROCESSED in self.names:  # processors have no other state store
            session.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
        output = self.directory / "spark"
        for query in sources_in_step.started(session, str(self.directory), str(output), self.names, "yes"):
            query.awaitTermination()
        return self.rows(output)

    def submit(self, *, parallelism: int, unaligned: bool, savepoint: str | None = None, **changes: str) -> None:
        configuration = {
            **UNALIGNED,
            "execution.checkpointing.unaligned.enabled": str(unaligned).lower(),
            "execution.checkpointing.interval": "20 ms",
            "execution.checkpointing.min-pause": "0 ms",
            "taskmanager.network.buffer.max-rows": "16",
            **{key.replace("__", ".").replace("_", "-"): value for key, value in changes.items()},
        }
        arguments = [str(self.directory), str(self.directory / "engine"), self.names, self.continues]
        self.job_id = self.cluster.submit(
            program_of("sources_in_step"),
            entry="sources_in_step:pipeline",
            arguments=arguments,
            configuration=configuration,
            parallelism=parallelism,
            savepoint=savepoint,
        )

    def kill(self, choice: Random) -> None:
        """Kills a worker behind a few more checkpoints, unless the job ends before."""
        target = self.cluster.completed_checkpoints(self.job_id) + choice.randrange(1, 4)
        self._until(lambda: self.cluster.completed_checkpoints(self.job_id) >= target, f"checkpoint {target}")
        restarts = self.cluster.restarts(self.job_id)
        if pids := self.cluster.worker_pids(self.job_id):
            os.kill(choice.choice(pids), signal.SIGKILL)
            self._until(lambda: self.cluster.restarts(self.job_id) > restarts, "a restart")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        self.cluster.wait_until(
            lambda: condition() or self.cluster.status(self.job_id) is JobStatus.FINISHED, f"{what} or the end"
        )

    def rescale(self, parallelism: int) -> None:
        graph = self.cluster.call(self._graph())
        wanted = {each.id: ParallelismBounds(1, min(parallelism, each.greatest_parallelism)) for each in graph.vertices}
        self.cluster.call(self.cluster.dispatcher.update_resource_requirements(self.job_id, wanted))
        self.cluster.wait_for_status(self.job_id, JobStatus.RUNNING)

    async def _graph(self) -> JobGraph:
        return self.cluster.dispatcher.jobs[self.job_id].living().accepted_plan.graph

    def in_flight(self) -> int:
        history = self.cluster.of_job(self.job_id, lambda job: job.checkpoint_statistics()).history
        return sum(checkpoint.persisted_data for checkpoint in history)

    def rows(self, output: Path) -> list[Counter[str]]:
        found = []
        for number in range(len(self.names.split(","))):
            files = sorted((output / str(number)).glob("[!._]*.parquet"))
            found.append(Counter(str(row) for file in files for row in pq.read_table(file).to_pylist()))
        return found

    def is_spark(self, spark: SparkSession) -> None:
        """The job ends with the rows of Spark."""
        self.slow.unlink(missing_ok=True)
        self.cluster.wait_for_status(self.job_id, JobStatus.FINISHED)
        given, wanted = self.rows(self.directory / "engine"), self.in_spark(spark)
        for name, ours, theirs in zip(self.names.split(","), given, wanted, strict=True):
            assert (ours - theirs, theirs - ours) == (Counter(), Counter()), f"more and missing rows of {name}"
            assert theirs


NAMES = ("union", "join", "windows", "filtered", sources_in_step.FURTHEST)


def slow_run(cluster: MiniCluster, directory: Path, name: str, continues: str = "yes") -> Run:
    """A query whose streams have batches of unequal number, which goes slowly until its rows are compared."""
    sources_in_step.write_batches(directory, batches=UNEQUAL, rows=300)
    run = Run(cluster, directory, name, continues)
    run.slow.touch()
    return run


def test_the_time_of_a_stream_is_that_of_rows_which_no_filter_drops_in_all_subtasks(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """The latest rows of the two streams of one query are in different subtasks, and filtered out in the others.

    Three of these read the same frames.
    """
    names = sources_in_step.UNEVEN, "filtered", *sources_in_step.OF_ONE_FRAME, sources_in_step.PROCESSED
    batches = {f"{stream}{number}": 6 for stream in ("left", "right") for number in (1, 2, 5)}
    sources_in_step.write_batches(tmp_path, batches={"left": 6, "right": 12, **batches}, rows=100, files=2)
    run = Run(cluster, tmp_path, ",".join(names))
    rare = {"execution__checkpointing__interval": "1 h", "execution__stateful_processor__trigger__type": "CHECKPOINT"}
    run.submit(parallelism=2, unaligned=False, **rare)
    run.is_spark(spark)


@pytest.mark.long
@pytest.mark.parametrize("unaligned", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_spark_through_kills(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, name: str, unaligned: bool
) -> None:
    """Also while one source has ended and the other one has not."""
    run = slow_run(cluster, tmp_path, name)
    run.submit(parallelism=2, unaligned=unaligned)
    choice = Random(name)
    for _ in range(6):
        run.kill(choice)
    overtaken = run.in_flight()
    run.is_spark(spark)
    assert cluster.restarts(run.job_id) >= 3
    assert bool(overtaken) == unaligned


@pytest.mark.long
@pytest.mark.parametrize("unaligned", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_spark_through_rescales(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, name: str, unaligned: bool
) -> None:
    run = slow_run(cluster, tmp_path, name)
    run.submit(parallelism=2, unaligned=unaligned)
    for parallelism in (3, 1, 2):
        cluster.wait_for_checkpoints(run.job_id, 2)
        run.rescale(parallelism)
    run.is_spark(spark)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_spark_when_savepoints_in_a_batch_are_restored_with_another_parallelism(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, name: str
) -> None:
    run = slow_run(cluster, tmp_path, name, continues="")
    savepoint = None
    for parallelism in (2, 3, 1):
        run.submit(parallelism=parallelism, unaligned=True, savepoint=savepoint)
        cluster.wait_for_checkpoints(run.job_id, 2)
        savepoint = cluster.savepoint(run.job_id, tmp_path / "savepoints", stop=True)
    run.submit(parallelism=2, unaligned=False, savepoint=savepoint)
    run.is_spark(spark)


@pytest.mark.long
@pytest.mark.parametrize("interval", ["20 ms", "1 h"])
def test_queries_of_one_program_have_the_rows_of_spark_and_do_not_wait_for_each_other(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, interval: str
) -> None:
    batches = {"left": 2, "right": 1, "left1": 9, "right1": 7}
    sources_in_step.write_batches(tmp_path, batches=batches, rows=60)
    run = Run(cluster, tmp_path, "union,join")
    run.submit(parallelism=2, unaligned=True, execution__checkpointing__interval=interval)
    run.is_spark(spark)
