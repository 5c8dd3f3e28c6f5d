"""Windows whose aggregates change through a savepoint, beside those of Spark over the rows that each has seen."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, ROCKSDB, fast
from tests.support.parity import shown
from tests.support.pipelines import evolving_windows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM = PIPELINES / "evolving_windows.py"
KEPT = ("sum(price) AS price", "count(*) AS n")
REMOVED = "min(amount) AS least"
ADDED = {
    "most": "max(amount)",
    "quantities": "count(quantity)",
    "quantity": "sum(quantity)",
    "mean": "avg(price)",
    "different": "approx_count_distinct(price)",
    "distinct": "count(DISTINCT quantity)",
    "latest": "max_by(price, placed_at)",
    "listed": "sort_array(collect_set(quantity))",
}
OTHERWISE = {
    # Spark 4.3 counts repeated values of a session several times when other aggregates are computed beside DISTINCT.
    "distinct": "CAST(size(collect_set(quantity) ;) AS BIGINT)",
    "listed": "sort_array(collect_set(quantity) ;)",
}
EXPECTED = {name: OTHERWISE.get(name, f"{text} ;") for name, text in ADDED.items()}
"""The same over the rows that come after the savepoint; a semicolon stands for that condition."""
BEFORE = 1_000
"""Rows before the savepoint."""


def listed(table: pa.Table) -> Counter[str]:
    return Counter(str(shown({name: row[name] for name in sorted(row)})) for row in table.to_pylist())


@pytest.mark.row("ps.5")
@pytest.mark.long
@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_aggregates_added_to_windows_through_a_savepoint_start_with_the_rows_that_come_and_the_others_continue(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path, backend: str
) -> None:
    table = pq.read_table(orders)
    source, output = tmp_path / "orders", tmp_path / "output"
    source.mkdir()
    start = table["placed_at"][0].as_py()
    end = pa.table({"placed_at": pa.array([start + timedelta(days=2)], table.schema.field("placed_at").type)})
    first, second = table.slice(0, BEFORE), pa.concat_tables([table.slice(BEFORE), end], promote_options="default")

    def submit(aggregates: list[str], parallelism: int, savepoint: str | None = None) -> str:
        return cluster.submit(
            PROGRAM,
            arguments=[str(source), str(output), ";".join(aggregates)],
            configuration={**fast(), **(ROCKSDB if backend == "rocksdb" else {})},
            parallelism=parallelism,
            savepoint=savepoint,
        )

    def stopped(job: str, rows: int) -> str:
        def seen() -> bool:
            files = (output / "seen").glob("[!.]*.parquet")
            return sum(int(pq.read_metadata(file).num_rows) for file in files) == rows

        cluster.wait_until(seen, f"{rows} rows")
        savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
        cluster.wait_for_status(job, JobStatus.FINISHED)
        return savepoint

    pq.write_table(first, source / "first.parquet")
    savepoint = stopped(submit([KEPT[0], REMOVED, KEPT[1]], parallelism=2), BEFORE)
    assert not list((output / "tumbling").glob("[!.]*.parquet"))
    pq.write_table(second, source / "second.parquet")
    added = [f"{text} AS {name}" for name, text in ADDED.items()]
    stopped(submit([*added, KEPT[1], KEPT[0]], 1, savepoint), table.num_rows + 1)

    cut = f"FILTER (WHERE placed_at >= TIMESTAMP '{start + timedelta(seconds=17 * BEFORE)}')"
    late = [f"{text.replace(';', cut)} AS {name}" for name, text in EXPECTED.items()]
    rows = spark.read.schema(evolving_windows.SCHEMA).parquet(orders)
    for name, frame in evolving_windows.windows(rows, [*late, *KEPT]).items():
        found = pq.read_table(sorted((output / name).glob("[!.]*.parquet")))
        assert listed(found) == listed(frame.toArrow()), name
        counts = found["quantities"].to_pylist()
        assert 0 in counts
        assert any(0 < late < all_rows for late, all_rows in zip(counts, found["n"].to_pylist(), strict=True))
