"""What one call of a stateful processor covers, in whole jobs."""

from __future__ import annotations

import datetime as dt
import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import all_run, fast, program_of
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
        program_of("calls"),
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


@dataclass
class KilledRun(EngineRun):
    """Kills a worker of the job when the second batch has been committed, and returns when all of it runs again."""

    killed: bool = False

    def _committed(self, job: str, source: Path) -> bool:
        if not self.killed and (source / "committed-1").exists():
            os.kill(self.cluster.worker_pids(job)[0], signal.SIGKILL)
            self.killed = True
        if not self.killed or not self.cluster.restarts(job):
            return False
        return super()._committed(job, source) and all_run(self.cluster, job)


@pytest.mark.parametrize(
    ("time_mode", "trigger"),
    [
        ("None", "CHECKPOINT"),
        pytest.param("ProcessingTime", "PROCESSING_TIME", marks=pytest.mark.long),
        pytest.param("None", "BUFFER", marks=pytest.mark.long),
    ],
)
def test_processor_without_event_time_after_a_watermark_emits_every_row_through_a_kill(
    cluster: MiniCluster, tmp_path: Path, time_mode: str, trigger: str
) -> None:
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    numbers = list(range(600))
    rows = {
        "k": [f"k{number % 7}" for number in numbers],
        "v": pa.array(numbers, pa.int32()),
        "t": pa.array([start + dt.timedelta(seconds=number) for number in numbers], pa.timestamp("us", "UTC")),
    }
    table = pa.table(rows)
    case = Case(
        "Passed", [table.slice(first, 100) for first in range(0, 600, 100)], SCHEMA,
        mode="Append", time_mode=time_mode, watermark=("t", "10 seconds"),
        configuration={
            "execution.stateful-processor.trigger.type": trigger,
            "execution.stateful-processor.trigger.interval": "200 ms",
            "restart-strategy.type": "fixed-delay",
            "restart-strategy.fixed-delay.delay": "0 s",
        },
    )  # fmt: skip
    run = KilledRun(cluster, case, tmp_path, parallelism=2)
    said = [int(row["said"]) for row in run.rows(drain=True)]
    assert run.killed
    assert sorted(said) == numbers
