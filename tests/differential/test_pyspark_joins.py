"""Joins of two streams of PySpark programs in the engine, and of the same rows in Spark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.parity import shown
from tests.support.pipelines import join_programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

FEW = ("full", "semi", "mixed_right", "after_right", "nulls_match", "unbounded", "self")
OTHERS = (
    *("inner", "left", "window_full", "needed_left", "distinct", "same_struct"),
    *("right", "same_time", "window_inner", "window_left", "window_right", "window_semi", "needed_full", "mixed_left"),
    *("mixed_full", "mixed_semi", "after", "before_left", "same_struct_or_null"),
)


def write(directory: Path, names: tuple[str, str, str], keys: Sequence[str | None], seed: int) -> None:
    """120 rows. Full joins of streams differ from those of tables for nulls in keys of both sides or in times."""
    choice = Random(seed)
    start = datetime(2026, 1, 1, tzinfo=UTC)
    rows = [
        (
            at,
            choice.choice(keys),
            start + timedelta(seconds=choice.randrange(60)),
        )
        for at in range(120)
    ]
    types = (pa.int64(), pa.string(), pa.timestamp("us", "UTC"))
    arrays = [pa.array(column, kind) for column, kind in zip(zip(*rows, strict=True), types, strict=True)]
    directory.mkdir()
    pq.write_table(pa.table(arrays, list(names)), directory / "rows.parquet")


@pytest.mark.row("ps.5")
@pytest.mark.parametrize("names", [FEW, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["few", "others"])
def test_joins_of_streams_give_the_rows_of_spark_for_each_type_and_condition(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, names: tuple[str, ...]
) -> None:
    write(tmp_path / "left", ("id", "k", "lt"), ("a", "b", "A", None), 1)
    write(tmp_path / "right", ("n", "key", "rt"), ("a", "b", "A"), 2)
    job = cluster.submit(
        PIPELINES / "join_programs.py",
        arguments=["replay", str(tmp_path), str(tmp_path / "out"), ",".join(names)],
        configuration=fast(restart_strategy__type="none"),
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    left = spark.read.schema(join_programs.LEFT).parquet(str(tmp_path / "left"))
    right = spark.read.schema(join_programs.RIGHT).parquet(str(tmp_path / "right"))
    frames = join_programs.queries(left, right)
    assert {*FEW, *OTHERS} == frames.keys()
    for name in names:
        wanted = frames[name].toArrow().to_pylist()
        given = pq.read_table(tmp_path / "out" / name).to_pylist()
        assert wanted, name
        assert Counter(str(shown(row)) for row in given) == Counter(str(shown(row)) for row in wanted), name
