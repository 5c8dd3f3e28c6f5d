"""Output mode complete: the last result is Spark's, in its order, and each result before it is whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, ROCKSDB, fast, wait_for_restarts
from tests.support.parity import shown
from tests.support.pipelines import complete_programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "complete_programs.py"
ORDERED = ("words", "hours", "floats")
WAYS = {
    "hashmap": {},
    "unaligned rocksdb without chains": {
        **ROCKSDB,
        "state.backend.rocksdb.cache.max-rows": "1000",
        "execution.checkpointing.unaligned.enabled": "true",
        "pipeline.operator-chaining.enabled": "false",
    },
}


def listed(rows: list[dict[str, Any]], name: str) -> list[str]:
    texts = [str(shown(row)) for row in rows]
    return texts if name in ORDERED else sorted(texts)


@pytest.fixture(scope="module")
def expected(spark: SparkSession, orders: str) -> dict[str, list[str]]:
    """The result of each query over all rows, which is what Spark's last batch has."""
    rows = spark.read.schema(complete_programs.SCHEMA).parquet(orders)
    frames = complete_programs.queries(rows)
    return {name: listed(frame.toArrow().to_pylist(), name) for name, frame in frames.items()}


@pytest.mark.row("ps.3")
@pytest.mark.parametrize("way", [pytest.param("hashmap", marks=pytest.mark.long), "unaligned rocksdb without chains"])
def test_each_batch_of_complete_mode_is_a_whole_result_and_the_last_one_is_sparks_through_a_kill(
    cluster: MiniCluster, orders: str, expected: dict[str, list[str]], tmp_path: Path, way: str
) -> None:
    configuration = {
        **fast(execution__checkpointing__interval="500ms", execution__checkpointing__dir=str(tmp_path / "checkpoints")),
        **WAYS[way],
    }
    output = tmp_path / "output"

    def start(rate: str, savepoint: str | None = None) -> str:
        arguments = [orders, str(output), rate]
        return cluster.submit(
            PROGRAM, arguments=arguments, configuration=configuration, parallelism=2, savepoint=savepoint
        )

    job = start("10")  # its end is minutes away
    cluster.wait_for_checkpoints(job, 2)
    os.kill(cluster.worker_pids(job)[0], signal.SIGKILL)
    wait_for_restarts(cluster, job, 1)
    cluster.wait_for_checkpoints(job, 1)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(start("0", savepoint), JobStatus.FINISHED)
    for name, rows in expected.items():
        files = sorted((output / name).glob("*.parquet"))
        assert listed(pq.read_table(files[-1]).to_pylist(), name) == rows, name
    counts: dict[Any, int] = {}
    for file in sorted((output / "counted").glob("*.parquet")):
        result = pq.read_table(file).to_pylist()
        found = {row["country"]: row["n"] for row in result}
        assert len(found) == len(result), f"{file} has a group twice"
        assert all(found.get(country, 0) >= n for country, n in counts.items()), f"{file} lacks rows of the one before"
        counts = found
    assert len(list((output / "counted").iterdir())) > 1


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("rows.writeStream.outputMode('complete').format('noop')", "complete needs an aggregation"),
        ("counts.writeStream.outputMode('complete').format('parquet')", "'parquet' does not support complete"),
        ("counts.writeStream.outputMode('complete').format('csv')", "'csv' does not support complete"),
        ("counts.orderBy('n').writeStream.outputMode('update').format('noop')", "orderBy: a stream has no last row"),
        ("rows.limit(3).writeStream.outputMode('update').format('noop')", "limit: it needs output mode append"),
        ("rows.limit(3).hint('parallelism', 2).writeStream.format('noop')", "counted in one subtask"),
        (
            "counts.where('n > 1').hint('parallelism', 2).writeStream.outputMode('complete').format('noop')",
            "after an aggregation in output mode complete the parallelism is 1",
        ),
    ],
)
def test_query_that_has_no_whole_result_is_refused_when_it_is_planned(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path, query: str, message: str
) -> None:
    program = tmp_path / "refused.py"
    program.write_text(
        "from pyspark.sql import functions as F\n"
        "def pipeline(spark):\n"
        f"    rows = spark.readStream.schema({complete_programs.SCHEMA!r}).parquet({orders!r})\n"
        "    counts = rows.groupBy('country').agg(F.count('*').alias('n'))\n"
        f"    {query}.start({str(tmp_path / 'out')!r})\n"
    )
    with pytest.raises(SubmissionFailed, match=message):
        cluster.submit(program, configuration=fast())


def test_result_replaces_the_rows_of_a_delta_table_as_often_as_the_trigger_says(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    program, source, target = tmp_path / "counts.py", tmp_path / "source", tmp_path / "target"
    source.mkdir()
    program.write_text(
        "def pipeline(spark, source, target):\n"
        "    counts = spark.readStream.schema('country STRING').parquet(source).groupBy('country').count()\n"
        "    writer = counts.writeStream.outputMode('complete').format('delta').queryName('counts')\n"
        "    writer.trigger(processingTime='250 milliseconds').start(target)\n"
    )

    def add(name: str, countries: list[str]) -> None:
        pq.write_table(pa.table({"country": countries}), source / f".{name}")
        os.replace(source / f".{name}", source / f"{name}.parquet")

    def rows() -> list[tuple[str, int]]:
        if not deltalake.DeltaTable.is_deltatable(str(target)):
            return []
        found = deltalake.DeltaTable(str(target)).to_pyarrow_table().to_pylist()
        return sorted((row["country"], row["count"]) for row in found)

    add("first", ["a", "b"])
    # No option sets the interval of checkpoints.
    job = cluster.submit(program, arguments=[str(source), str(target)])
    cluster.wait_until(lambda: rows() == [("a", 1), ("b", 1)], "the first result")
    add("second", ["b", "c"])
    batch = spark.read.schema("country STRING").parquet
    cluster.wait_until(lambda: rows() == [("a", 1), ("b", 2), ("c", 1)], "the second result")
    assert rows() == sorted(map(tuple, batch(str(source)).groupBy("country").count().collect()))
    cluster.call(cluster.dispatcher.cancel_job(job))
    cluster.wait_for_status(job, JobStatus.CANCELED)
