"""A stop whose savepoint storage refuses: the job keeps running with the configuration that it had before."""

from __future__ import annotations

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import OperationFailed
from ckpt_runtime.client.models import JobConfig
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast
from tests.support.patience import patient

MARK = "sequence.mark"
LATE = {"execution.checkpointing.interval": "1 h", "state.storage.fs.memory-threshold": "0"}
"""No checkpoint comes in between, and each subtask writes a file."""


def configured(client: CkptClient, job: SequenceJob, mark: str) -> None:
    """By PUT, with an option that needs a restart."""
    present = client.job_config(job.job_id)
    assert present.version is not None
    answer = client.replace_job_config(job.job_id, {**present.configuration, MARK: mark}, present.version)
    assert answer.restart


def runs(client: CkptClient, job: SequenceJob, version: int, mark: str) -> JobConfig:
    """Waits until the tasks run with it, and user code sees it."""
    job.cluster.wait_until(lambda: client.job_config(job.job_id).running_version == version, f"version {version}")
    job.running()
    job.cluster.wait_until((job.faults / f"mark-{mark}").exists, "user code to be configured so")
    found = client.job_config(job.job_id)
    assert (found.version, found.running_version, found.configuration[MARK]) == (version, version, mark)
    return found


def pending(client: CkptClient, job: SequenceJob) -> int:
    return client.checkpoint_statistics(job.job_id).counts.in_progress


@pytest.mark.row("147.5")
@pytest.mark.row("530.5")
def test_the_directory_turns_unusable_while_the_savepoint_is_taken(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    """Sources have stopped by then, so the job restarts: with the new configuration, from its latest checkpoint."""
    job.start(configuration=fast() | LATE)
    job.running()
    job.has_rows()
    configured(client, job, "blue")
    runs(client, job, 2, "blue")
    job.has_rows()
    client.wait_for_operation("checkpoint", client.trigger_checkpoint(job.job_id), job.job_id, timeout_s=patient(120))
    job.hold("processor")
    target = job.directory / "savepoints"
    stop = client.stop_with_savepoint(job.job_id, str(target))
    cluster.wait_until(lambda: pending(client, job) == 1 and any(target.glob("*")), "the savepoint to begin")
    (job.faults / "mark-blue").unlink()
    known = cluster.restarts(job.job_id)
    target.rename(job.directory / "away")
    target.touch()
    job.release("processor")
    with pytest.raises(OperationFailed):
        client.wait_for_operation("savepoint", stop, job.job_id, timeout_s=patient(120))
    runs(client, job, 2, "blue")
    assert cluster.restarts(job.job_id) == known + 1
    target.unlink()
    job.stopped()


@pytest.mark.row("147.5")
@pytest.mark.row("530.10")
def test_the_directory_is_refused_while_a_restart_for_a_configuration_is_due(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob
) -> None:
    """The restart waits for a user's savepoint. The stop ends that one, fails, and the restart comes."""
    job.start(configuration=fast() | LATE)
    job.running()
    job.has_rows()
    job.hold("processor")
    savepoint = client.trigger_savepoint(job.job_id, str(job.directory / "savepoints"))
    cluster.wait_until(lambda: pending(client, job) == 1, "the savepoint to begin")
    configured(client, job, "green")
    found = client.job_config(job.job_id)
    assert (found.version, found.running_version) == (2, 1)
    refuses = job.directory / "refuses"
    refuses.touch()
    stop = client.stop_with_savepoint(job.job_id, str(refuses))
    for operation, reason in ((savepoint, "suspending"), (stop, "cannot create")):
        with pytest.raises(OperationFailed, match=reason):
            client.wait_for_operation("savepoint", operation, job.job_id, timeout_s=patient(120))
    job.release("processor")
    runs(client, job, 2, "green")
    assert cluster.restarts(job.job_id) == 1
    job.stopped()
