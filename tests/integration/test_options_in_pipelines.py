"""Options that a pipeline sets in its code hold for the whole job, the driver's side included."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import UNRIVALLED_S, program_of

OWN = (
    "execution.checkpointing.interval=200 ms",
    "execution.checkpointing.timeout=50 s",
    "restart-strategy.type=fixed-delay",
)


def start(cluster: MiniCluster, *options: str, **given: str) -> str:
    configuration = {name.replace("__", "."): value for name, value in given.items()}
    return cluster.submit(program_of("configured"), entry="configured", arguments=options, configuration=configuration)


@pytest.mark.row("571.2")
def test_options_in_a_pipeline_reach_the_coordinator_and_the_restart_strategy(cluster: MiniCluster) -> None:
    job_id = start(cluster, *OWN, execution__checkpointing__timeout="40 s")
    try:
        cluster.wait_for_checkpoints(job_id, 2)
        shown = httpx.get(f"{cluster.rest_url}/jobs/{job_id}/checkpoints/config", timeout=60).json()
        assert (shown["interval"], shown["timeout"]) == (200, 40_000)
        config = cluster.of_job(job_id, lambda job: job.config_info())
        assert config.execution_config["restart-strategy"] == "fixed-delay"
        assert config.configuration["execution.checkpointing.interval"] == "200 ms"
        assert config.configuration["execution.checkpointing.timeout"] == "40 s"
        patched = cluster.call(
            cluster.dispatcher.jobs[job_id].living().patch_checkpoint_config(CheckpointOverrides(interval_ms=77_000))
        )
        assert patched.settings.interval_ms == 77_000
        submitted = cluster.call(cluster.dispatcher.jobs[job_id].living().patch_checkpoint_config(None))
        assert (submitted.settings.interval_ms, submitted.settings.timeout_ms) == (200, 40_000)
    finally:
        cluster.call(cluster.dispatcher.cancel_job(job_id))


def test_options_that_clash_with_those_of_the_submission_are_refused(cluster: MiniCluster) -> None:
    clash = {"restart-strategy.exponential-delay.max-backoff": "1 s"}
    with pytest.raises(SubmissionFailed, match=r"exponential-delay\.initial-backoff"):
        start(cluster, "restart-strategy.exponential-delay.initial-backoff=1 min", **clash)


def test_options_in_a_pipeline_override_the_clusters_and_survive_the_driver(tmp_path: Path) -> None:
    configuration = {
        "high-availability.type": "filesystem",
        "high-availability.storageDir": str(tmp_path / "ha"),
        "execution.checkpointing.interval": "1 h",
        "execution.checkpointing.min-pause": "5 ms",
    }
    with MiniCluster(configuration=configuration, lease_timeout_s=UNRIVALLED_S) as first:
        job_id = start(first, *OWN)
        first.wait_for_checkpoints(job_id, 1)
    with MiniCluster(configuration=configuration, lease_timeout_s=UNRIVALLED_S) as second:
        second.wait_for_status(job_id, JobStatus.RUNNING)
        shown = second.of_job(job_id, lambda job: job.checkpoint_config()).settings
        assert (shown.interval_ms, shown.timeout_ms, shown.min_pause_ms) == (200, 50_000, 5)
        assert (
            second.of_job(job_id, lambda job: job.config_info()).execution_config["restart-strategy"] == "fixed-delay"
        )
        second.wait_for_checkpoints(job_id, 1)
        second.call(second.dispatcher.cancel_job(job_id))
