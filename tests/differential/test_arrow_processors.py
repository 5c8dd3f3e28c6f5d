"""Stateful processors in Arrow: Spark calls the same class for one key at a time, with the same result."""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast, wait_for_restarts
from tests.support.pipelines.arrow_processors import FORGETS, SESSIONS, TOTALS
from tests.support.side_by_side import Case, EngineRun, flat, in_spark, ordered

pytestmark = [pytest.mark.spark, pytest.mark.long, pytest.mark.timeout(600)]


def totals(seed: int) -> pa.Table:
    """Rows of two dozen keys, with nulls in all columns."""
    chance = np.random.default_rng(seed)

    def some(values: list[object], rows: int = 300) -> list[object]:
        return [values[at] for at in chance.integers(0, len(values), rows)]

    at = pa.array([None, *chance.integers(0, 10**15, 299).tolist()], pa.int64()).cast(pa.timestamp("us", "UTC"))
    keys = some([None, "", *(f"key {number}" for number in range(24))])
    numbers = pa.array(some([None, 1, -7, 12]), pa.int32())
    return pa.table({"k": pa.array(keys, pa.string()), "v": numbers, "word": some([None, "a", "b", FORGETS]), "at": at})


def visits(*rows: tuple[str, int]) -> pa.Table:
    times = pa.array([second * 1_000_000 for _, second in rows], pa.int64()).cast(pa.timestamp("us", "UTC"))
    return pa.table({"k": [key for key, _ in rows], "t": times})


def test_states_as_columns_give_what_spark_gives_key_by_key_also_after_a_rescale(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    case = Case("ColumnTotals", [totals(1), totals(2)], TOTALS)
    whole = replace(case, batches=[totals(1), totals(2), totals(3)])
    first = EngineRun(cluster, case, tmp_path / "engine")
    rows = first.rows()
    more = replace(case, batches=[totals(3)])
    rows += EngineRun(cluster, more, tmp_path / "more", first.savepoint, first=2, parallelism=2).rows()
    assert ordered(rows) == ordered(flat(in_spark(spark, whole, tmp_path)))


def test_timers_as_a_column_end_keys_as_timers_do_in_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    batches = [visits(("x", 1), ("y", 2), ("x", 5)), visits(("y", 40), ("z", 41)), visits(("x", 90), ("z", 92))]
    case = Case("ColumnSessions", batches, SESSIONS, time_mode="EventTime", watermark=("t", "5 seconds"))
    case = replace(case, configuration={"state.backend.type": "rocksdb"})
    theirs = flat(in_spark(spark, case, tmp_path))
    assert sum(row["ended"] for row in theirs) == 2
    assert ordered(EngineRun(cluster, case, tmp_path).rows()) == ordered(theirs)


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_every_order_gets_its_number_once_when_a_worker_is_killed_and_the_job_is_rescaled(
    cluster: MiniCluster, orders: str, tmp_path: Path, backend: str
) -> None:
    def submit(parallelism: int, rate: int, savepoint: str | None = None) -> str:
        return cluster.submit(
            PIPELINES / "arrow_orders.py",
            arguments=[orders, str(tmp_path / "out"), str(rate)],
            configuration=fast(state__backend__type=backend),
            parallelism=parallelism,
            savepoint=savepoint,
        )

    job = submit(2, 100)
    cluster.wait_for_checkpoints(job, 1)
    os.kill(cluster.worker_pids(job)[0], signal.SIGKILL)
    wait_for_restarts(cluster, job, 1)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    cluster.wait_for_status(submit(1, 0, savepoint), JobStatus.FINISHED)
    wanted: Counter[tuple[object, object]] = Counter()
    numbered = []
    for row in pq.read_table(orders, columns=["country", "quantity"]).to_pylist():
        key = row["country"], row["quantity"]
        wanted[key] += 1
        numbered.append((*key, wanted[key]))
    found = [tuple(row.values()) for row in pq.read_table(tmp_path / "out").to_pylist()]
    assert sorted(found, key=repr) == sorted(numbered, key=repr)
