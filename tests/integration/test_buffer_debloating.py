"""Under back-pressure, debloating keeps as much data in flight as is worked off in about the target time, no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from ckpt_runtime.client.checkpoint_models import Checkpoint
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast
from tests.support.outputs import assert_sequence

UNALIGNED = fast(
    execution__checkpointing__interval="100ms",
    execution__checkpointing__unaligned__enabled="true",
)
DEBLOATING = {
    **UNALIGNED,
    "taskmanager.network.memory.buffer-debloat.enabled": "true",
    "taskmanager.network.memory.buffer-debloat.target": "100 ms",
    "taskmanager.network.memory.buffer-debloat.period": "50 ms",
    "taskmanager.network.memory.buffer-debloat.samples": "4",
}
BLOATED_BYTES = 60_000
"""In flight to ``order`` when the queues of its slowest channel are full: 10 buffers or more, of 256 rows or more."""


@pytest.fixture(scope="module")
def client(cluster: MiniCluster) -> Iterator[CkptClient]:
    with CkptClient(cluster.rest_url) as connected:
        yield connected


def checkpoint_that(
    cluster: MiniCluster, client: CkptClient, job: SequenceJob, holds: Callable[[Checkpoint], bool], what: str
) -> Checkpoint:
    """Waits until the latest completed one is such."""
    found: list[Checkpoint] = []

    def there() -> bool:
        completed = [known for known in client.checkpoint_statistics(job.job_id).history if known.status == "COMPLETED"]
        found[:] = [known for known in completed[:1] if holds(known)]
        return bool(found)

    cluster.wait_until(there, what)
    return found[0]


def stopped(cluster: MiniCluster, client: CkptClient, job: SequenceJob) -> Checkpoint:
    """Stops with a savepoint, which is always aligned: it waits behind all that is in flight."""
    cluster.savepoint(job.job_id, job.directory / "savepoints", stop=True)
    job.finished()
    return next(known for known in client.checkpoint_statistics(job.job_id).history if known.is_savepoint)


def buffer_sizes(client: CkptClient, job: SequenceJob) -> list[int]:
    """What the subtasks want of their senders."""
    sizes = []
    for vertex in httpx.get(f"{client.url}/jobs/{job.job_id}").json()["vertices"]:
        url = f"{client.url}/jobs/{job.job_id}/vertices/{vertex['id']}/metrics"
        names = [known["id"] for known in httpx.get(url).json() if known["id"].endswith("debloatedBufferSize")]
        if names:
            sizes += [int(float(known["value"])) for known in httpx.get(url, params={"get": ",".join(names)}).json()]
    return sizes


def test_less_is_in_flight_and_aligned_snapshots_are_quick(
    client: CkptClient, cluster: MiniCluster, job: SequenceJob, tmp_path_factory: pytest.TempPathFactory
) -> None:
    job.start(rate=0, sleep_ms=0.5, configuration=UNALIGNED)
    job.running()
    bloated = checkpoint_that(
        cluster, client, job, lambda known: known.persisted_data > BLOATED_BYTES, "full queues to be persisted"
    )
    assert buffer_sizes(client, job) == []
    slow = stopped(cluster, client, job)
    assert_sequence(job.out)

    job = SequenceJob(cluster, tmp_path_factory.mktemp("debloating"))
    job.start(rate=0, sleep_ms=0.5, configuration=DEBLOATING)
    job.running()
    limit = bloated.persisted_data // 3
    checkpoint_that(cluster, client, job, lambda known: 0 < known.persisted_data < limit, "less data in flight")
    cluster.wait_until(lambda: 0 < min(buffer_sizes(client, job), default=0) < 1_000, "smaller buffers to be shown")
    job.inject("processor-raise")
    job.restarted(1)
    checkpoint_that(
        cluster, client, job,
        lambda known: not known.is_savepoint and 0 < known.persisted_data < limit, "less data in flight after a restart",
    )  # fmt: skip
    quick = stopped(cluster, client, job)
    assert_sequence(job.out)
    print(bloated.persisted_data, slow.duration_ms, quick.duration_ms)
    assert quick.duration_ms * 2 < slow.duration_ms
