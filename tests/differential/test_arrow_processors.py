"""Stateful processors in Arrow: Spark calls the same class for one key at a time, with the same result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.pipelines.arrow_processors import FORGETS, TOTALS
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
