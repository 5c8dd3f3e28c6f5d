"""Format ``delta`` as the source of a job: every row of a growing table once, through kills and a rescale."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.integration.test_source_splits import Copy, ended
from tests.support.outputs import hidden
from tests.support.patience import patient

deltalake = pytest.importorskip("deltalake", reason="pip install 'ckpt-runtime[delta]'")
duckdb = pytest.importorskip("duckdb")

ROWS = 300


def add_version(table: Path, number: int) -> None:
    rows = pa.table({"value": pa.array(range(number * ROWS, (number + 1) * ROWS), pa.int64())})
    part = rows.append_column("part", pa.array([f"p{value % 2}" for value in range(ROWS)]))
    deltalake.write_deltalake(table, part, mode="append", partition_by=["part"])


def content(directory: Path) -> Counter[tuple[int, str]]:
    """The rows of a directory, read by DuckDB."""
    return Counter(duckdb.sql(f"SELECT value, part FROM read_parquet('{directory}/*.parquet')").fetchall())


@pytest.mark.row("ends.4")
def test_a_job_reads_each_row_of_a_growing_table_once_through_kills_a_rescale_and_a_savepoint(
    client: CkptClient, cluster: MiniCluster, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    for number in range(2):
        add_version(table, number)
    with ended(Copy(cluster, tmp_path, "delta", {"path": str(table), "maxFilesPerTrigger": "1"})) as job:
        job.start()
        for number in range(2, 4):
            os.kill(cluster.worker_pids(job.job_id)[number % 2], signal.SIGKILL)
            add_version(table, number)
            job.has(ROWS * (number + 1))
        client.rescale(job.job_id, dict.fromkeys(client.resource_requirements(job.job_id), 1), timeout_s=patient(180))
        add_version(table, 4)
        savepoint = job.stop()
        deltalake.DeltaTable(table).create_checkpoint()  # the log may be read by it or by its versions
        add_version(table, 5)
        job.start(3, savepoint)
        job.has(ROWS * 6)
        job.stop()
        rows = deltalake.DeltaTable(table).to_pyarrow_table()
        wanted = Counter(zip(rows["value"].to_pylist(), rows["part"].to_pylist(), strict=True))
        assert content(job.out) == wanted
        assert wanted.total() == ROWS * 6
        assert hidden(job.out) == []
