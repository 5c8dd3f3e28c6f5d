"""A fast source waits for a slow one of its group, through kills, a rescale and a savepoint; nothing is lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, all_run, fast
from tests.support.outputs import visible
from tests.support.patience import patient

DRIFT_S = 60
ROWS_OF_SECOND = 4


def seconds(output: Path) -> int:
    """The event time that the rows have reached."""
    frame = visible(output)
    return int(frame.timestamp.max().timestamp()) if len(frame) else 0


@pytest.mark.row("ends.3")
def test_fast_source_stays_near_the_slow_one_through_a_kill_a_rescale_and_a_savepoint(
    client: CkptClient, cluster: MiniCluster, tmp_path: Path
) -> None:
    """With unaligned checkpoints first, and aligned ones behind the savepoint."""
    slow, quick = tmp_path / "out" / "slow", tmp_path / "out" / "fast"

    def start(savepoint: str | None = None) -> str:
        unaligned = "true" if savepoint is None else "false"
        job_id = cluster.submit(
            PIPELINES / "aligned.py",
            arguments=[str(tmp_path / "out"), f"{DRIFT_S} s"],
            configuration={
                **fast(execution__checkpointing__unaligned__enabled=unaligned),
                "execution.checkpointing.dir": str(tmp_path / "checkpoints"),
                "pipeline.source.rates": "slow:40",
            },
            parallelism=2,
            savepoint=savepoint,
        )
        cluster.wait_for_status(job_id, JobStatus.RUNNING)
        return job_id

    def advances(by: int) -> None:
        """The fast source comes further, although it waits."""
        least = seconds(quick) + by
        cluster.wait_until(lambda: seconds(quick) >= least, f"second {least}", patient(120))

    def stop(job_id: str) -> str:
        cluster.wait_until(lambda: all_run(cluster, job_id), "all subtasks to run")
        location = cluster.savepoint(job_id, tmp_path / "savepoints", stop=True)
        cluster.wait_for_status(job_id, JobStatus.FINISHED)
        ahead = seconds(quick) - seconds(slow)
        # A reader notices behind a batch that it is ahead, and the two sources meet the barrier at different times.
        assert DRIFT_S // 2 <= ahead <= 3 * DRIFT_S
        return location

    job = start()
    advances(DRIFT_S)
    os.kill(cluster.worker_pids(job)[0], signal.SIGKILL)
    advances(20)
    client.rescale(job, dict.fromkeys(client.resource_requirements(job), 1), timeout_s=patient(180))
    advances(20)
    job = start(stop(job))
    advances(20)
    stop(job)
    for output in (slow, quick):
        counts = Counter(visible(output).value.tolist())
        assert set(counts.values()) == {1}
        # The subtasks of a source are aligned as well: what one has still to read is not older than that.
        assert counts.keys() >= set(range(ROWS_OF_SECOND * (seconds(output) - 3 * DRIFT_S)))
