"""Stateful PySpark programs in Structured Streaming and in the engine, over the same files."""

from __future__ import annotations

import math
import os
import re
import signal
from collections import Counter
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, ROCKSDB, fast, wait_for_restarts
from tests.support.parity import shown
from tests.support.pipelines import window_programs

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "window_programs.py"
KEYS = {"updated": ("start", "country"), "statistics": ("country",)}
"""Queries in update mode: the last row of each key counts, since both systems write others before it."""
SMALL_CACHE = {**ROCKSDB, "state.backend.rocksdb.cache.max-rows": "100"}
WAYS = {
    "hashmap": {},
    "rocksdb": SMALL_CACHE,
    "unaligned rocksdb without chains": {
        **SMALL_CACHE,
        "execution.checkpointing.unaligned.enabled": "true",
        "pipeline.operator-chaining.enabled": "false",
    },
}


def rounded(value: Any) -> Any:
    """Rounds floats to ten digits.

    The parts of a mean or a moment are combined in an order that depends on timing, in Spark, too. A correlation near
    zero is a small difference of such sums, and has two or three digits less than they have. The factor moves values
    such as 1341.2699375 away from the middle between two rounded ones, where the last bit would decide.
    """
    if isinstance(value, float):
        return value if math.isnan(value) or math.isinf(value) else float(f"{value * (1 + 3e-12):.10g}")
    if isinstance(value, list):
        return [rounded(element) for element in value]
    if isinstance(value, dict):
        return {key: rounded(element) for key, element in value.items()}
    return value


def written(file: Path) -> tuple[int, int]:
    """The checkpoint of a file, whose number a savepoint hands on to the next job, and the file's place in it."""
    match = re.search(r"-n(\d+)-[0-9a-f]+-c(\d+)\.", file.name)
    assert match is not None, file
    return int(match[2]), int(match[1])


def result(directory: Path, name: str) -> Counter[str]:
    """The rows of a query, in the order in which checkpoints made them visible."""
    files = sorted((directory / name).glob("[!.]*.parquet"), key=written)
    rows = [rounded(row) for file in files for row in pq.read_table(file).to_pylist()]
    keys = KEYS.get(name)
    if keys:
        rows = list({tuple(row[key] for key in keys): row for row in rows}.values())
    return Counter(str(shown(row)) for row in rows)


IN_SUITE = ("sliding", "gaps", "chained", "within", "updated", "statistics")
"""One query of each kind; ``make test-long`` compares all of them."""


@pytest.fixture(scope="module")
def few(spark: SparkSession, orders: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    return in_spark(spark, orders, tmp_path_factory.mktemp("few-windows"), IN_SUITE)


@pytest.fixture(scope="module")
def expected(spark: SparkSession, orders: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counter[str]]:
    return in_spark(spark, orders, tmp_path_factory.mktemp("all-windows"))


def in_spark(spark: SparkSession, orders: str, directory: Path, names: Collection[str] = ()) -> dict[str, Counter[str]]:
    """What these queries give in Spark, or all of them: those in append mode as streams that end with what is there."""

    def chosen(frame: DataFrame) -> list[tuple[str, DataFrame, str]]:
        queries = window_programs.queries(frame).items()
        return [(name, query, mode) for name, (query, mode) in queries if not names or name in names]

    stream = spark.readStream.schema(window_programs.SCHEMA).parquet(orders)
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    try:
        started = [
            frame.writeStream.format("parquet")
            .trigger(availableNow=True)
            .option("checkpointLocation", str(directory / f"checkpoint-{name}"))
            .start(str(directory / name))
            for name, frame, mode in chosen(stream)
            if mode == "append"
        ]
        for query in started:
            query.awaitTermination()
    finally:
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
    found = {}
    rows = spark.read.schema(window_programs.SCHEMA).parquet(orders)
    for name, frame, mode in chosen(rows):
        table = spark.read.parquet(str(directory / name)) if mode == "append" else frame
        found[name] = Counter(str(shown(rounded(row))) for row in table.toArrow().to_pylist())
    return found


@pytest.mark.row("ps.3", "ps.5", "ends.3")
@pytest.mark.parametrize("compared", ["few", pytest.param("expected", marks=pytest.mark.long)])
def test_stateful_program_of_pyspark_gives_the_rows_of_spark_for_each_query(
    cluster: MiniCluster, orders: str, request: pytest.FixtureRequest, tmp_path: Path, compared: str
) -> None:
    expected: dict[str, Counter[str]] = request.getfixturevalue(compared)
    # Each checkpoint commits the sinks of all queries.
    configuration = fast(execution__checkpointing__interval="2 s")
    arguments = ["replay", orders, str(tmp_path), "0", *expected]
    job = cluster.submit(PROGRAM, arguments=arguments, configuration=configuration, parallelism=2)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    for name, rows in expected.items():
        assert rows, name
        assert result(tmp_path, name) == rows, name


@pytest.mark.long
@pytest.mark.row("ps.5")
@pytest.mark.parametrize(
    ("way", "parallelism"),
    [("rocksdb", (2, 1)), ("hashmap", (1, 2)), ("unaligned rocksdb without chains", (2, 1))],
)
def test_windows_whose_worker_is_killed_and_whose_job_is_rescaled_from_a_savepoint_have_the_rows_of_spark(
    cluster: MiniCluster,
    orders: str,
    expected: dict[str, Counter[str]],
    tmp_path: Path,
    way: str,
    parallelism: tuple[int, int],
) -> None:
    output = tmp_path / "output"
    configuration = {**fast(execution__checkpointing__dir=str(tmp_path / "checkpoints")), **WAYS[way]}

    def submit(rate: int, parallelism: int, savepoint: str | None = None) -> str:
        return cluster.submit(
            PROGRAM,
            arguments=["replay", orders, str(output), str(rate)],
            configuration=configuration,
            parallelism=parallelism,
            savepoint=savepoint,
        )

    job = submit(15, parallelism[0])  # its end is two minutes away
    for number, name in enumerate(("sessions", "sliding"), start=1):
        some_rows = partial(lambda name: result(output, name).total() > 0, name)
        cluster.wait_until(some_rows, f"rows of closed windows of {name}")
        os.kill(cluster.worker_pids(job)[0], signal.SIGKILL)
        wait_for_restarts(cluster, job, number)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    assert 0 < result(output, "sliding").total() < expected["sliding"].total()
    cluster.wait_for_status(submit(0, parallelism[1], savepoint), JobStatus.FINISHED)
    for name, rows in expected.items():
        assert result(output, name) == rows, name
