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

DRIFT_S = 30
TOLERANCE_S = 10
"""A reader notices behind a batch that it is ahead, and reads one after a restart before it knows where it is."""
RATES = "pipeline.source.rates"


class Aligned:
    """The job: batches of both sources are a second of event time apart, and the slow source may be paused."""

    def __init__(self, client: CkptClient, cluster: MiniCluster, directory: Path) -> None:
        self.client = client
        self.cluster = cluster
        self.directory = directory
        self.job_id = ""

    def start(self, rates: str, *, unaligned: bool, savepoint: str | None = None) -> None:
        self.job_id = self.cluster.submit(
            PIPELINES / "aligned.py",
            arguments=[str(self.directory / "out"), f"{DRIFT_S} s"],
            configuration={
                **fast(execution__checkpointing__unaligned__enabled=str(unaligned).lower()),
                "execution.checkpointing.dir": str(self.directory / "checkpoints"),
                RATES: rates,
            },
            parallelism=2,
            savepoint=savepoint,
        )
        self.cluster.wait_for_status(self.job_id, JobStatus.RUNNING)

    def seconds(self, name: str) -> int:
        """The event time that the rows of a source have reached."""
        frame = visible(self.directory / "out" / name)
        return int(frame.timestamp.max().timestamp()) if len(frame) else -1

    def ahead(self) -> int:
        return self.seconds("fast") - self.seconds("slow")

    def waits(self) -> None:
        """The slow source is paused: the fast one comes as far as it may, and no further in three checkpoints."""
        self.cluster.wait_until(lambda: self.ahead() >= DRIFT_S - TOLERANCE_S, "the limit", patient(120))
        self.cluster.wait_until(lambda: all_run(self.cluster, self.job_id), "all subtasks to run")
        least = self._completed() + 3
        self.cluster.wait_until(lambda: self._completed() >= least, f"checkpoint {least}", patient(120))
        assert self.ahead() <= DRIFT_S + TOLERANCE_S

    def stop(self) -> str:
        location = self.cluster.savepoint(self.job_id, self.directory / "savepoints", stop=True)
        self.cluster.wait_for_status(self.job_id, JobStatus.FINISHED)
        return location

    def _completed(self) -> int:
        return self.client.checkpoint_statistics(self.job_id).counts.completed


@pytest.mark.long
@pytest.mark.row("ends.3")
def test_fast_source_waits_for_a_slow_one_through_a_kill_a_rescale_and_a_savepoint(
    client: CkptClient, cluster: MiniCluster, tmp_path: Path
) -> None:
    """With unaligned checkpoints first, and aligned ones behind the savepoint."""
    job = Aligned(client, cluster, tmp_path)
    job.start("slow:20", unaligned=True)
    cluster.wait_until(lambda: job.seconds("slow") >= 3, "rows of the slow source", patient(120))
    client.patch_job_config(job.job_id, {RATES: "slow:0"})
    job.waits()
    os.kill(cluster.worker_pids(job.job_id)[0], signal.SIGKILL)
    cluster.wait_until(lambda: client.job_metrics(job.job_id, ("numRestarts",))["numRestarts"] == "1", "a restart")
    job.waits()
    requirements = dict.fromkeys(client.resource_requirements(job.job_id), 1)
    client.rescale(job.job_id, requirements, timeout_s=patient(180))
    job.waits()
    job.start("slow:0", unaligned=False, savepoint=job.stop())
    job.waits()
    least = job.seconds("fast") + DRIFT_S
    client.patch_job_config(job.job_id, {RATES: None})
    cluster.wait_until(lambda: job.seconds("fast") >= least, "the fast source to read on", patient(120))
    job.stop()
    for name in ("slow", "fast"):
        counts = Counter(visible(tmp_path / "out" / name).value.tolist())
        assert set(counts.values()) == {1}
        # The subtasks of a source are aligned as well: what one has still to read is not older than that.
        assert counts.keys() >= set(range(4 * (job.seconds(name) - DRIFT_S - TOLERANCE_S)))
