"""A source of a running job is paused and resumed by a change of its configuration, which a recovery keeps."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import BadRequest
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.integration.test_source_splits import Copy, ended
from tests.support.jobs import all_run
from tests.support.outputs import hidden

RATES = "pipeline.source.rates"


@pytest.mark.row("ends.4")
def test_paused_source_stays_paused_through_a_kill_and_reads_on_without_a_restart(
    client: CkptClient, cluster: MiniCluster, tmp_path: Path
) -> None:
    def completed() -> int:
        return client.checkpoint_statistics(job.job_id).counts.completed

    def rows_behind_two_checkpoints() -> int:
        """The second one was triggered after this call, and so covers all rows that were read before it.

        Its commits follow its completion: until then its files are hidden.
        """
        least = completed() + 2
        cluster.wait_until(lambda: completed() >= least and hidden(job.out) == [], f"the commits of checkpoint {least}")
        return job.values().total()

    with ended(Copy(cluster, tmp_path, "rate-micro-batch", {"rowsPerBatch": "10"})) as job:
        job.start()
        job.has(100)
        answer = client.patch_job_config(job.job_id, {RATES: "source:0"})
        assert (answer.restart, answer.changes[RATES].change) == (False, "live")
        rows = rows_behind_two_checkpoints()
        assert rows_behind_two_checkpoints() == rows
        os.kill(cluster.worker_pids(job.job_id)[0], signal.SIGKILL)
        cluster.wait_until(lambda: client.job_metrics(job.job_id, ("numRestarts",))["numRestarts"] == "1", "a restart")
        cluster.wait_until(lambda: all_run(cluster, job.job_id), "all subtasks to run")
        assert rows_behind_two_checkpoints() == rows
        assert client.patch_job_config(job.job_id, {RATES: "source:1000"}).restart is False
        job.has(rows + 100)
        assert client.patch_job_config(job.job_id, {RATES: None}).restart is False
        job.has(job.values().total() + 2_000)
        with pytest.raises(BadRequest, match="no source whose rate can be limited has the uid 'other'"):
            client.patch_job_config(job.job_id, {RATES: "other:1"})
        assert client.job_metrics(job.job_id, ("numRestarts",))["numRestarts"] == "1"
        job.stop()
        assert set(job.values().values()) == {1}
