"""The policy of alignment, patched through REST by the names of its fields: the running job obeys at once."""

from __future__ import annotations

import httpx
import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast

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
