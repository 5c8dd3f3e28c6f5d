"""Joins of streams with static tables in the engine, and of the same rows in Spark."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal
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
from tests.support.pipelines import static_programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


def write(directory: Path) -> None:
    """200 events, and static tables with nulls, repeated keys and keys that no event has."""
    choice = Random(4)
    start = datetime(2025, 12, 30, tzinfo=UTC)
    events = [
        {
            "id": at,
            "k": choice.choice(["a", "b", "c", "d", None]),
            "n": choice.choice([0, 1, 2, 3, None]),
            "price": choice.choice([Decimal("1.50"), Decimal("2.00"), Decimal("-3.25"), None]),
            "at": start + timedelta(minutes=30 * at),
            "tags": choice.choice([["x", None], ["x"], [], None]),
            "ratio": choice.choice([-0.0, float("nan"), 1.5, 2.5, None]),
        }
        for at in range(200)
    ]
    kinds = [
        *(("id", pa.int64()), ("k", pa.string()), ("n", pa.int32()), ("price", pa.decimal128(10, 2))),
        *(("at", pa.timestamp("us", "UTC")), ("tags", pa.list_(pa.string())), ("ratio", pa.float64())),
    ]
    people = pa.table(
        {
            "k": ["a", "b", "b", None, "z"],
            "name": pa.array(["ann", "bob", None, "eve", "zoe"]).dictionary_encode(),
            "country": ["a", "b", "b", "c", None],
            "born": pa.array([0, -719_162, None, 20_000, 1], pa.date32()),
        }
    )
    for name, table in (("events", pa.Table.from_pylist(events, pa.schema(kinds))), ("people", people)):
        (directory / name).mkdir()
        pq.write_table(table, directory / name / "rows.parquet")
    (directory / "codes.csv").write_text("code,name\n1,one\n2,two\n3,three\n9,nine\n")
    (directory / "labels.json").write_text('{"k": "a", "label": "A"}\n{"k": "b"}\n{"k": null, "label": "?"}\n')
    (directory / "lines.txt").write_text("b\nc\nc\n")


@pytest.mark.row("ps.5")
def test_joins_with_static_tables_give_the_rows_of_spark_for_each_type_condition_and_kind_of_table(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    write(tmp_path)
    job = cluster.submit(
        PIPELINES / "static_programs.py",
        arguments=[str(tmp_path), str(tmp_path / "out")],
        configuration=fast(restart_strategy__type="none"),
        parallelism=2,
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    events = spark.read.schema(static_programs.EVENTS).parquet(str(tmp_path / "events"))
    for name, frame in static_programs.queries(spark, events, str(tmp_path)).items():
        wanted = Counter(str(shown(row)) for row in frame.toArrow().to_pylist())
        given = Counter(str(shown(row)) for row in pq.read_table(tmp_path / "out" / name).to_pylist())
        assert (not wanted) == (name == "nothing"), name
        if name == "after":  # windows that the watermark has not reached stay in state
            assert given, name
            assert not given - wanted, name
        else:
            assert given == wanted, name
