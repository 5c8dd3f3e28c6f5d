"""Under back-pressure, debloating keeps about as much data in flight as is worked off in the target time."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast
from tests.support.outputs import assert_sequence

pytestmark = pytest.mark.slow

UNALIGNED = fast(
    execution__checkpointing__interval="300ms",
    execution__checkpointing__unaligned__enabled="true",
    state__storage__fs__memory_threshold="1mb",
    taskmanager__network__memory__buffers_per_channel="4",
    taskmanager__network__memory__max_buffers_per_channel="10",
)
"""Each checkpoint holds all that is in flight: nothing is in a file that the next one could refer to."""

DEBLOATING = {
    **UNALIGNED,
    "taskmanager.network.memory.buffer-debloat.enabled": "true",
    "taskmanager.network.memory.buffer-debloat.target": "200 ms",
    "taskmanager.network.memory.buffer-debloat.period": "50 ms",
    "taskmanager.network.memory.buffer-debloat.samples": "4",
}
BLOATED = 100_000
"""Bytes in flight when both channels to a slow subtask are full: 24 buffers of 256 rows, 16 bytes a row."""

DEBLOATED = BLOATED // 3
"""Enough for 24 buffers of the least size and their headers."""


def start(cluster: MiniCluster, directory: Path, configuration: dict[str, str]) -> SequenceJob:
    """Sources as fast as they can be, half a millisecond or more for each row of theirs."""
    job = SequenceJob(cluster, directory)
    job.start(rate=0, sleep_ms=0.5, configuration=configuration)
    job.running()
    return job


def in_flight(client: CkptClient, job: SequenceJob) -> int:
    """Bytes that the latest completed checkpoint keeps of what was on its way; 0 without one."""
    completed = (known for known in client.checkpoint_statistics(job.job_id).history if known.status == "COMPLETED")
    return next((known.persisted_data for known in completed), 0)


def savepoint(cluster: MiniCluster, client: CkptClient, job: SequenceJob, *, stop: bool = False) -> int:
    """Takes a savepoint, which is always aligned: its barriers wait behind all that is in flight. Returns its ms."""
    cluster.savepoint(job.job_id, job.directory / "savepoints", stop=stop)
    latest = client.checkpoint_statistics(job.job_id).latest_savepoint
    assert latest is not None
    return latest.duration_ms


def checkpointed_since(client: CkptClient, job: SequenceJob) -> bool:
    """Whether a checkpoint behind the latest savepoint has completed. Else a restart leaves what the savepoint covers
    hidden, for a job that resumes from it."""
    shown = client.checkpoint_statistics(job.job_id)
    assert shown.latest_savepoint is not None
    return shown.latest_completed is not None and shown.latest_completed.id > shown.latest_savepoint.id


def buffer_sizes(client: CkptClient, job: SequenceJob) -> list[int]:
    """What the subtasks want of their senders, as the metrics show it."""
    names = tuple(f"{subtask}.debloatedBufferSize" for subtask in range(2))
    shown = (client.vertex_metrics(job.job_id, vertex.id, names) for vertex in client.job_details(job.job_id).vertices)
    return [int(float(value)) for metrics in shown for value in metrics.values()]


def test_debloating_reduces_in_flight_data_and_the_wait_of_rows(
    client: CkptClient, cluster: MiniCluster, tmp_path: Path
) -> None:
    job = start(cluster, tmp_path / "off", UNALIGNED)
    cluster.wait_until(lambda: in_flight(client, job) > BLOATED, "the queues to fill")
    assert buffer_sizes(client, job) == []
    slow_ms = savepoint(cluster, client, job, stop=True)
    job.finished()
    assert_sequence(job.out)

    job = start(cluster, tmp_path / "on", DEBLOATING)
    cluster.wait_until(lambda: 0 < min(buffer_sizes(client, job), default=0) < 1_000, "smaller buffers to be wanted")
    cluster.wait_until(lambda: 0 < in_flight(client, job) < DEBLOATED, "less to be in flight")
    # Not the first one on a machine that stands still meanwhile.
    cluster.wait_until(lambda: savepoint(cluster, client, job) * 2 < slow_ms, "a savepoint that takes half the time")
    cluster.wait_until(lambda: checkpointed_since(client, job), "a checkpoint that covers what the savepoint does")
    job.inject("processor-raise")
    job.restarted(1)
    savepoint(cluster, client, job, stop=True)
    job.finished()
    assert_sequence(job.out)
