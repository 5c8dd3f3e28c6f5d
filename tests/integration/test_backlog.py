"""Rows that wait in front of a source: what clients of Flink read of them, and when checkpoints come meanwhile."""

from __future__ import annotations

from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import program_of


def _pending(cluster: MiniCluster, job_id: str) -> list[float]:
    """What Prometheus reads, by subtask."""
    text = httpx.get(f"{cluster.rest_url}/metrics", timeout=60).text
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "flink_taskmanager_job_task_operator_pendingRecords" and sample.labels["job_id"] == job_id
    ]


def _waiting_rows(cluster: MiniCluster, job_id: str) -> float:
    """What Flink's clients read of the vertex whose subtasks read files."""
    job = f"{cluster.rest_url}/jobs/{job_id}"
    for vertex in httpx.get(job, timeout=60).json()["vertices"]:
        metrics = f"{job}/vertices/{vertex['id']}/subtasks/metrics"
        for name in [found["id"] for found in httpx.get(metrics, timeout=60).json()]:
            if name.startswith("Source__") and name.endswith(".pendingRecords"):
                [metric] = httpx.get(f"{metrics}?get={name}&agg=sum", timeout=60).json()
                return float(metric["sum"])
    raise AssertionError("no vertex has the metric")


@pytest.mark.row("571.4")
@pytest.mark.parametrize(
    ("entry", "pace", "rows"),
    # A source of files is ahead of an operator of its worker by whole batches: there are more rows than these have.
    [
        pytest.param("pipeline", "100", 500_000, id="replay"),
        pytest.param("slow", "0.02", 8_000_000, id="parquet", marks=pytest.mark.long),
    ],
)
def test_rows_that_wait_are_shown_and_give_checkpoints_the_interval_during_backlog(
    cluster: MiniCluster, tmp_path: Path, entry: str, pace: str, rows: int
) -> None:
    """Without the backlog the first checkpoint would be due in an hour."""
    files = tmp_path / "files"
    files.mkdir()
    for number in range(2):
        pq.write_table(pa.table({"n": range(number, rows, 2)}), files / f"{number}.parquet")
    job_id = cluster.submit(
        program_of("replayed"),
        entry=f"replayed:{entry}",
        arguments=[str(files / "0.parquet") if entry == "pipeline" else str(files), str(tmp_path / "out"), pace],
        configuration={
            "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
            "execution.checkpointing.interval": "1 h",
            "execution.checkpointing.interval-during-backlog": "100 ms",
            "execution.checkpointing.backlog.pending-records": "1000",
        },
        parallelism=2,
    )
    try:
        cluster.wait_for_checkpoints(job_id, 2)
        cluster.wait_until(lambda: len(_pending(cluster, job_id)) == 2, "the rows that wait in front of both subtasks")
        assert 0 < sum(_pending(cluster, job_id)) < rows
        assert 0 < _waiting_rows(cluster, job_id) < rows
    finally:
        cluster.call(cluster.dispatcher.cancel_job(job_id))
        cluster.wait_for_status(job_id, JobStatus.CANCELED)
