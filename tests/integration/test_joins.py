"""Joins in whole jobs: exact through killed workers and at another parallelism."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pandas as pd

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast, program_of, wait_for_restarts
from tests.support.outputs import hidden, visible

ROWS = 6000


def test_joins_are_exact_through_a_killed_worker_and_a_change_of_parallelism(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    def submit(parallelism: int, rate: int, savepoint: str | None = None) -> str:
        return cluster.submit(
            program_of("joined"),
            entry="joined:pipeline",
            arguments=[str(tmp_path / "out"), str(ROWS), str(rate)],
            configuration=fast(),
            parallelism=parallelism,
            savepoint=savepoint,
        )

    job = submit(2, rate=400)
    cluster.wait_for_checkpoints(job, 2)
    os.kill(cluster.worker_pids(job)[0], signal.SIGKILL)
    wait_for_restarts(cluster, job, 1)
    cluster.wait_for_checkpoints(job, 1)
    savepoint = cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    job = submit(1, rate=0, savepoint=savepoint)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    thirds, near = visible(tmp_path / "out" / "thirds"), visible(tmp_path / "out" / "near")
    assert hidden(tmp_path / "out") == []

    assert len(thirds) == ROWS
    assert not thirds.duplicated(["source", "n"]).any()
    assert (thirds.right_at.notna() == (thirds.n % 3 == 0)).all()
    assert (thirds.right_at.dropna() == thirds.left_at[thirds.right_at.notna()]).all()

    numbers = thirds[["source", "n"]]
    pairs = numbers.merge(numbers.rename(columns={"n": "m"}), on="source")
    expected = pairs[(pairs.m - pairs.n).between(-2, 3)]
    found = near[["source", "n", "m"]]
    assert len(found) == len(expected)
    pd.testing.assert_frame_equal(
        found.sort_values([*found]).reset_index(drop=True), expected.sort_values([*found]).reset_index(drop=True)
    )
