"""Jobs that are held back by slow user code, killed and rescaled while barriers overtake their data; exact content."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import UNALIGNED, SequenceJob
from tests.support.outputs import assert_sequence, visible
from tests.support.patience import patient

SLEEP_MS = 0.1
POLICIES = [
    CheckpointConfigPatch(aligned_timeout_ms=50),
    CheckpointConfigPatch(aligned_timeout_ms=0, max_inflight_data_bytes=20_000),
    CheckpointConfigPatch(unaligned=False),
    CheckpointConfigPatch(unaligned=True, max_concurrent=3, interval_ms=100),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[MiniCluster]:
    with MiniCluster(rest=True, heartbeat_interval_s=0.25) as started:
        yield started


@pytest.fixture(scope="module")
def client(cluster: MiniCluster) -> Iterator[CkptClient]:
    with CkptClient(cluster.rest_url) as connected:
        yield connected


def completed(client: CkptClient, job: SequenceJob) -> list[Checkpoint]:
    """Newest first."""
    history = client.checkpoint_statistics(job.job_id).history
    return [checkpoint for checkpoint in history if checkpoint.status == "COMPLETED"]


def wait_for_in_flight_data(client: CkptClient, job: SequenceJob) -> Checkpoint:
    """The next checkpoint that completes with data that its barriers overtook."""
    seen = client.checkpoint_statistics(job.job_id).counts.total

    def found() -> list[Checkpoint]:
        return [known for known in completed(client, job) if known.id > seen and known.persisted_data > 0]

    job.cluster.wait_until(lambda: bool(found()), "a checkpoint with in-flight data")
    return found()[0]


def cancelled(client: CkptClient, job: SequenceJob) -> str:
    """Cancels the job; the directory of its last checkpoint."""
    client.cancel_job(job.job_id)
    job.cluster.wait_for_status(job.job_id, JobStatus.CANCELED)
    path = completed(client, job)[0].external_path
    assert path is not None
    return path


def stopped(job: SequenceJob) -> int:
    """Continues a cancelled job in another one, and ends that some rows later. Returns the rows of both, all exact."""
    job.running()
    job.has_rows()
    job.cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    return assert_sequence(job.out, cancelled=True)


@pytest.mark.row("76.1", "76.2", "76.5", "76.8", "571.8")
@pytest.mark.timeout(600)
def test_kills_while_the_policy_changes(cluster: MiniCluster, client: CkptClient, job: SequenceJob) -> None:
    """Unaligned from the start, then every policy once; a worker is killed under each of them."""
    job.start(sleep_ms=SLEEP_MS, rate=0, configuration=UNALIGNED)
    job.running()
    wait_for_in_flight_data(client, job)
    for number, policy in enumerate([None, *POLICIES], start=1):
        if policy is not None:
            client.patch_checkpoint_config(job.job_id, policy)
        cluster.wait_for_checkpoints(job.job_id, 2)
        restarts = cluster.restarts(job.job_id)
        os.kill(cluster.worker_pids(job.job_id)[number % 2], signal.SIGKILL)
        job.restarted(restarts + 1)
    savepoint = cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    assert client.checkpoint_statistics(job.job_id).counts.restored >= len(POLICIES) + 1
    assert savepoint
    assert assert_sequence(job.out) > 0


@pytest.mark.row("76.6", "76.3")
@pytest.mark.timeout(600)
def test_in_flight_data_of_a_job_that_grows_and_shrinks(client: CkptClient, job: SequenceJob) -> None:
    """Cancelled under back-pressure, and resumed with another parallelism from the unaligned checkpoint."""
    savepoint: str | None = None
    for parallelism in (2, 3):
        job.start(sleep_ms=SLEEP_MS, rate=0, parallelism=parallelism, savepoint=savepoint, configuration=UNALIGNED)
        job.running()
        held = wait_for_in_flight_data(client, job)
        assert held.kind == "UNALIGNED_CHECKPOINT"
        savepoint = cancelled(client, job)
    done = len(visible(job.out / "order"))
    job.start(rate=0, parallelism=1, savepoint=savepoint, configuration=UNALIGNED)
    assert stopped(job) > done


@pytest.mark.row("76.7")
@pytest.mark.timeout(600)
def test_each_recovery_begins_further_on_although_none_reads_everything_back(
    cluster: MiniCluster, client: CkptClient, job: SequenceJob
) -> None:
    """Killed as soon as a checkpoint is complete, which takes a fraction of the time that the in-flight data takes."""
    job.start(sleep_ms=1, rate=0, configuration=UNALIGNED)
    job.running()
    wait_for_in_flight_data(client, job)
    done = [0]
    for number in range(1, 5):
        cluster.wait_for_checkpoints(job.job_id, 2)
        restarts = cluster.restarts(job.job_id)
        os.kill(cluster.worker_pids(job.job_id)[number % 2], signal.SIGKILL)
        job.restarted(restarts + 1)
        cluster.wait_until(lambda: len(visible(job.out / "order")) > done[-1], "rows beyond the recovery")
        done.append(len(visible(job.out / "order")))
    assert done == sorted(set(done))
    cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    assert_sequence(job.out)


@pytest.mark.row("76.3")
@pytest.mark.timeout(600)
def test_damaged_channel_state_refuses_the_restore(client: CkptClient, job: SequenceJob) -> None:
    """The error names file and operator; nothing is lost: with the file back, the same checkpoint restores."""
    # Only the checkpoints that are requested here: a later one, without data in flight, would have no files of it.
    options = {"state.storage.fs.memory-threshold": "0", "execution.checkpointing.interval": "1 h"}
    job.start(sleep_ms=SLEEP_MS, rate=0, configuration={**UNALIGNED, **options})
    job.running()

    def overtakes() -> bool:
        trigger = client.trigger_checkpoint(job.job_id)
        client.wait_for_operation("checkpoint", trigger, job.job_id, timeout_s=patient(120))
        return completed(client, job)[0].persisted_data > 0

    job.cluster.wait_until(overtakes, "a checkpoint with in-flight data")
    savepoint = cancelled(client, job)
    broken = {file: file.read_bytes() for file in _shared_files(savepoint)}
    assert broken
    for file, content in broken.items():
        file.write_bytes(content[: len(content) // 2] + b"!" + content[len(content) // 2 + 1 :])
    job.start(rate=0, savepoint=savepoint, configuration=UNALIGNED)
    job.cluster.wait_for_status(job.job_id, JobStatus.FAILED)
    failure = job.cluster.failure(job.job_id)
    assert any(file.name in failure for file in broken), failure
    assert "operator 'order'" in failure or "operator 'counts'" in failure, failure
    for file, content in broken.items():
        file.write_bytes(content)
    done = len(visible(job.out / "order"))
    job.start(rate=0, savepoint=savepoint, configuration=UNALIGNED)
    assert stopped(job) > done


def _shared_files(checkpoint: str) -> list[Path]:
    return sorted((Path(checkpoint.removeprefix("file://")).parent / "shared").iterdir())
