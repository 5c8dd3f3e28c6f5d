"""Restarts that take the tables of the last checkpoint from the workers' own disks, and from the checkpoint otherwise.

Checkpoints come when they are asked for. So it is known which one a restart reads, and which of its files are damaged.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from pathlib import Path

import pytest

from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.golden import take_checkpoint
from tests.support.jobs import ROCKSDB, SequenceJob, all_run, fast


def configuration(**changes: str) -> dict[str, str]:
    own = fast(
        execution__checkpointing__interval="1h",
        execution__checkpointing__tolerable_failed_checkpoints="1000",
        pipeline__max_parallelism="64",
        restart_strategy__fixed_delay__attempts="1",
        **changes,
    )
    return {**own, **ROCKSDB, "execution.state-recovery.from-local": "true"}


def copies(cluster: MiniCluster) -> set[Path]:
    """The tables that workers of this cluster keep beside their databases."""

    async def directories() -> list[str]:
        return [slot.worker.peer.registration.directory for slot in cluster.cluster.slots.all() if slot.worker]

    return {path for directory in cluster.call(directories()) for path in Path(directory).glob("ckpt-state-*/*.sst")}


def damage(files: Collection[Path]) -> None:
    """A bit of each becomes another one: in a new file, since links of the old one lie elsewhere."""
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.unlink()
        file.write_bytes(content)


@pytest.fixture
def checkpointed(cluster: MiniCluster, job: SequenceJob) -> SequenceJob:
    """Checkpoints behind it, the last of which refers to tables of an earlier one on each of its workers."""
    job.start(rate=1000, configuration=configuration())
    job.running()
    job.has_rows()

    def each_worker_has_state() -> bool:
        take_checkpoint(cluster, job.job_id)
        workers = {path.parents[1] for path in copies(cluster)}
        return len(workers) == len(cluster.worker_pids(job.job_id))

    cluster.wait_until(each_worker_has_state, "rows to have come to each worker")
    take_checkpoint(cluster, job.job_id)
    return job


def shared(job: SequenceJob) -> list[Path]:
    return list((job.checkpoints / job.job_id / "shared").iterdir())


def test_a_restart_on_the_same_workers_reads_no_table_of_the_checkpoint(checkpointed: SequenceJob) -> None:
    """A restart that reads one fails by the name of the file, and there is no second one."""
    damage(shared(checkpointed))
    checkpointed.inject("map-raise")
    checkpointed.restarted(1)
    checkpointed.stopped()


def test_restart_without_local_recovery_reads_the_checkpoint(cluster: MiniCluster, job: SequenceJob) -> None:
    job.start(rate=1000, configuration=configuration() | {"execution.state-recovery.from-local": "false"})
    job.running()
    job.has_rows()
    take_checkpoint(cluster, job.job_id)
    assert copies(cluster) == set()
    damage(shared(job))
    job.inject("map-raise")
    cluster.wait_for_status(job.job_id, JobStatus.FAILED)
    assert "damaged" in cluster.failure(job.job_id)


def test_damaged_local_files_are_taken_from_the_checkpoint(cluster: MiniCluster, checkpointed: SequenceJob) -> None:
    damaged = copies(cluster)
    damage(damaged)
    checkpointed.inject("map-raise")
    checkpointed.restarted(1)
    assert not damaged & copies(cluster), "what is of no use goes"
    checkpointed.stopped()


def test_a_worker_that_takes_over_reads_the_checkpoint(cluster: MiniCluster, checkpointed: SequenceJob) -> None:
    """The files of the killed one go; the others' are used."""
    before = copies(cluster)
    os.kill(cluster.worker_pids(checkpointed.job_id)[0], signal.SIGKILL)
    checkpointed.restarted(1)
    cluster.wait_until(lambda: any(not path.exists() for path in before), "the killed worker's files to go")
    checkpointed.stopped()
    cluster.wait_until(lambda: not any(path.exists() for path in before), "all files to go")
    assert copies(cluster) == set()


@pytest.mark.parametrize("parallelism", [1, pytest.param(3, marks=pytest.mark.long)])
def test_another_parallelism_takes_what_is_there(
    cluster: MiniCluster, checkpointed: SequenceJob, parallelism: int
) -> None:
    with CkptClient(cluster.rest_url) as client:
        job_id = checkpointed.job_id
        client.rescale(job_id, dict.fromkeys(client.resource_requirements(job_id), parallelism))

        def rescaled() -> bool:
            vertices = client.job_details(job_id).vertices
            return {vertex.parallelism for vertex in vertices} == {parallelism} and all_run(cluster, job_id)

        cluster.wait_until(rescaled, "the new parallelism")
    take_checkpoint(cluster, checkpointed.job_id)
    take_checkpoint(cluster, checkpointed.job_id)
    damage(shared(checkpointed))
    restarts = cluster.restarts(checkpointed.job_id)  # the rescale is one
    checkpointed.inject("map-raise")
    checkpointed.restarted(restarts + 1)
    checkpointed.stopped()


def test_databases_below_a_directory_of_the_user_leave_nothing_there(
    cluster: MiniCluster, job: SequenceJob, tmp_path: Path
) -> None:
    root = tmp_path / "local"
    job.start(rate=1000, configuration=configuration(state__backend__rocksdb__localdir=str(root)))
    job.running()
    job.has_rows()
    take_checkpoint(cluster, job.job_id)
    kept = copies(cluster)
    assert kept
    damage(shared(job))
    job.inject("map-raise")
    job.restarted(1)
    job.stopped()
    cluster.wait_until(lambda: not any(path.exists() for path in kept), "the worker's files to go")
    cluster.wait_until(lambda: list(root.iterdir()) == [], "the databases to go")
