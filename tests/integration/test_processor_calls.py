"""What one call of a stateful processor covers, in whole jobs."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.outputs import visible
from tests.support.pipelines.side_processors import SCHEMA
from tests.support.side_by_side import Case, EngineRun, ordered

KEYS = 5
ROWS_PER_KEY = 60


@pytest.mark.parametrize("sleep_ms", [0, 2])
def test_a_call_covers_the_rows_of_a_key_in_a_buffer_however_slow_it_is(
    cluster: MiniCluster, tmp_path: Path, sleep_ms: int
) -> None:
    numbers = list(range(KEYS * ROWS_PER_KEY))
    table = pa.table({"k": [f"k{n % KEYS}" for n in numbers], "v": pa.array(numbers, pa.int32())})
    pq.write_table(table, tmp_path / "rows.parquet")
    job = cluster.submit(
        PIPELINES,
        entry="calls:pipeline",
        arguments=[str(tmp_path / "rows.parquet"), str(tmp_path / "out"), str(sleep_ms)],
        configuration={**fast(), "execution.checkpointing.dir": str(tmp_path / "checkpoints")},
        parallelism=1,
    )
    cluster.wait_for_status(job, JobStatus.FINISHED)
    calls = visible(tmp_path / "out").sort_values("k")
    assert list(calls.k) == [f"k{key}" for key in range(KEYS)]
    assert set(calls["rows"]) == {ROWS_PER_KEY}
    assert calls.total.sum() == sum(numbers)


def test_rows_that_wait_for_the_end_of_an_interval_are_in_a_savepoint_and_may_be_rescaled(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    def batch(*keys: str) -> pa.Table:
        return pa.table({"k": list(keys), "v": pa.array([1] * len(keys), pa.int32())})

    interval = {
        "execution.stateful-processor.trigger.type": "PROCESSING_TIME",
        "execution.stateful-processor.trigger.interval": "1 d",
    }
    before = Case("Total", [batch("a", "b"), batch("a", "c", "d")], SCHEMA, configuration=interval)
    run = EngineRun(cluster, before, tmp_path / "before")
    assert run.rows() == []
    after = Case("Total", [batch("a", "b")], SCHEMA)
    resumed = EngineRun(cluster, after, tmp_path / "after", run.savepoint, first=2, parallelism=2)
    assert ordered(resumed.rows()) == ordered(
        [
            {"k": "a", "what": "3 rows", "said": "3"},
            {"k": "b", "what": "2 rows", "said": "2"},
            {"k": "c", "what": "1 rows", "said": "1"},
            {"k": "d", "what": "1 rows", "said": "1"},
        ]
    )
