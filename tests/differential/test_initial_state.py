"""Processors with an initial state, in Spark and in the engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast, wait_for_restarts
from tests.support.pipelines import initial_state
from tests.support.side_by_side import ROCKSDB

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "initial_state.py"


def last_rows(directory: Path) -> dict[tuple[Any, Any], dict[str, Any]]:
    """The last result of each key: the one with the most orders."""
    last: dict[tuple[Any, Any], dict[str, Any]] = {}
    for row in sorted(pq.read_table(directory).to_pylist(), key=lambda row: row["orders"]):
        last[row["country"], row["quantity"]] = row
    return last


def in_spark(spark: SparkSession, orders: str, directory: Path, form: str) -> dict[tuple[Any, Any], dict[str, Any]]:
    session = spark.newSession()
    session.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    session.conf.set("spark.sql.shuffle.partitions", "1")
    stream = session.readStream.schema(initial_state.SCHEMA).parquet(orders)
    frame = initial_state.results(stream, initial_state.initial_state(session, orders), form)

    def keep(batch: Any, _number: int) -> None:
        batch.write.mode("append").parquet(str(directory / "spark"))

    writer = frame.writeStream.foreachBatch(keep).outputMode("update").trigger(availableNow=True)
    writer.option("checkpointLocation", str(directory / "spark-checkpoint")).start().awaitTermination()
    return last_rows(directory / "spark")


@pytest.mark.row("ps.3")
@pytest.mark.parametrize("form", ["rows", pytest.param("frames", marks=pytest.mark.long)])
def test_processor_gets_the_initial_state_of_each_key_as_in_spark(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path, form: str
) -> None:
    job = cluster.submit(
        PROGRAM, arguments=[orders, str(tmp_path / "engine"), form], configuration=fast(), parallelism=2
    )
    wanted = in_spark(spark, orders, tmp_path, form)
    assert {row["calls"] for row in wanted.values()} >= {0, 1, 2}
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert last_rows(tmp_path / "engine") == wanted


@pytest.mark.row("ps.3")
@pytest.mark.parametrize(
    ("backend", "parallelism"), [("rocksdb", (2, 1)), pytest.param("hashmap", (1, 2), marks=pytest.mark.long)]
)
def test_initial_state_counts_once_when_a_worker_is_killed_and_the_job_is_rescaled_from_a_savepoint(
    cluster: MiniCluster, spark: SparkSession, orders: str, tmp_path: Path, backend: str, parallelism: tuple[int, int]
) -> None:
    def submit(output: str, parallelism: int, rate: int = 0, savepoint: str | None = None) -> str:
        return cluster.submit(
            PROGRAM,
            arguments=[orders, str(tmp_path / output), "rows", str(rate)],
            configuration=fast(state__backend__type=backend),
            parallelism=parallelism,
            savepoint=savepoint,
        )

    undisturbed = submit("undisturbed", 1)
    job = submit("out", parallelism[0], rate=30)
    cluster.wait_for_checkpoints(job, 1)
    os.kill(cluster.worker_pids(job)[0], signal.SIGKILL)
    wait_for_restarts(cluster, job, 1)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    cluster.wait_for_status(submit("out", parallelism[1], savepoint=savepoint), JobStatus.FINISHED)
    cluster.wait_for_status(undisturbed, JobStatus.FINISHED)
    wanted = last_rows(tmp_path / "undisturbed")
    assert max(row["calls"] for row in wanted.values()) >= 2
    assert last_rows(tmp_path / "out") == wanted


@pytest.mark.row("ps.2", "ps.3")
@pytest.mark.parametrize(
    ("initial", "named"),
    [("rows", "initialState: it must be a static frame"), ("spark.range(3)", "initialState|INITIAL_STATE|grouping")],
)
def test_initial_state_of_a_stream_or_with_keys_of_another_type_is_refused(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path, initial: str, named: str
) -> None:
    program = tmp_path / "refused.py"
    program.write_text(
        f"""from pyspark.sql.streaming import StatefulProcessor

class Processor(StatefulProcessor):
    def init(self, handle): ...
    def handleInputRows(self, key, rows, timerValues): ...
    def close(self): ...

def pipeline(spark):
    rows = spark.readStream.format("replay").load({orders!r})
    initial = {initial}
    grouped = initial.groupBy(initial.columns[0])
    rows.groupBy("country").transformWithState(
        Processor(), "n INT", "Append", "None", initialState=grouped
    ).writeStream.start({str(tmp_path / "out")!r})
"""
    )
    with pytest.raises(SubmissionFailed, match=named):
        cluster.submit(program)
