"""Settings beyond interval and timeout, patched through REST by their wire names: the running job obeys at once."""

from __future__ import annotations

import itertools

import httpx
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.contract.checkpoints import Checkpoint, CheckpointCounts
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast
from tests.support.patience import patient

pytestmark = pytest.mark.row("571.8")


def patch(client: CkptClient, job_id: str, **fields: int | bool) -> dict[str, object]:
    """What GET shows after the change."""
    url = f"{client.url}/jobs/{job_id}/checkpoints"
    answer = httpx.patch(f"{url}/configuration", json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["overrides"] == list(fields)
    shown: dict[str, object] = httpx.get(f"{url}/config", timeout=60).json()
    assert shown == answer.json()
    return shown


def counts(client: CkptClient, job_id: str) -> CheckpointCounts:
    return client.checkpoint_statistics(job_id).counts


def completed(client: CkptClient, job_id: str) -> list[Checkpoint]:
    """Oldest first."""
    history = client.checkpoint_statistics(job_id).history
    return [checkpoint for checkpoint in reversed(history) if checkpoint.status == "COMPLETED"]


def last_completed(client: CkptClient, job_id: str) -> int:
    """0 before the first one."""
    return max((checkpoint.id for checkpoint in completed(client, job_id)), default=0)


def last_triggered(client: CkptClient, job_id: str) -> int:
    """0 before the first one."""
    return max((checkpoint.id for checkpoint in client.checkpoint_statistics(job_id).history), default=0)


def test_min_pause_between_checkpoints(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    """An hour's pause lets no checkpoint through; without it they come at their interval, with another they wait."""
    job.start(configuration=fast(execution__checkpointing__interval="50ms", execution__checkpointing__min_pause="1h"))
    job.running()
    assert counts(client, job.job_id).total == 0
    assert patch(client, job.job_id, minPauseBetweenCheckpoints=0)["min_pause"] == 0
    cluster.wait_until(lambda: len(completed(client, job.job_id)) >= 3, "checkpoints without a pause")
    assert patch(client, job.job_id, minPauseBetweenCheckpoints=400)["min_pause"] == 400
    last = last_triggered(client, job.job_id)
    cluster.wait_until(lambda: last_completed(client, job.job_id) >= last + 3, "checkpoints with a pause")
    paused = [checkpoint for checkpoint in completed(client, job.job_id) if checkpoint.id >= last]
    gaps = [later.triggered_at_ms - earlier.latest_ack_ms for earlier, later in itertools.pairwise(paused)]
    assert min(gaps) >= 390, gaps
    job.canceled()


def test_max_concurrent_checkpoints(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    """While barriers cannot pass, as many checkpoints are pending as are allowed."""
    job.start(rate=0, configuration=fast(execution__checkpointing__interval="50ms"))
    job.running()
    cluster.wait_until(lambda: len(completed(client, job.job_id)) >= 1, "a checkpoint")
    (job.faults / "processor-held").touch()
    known = counts(client, job.job_id).completed
    cluster.wait_until(lambda: counts(client, job.job_id).in_progress == 1, "a checkpoint that waits")
    assert patch(client, job.job_id, maxConcurrentCheckpoints=3)["max_concurrent"] == 3
    cluster.wait_until(lambda: counts(client, job.job_id).in_progress == 3, "three checkpoints that wait")
    assert patch(client, job.job_id, maxConcurrentCheckpoints=1)["max_concurrent"] == 1
    newest = last_triggered(client, job.job_id)
    (job.faults / "processor-held").unlink()
    cluster.wait_until(lambda: last_completed(client, job.job_id) >= newest + 3, "later checkpoints")
    alone = [checkpoint for checkpoint in completed(client, job.job_id) if checkpoint.id > newest]
    for earlier, later in itertools.pairwise(alone):
        assert later.triggered_at_ms >= earlier.latest_ack_ms
    assert counts(client, job.job_id).completed > known
    job.canceled()


def test_tolerable_checkpoint_failure_number(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    """Any number of failures is tolerated, until none is."""
    job.start(
        rate=0,
        configuration=fast(
            execution__checkpointing__interval="50ms",
            execution__checkpointing__timeout="50ms",
            execution__checkpointing__tolerable_failed_checkpoints="1000000",
            restart_strategy__type="none",
        ),
    )
    job.running()
    (job.faults / "processor-held").touch()
    before = counts(client, job.job_id).failed
    cluster.wait_until(lambda: counts(client, job.job_id).failed >= before + 3, "failed checkpoints")
    assert client.job_status(job.job_id) == "RUNNING"
    assert patch(client, job.job_id, tolerableCheckpointFailureNumber=0)["tolerable_failed_checkpoints"] == 0
    cluster.wait_until(lambda: client.job_status(job.job_id) != "RUNNING", "the job to fail")
    (job.faults / "processor-held").unlink()
    client.wait_for_state(job.job_id, ["FAILED"], timeout_s=patient(180))
    assert "tolerable failure threshold" in cluster.failure(job.job_id)


@pytest.mark.row("76.8")
@pytest.mark.row("76.9")
def test_the_policy_of_alignment(client: CkptClient, cluster: MiniCluster, job: SequenceJob) -> None:
    """It changes under a running job, several checkpoints in flight; savepoints stay aligned; a reset returns."""
    job.start(configuration=fast(execution__checkpointing__interval="50ms"))
    job.running()
    shown = patch(
        client,
        job.job_id,
        maxConcurrentCheckpoints=3,
        alignedCheckpointTimeout=20,
        unalignedEnabled=True,
        maxInflightDataBytes=2**20,
    )
    assert (shown["unaligned_checkpoints"], shown["aligned_checkpoint_timeout"]) == (True, 20)
    assert (shown["max_concurrent"], shown["max_inflight_data_bytes"]) == (3, 2**20)
    last = last_triggered(client, job.job_id)
    cluster.wait_until(lambda: last_completed(client, job.job_id) >= last + 3, "checkpoints of the new policy")
    cluster.savepoint(job.job_id, job.directory / "savepoints")
    savepoint = client.checkpoint_statistics(job.job_id).latest_savepoint
    assert savepoint is not None
    assert (savepoint.kind, savepoint.persisted_data) == ("SAVEPOINT", 0)
    answer = httpx.delete(f"{client.url}/jobs/{job.job_id}/checkpoints/configuration", timeout=60)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["unaligned_checkpoints"], answer.json()["overrides"]) == (False, [])
    newest = last_triggered(client, job.job_id)
    cluster.wait_until(lambda: last_completed(client, job.job_id) >= newest + 2, "aligned checkpoints")
    assert completed(client, job.job_id)[-1].kind == "CHECKPOINT"
    job.canceled()
