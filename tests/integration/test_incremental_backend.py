"""Jobs whose state backend has files of its own, several per snapshot and shared between checkpoints.

RocksDB runs with a cache that the keys of one subtask do not fit into. The backend ``files`` is the tests' own.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, IncrementalKeyedStateHandle
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import read_metadata
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast, program_of, wait_for_restarts
from tests.support.outputs import hidden, visible

BLOCK = 200
ROWS = 9000


class FileBackedJob:
    """The ``file_backed`` pipeline with its checkpoints in a directory of its own."""

    def __init__(self, cluster: MiniCluster, directory: Path, backend: str) -> None:
        self.cluster = cluster
        self.directory = directory
        self.backend = backend
        self.job_id = ""

    def start(self, parallelism: int, rate: int = 200, savepoint: str | None = None, **options: str) -> None:
        self.job_id = self.cluster.submit(
            program_of("file_backed" if self.backend == "files" else "blocks"),
            entry=f"{'file_backed' if self.backend == 'files' else 'blocks'}:pipeline",
            arguments=[str(self.directory / "out"), str(ROWS), str(rate)],
            configuration=fast(
                execution__checkpointing__dir=str(self.directory / "checkpoints"),
                execution__checkpointing__incremental="true",
                state__storage__fs__memory_threshold="0",
                pipeline__max_parallelism="64",
                state__backend__type="rocksdb" if self.backend == "rocksdb" else "hashmap",
                state__backend__rocksdb__cache__max_keys="6",
                state__backend__rocksdb__memory__fixed_per_slot="8mb",
                **options,
            ),
            parallelism=parallelism,
            savepoint=savepoint,
        )

    @property
    def checkpoints(self) -> Path:
        return self.directory / "checkpoints" / self.job_id

    def latest(self) -> CompletedCheckpoint | None:
        """The one that is there now; it may go at any moment."""
        for directory in sorted(self.checkpoints.glob("chk-*"), key=lambda path: -int(path.name[4:])):
            if (directory / "_metadata").exists():
                return CompletedCheckpoint.from_json(read_metadata(str(directory)).document, directory.as_uri())
        return None

    def kill_a_worker(self) -> None:
        restarts = self.cluster.restarts(self.job_id)
        os.kill(self.cluster.worker_pids(self.job_id)[0], signal.SIGKILL)
        wait_for_restarts(self.cluster, self.job_id, restarts + 1)

    def assert_exact(self) -> None:
        out = self.directory / "out"
        seen, counts = visible(out / "seen"), visible(out / "counts")
        assert hidden(out) == []
        assert len(seen) == len(counts) == ROWS
        assert not seen.duplicated(["source", "n"]).any()
        assert (seen.seen == seen.n % BLOCK + 1).all(), "keyed state lost or repeated rows"
        assert not counts.duplicated(["source", "block", "rows"]).any(), "the aggregate lost or repeated rows"


def files_of(checkpoint: CompletedCheckpoint) -> set[str]:
    return {file.path for state in checkpoint.states.values() for file in state.files()}


def local_files(cluster: MiniCluster) -> set[Path]:
    """What backends of this cluster's workers keep on the disk, each in its process's directory."""

    async def directories() -> list[str]:
        return [slot.worker.peer.registration.directory for slot in cluster.cluster.slots.all() if slot.worker]

    return {path for directory in cluster.call(directories()) for path in Path(directory).glob("ckpt-state-*")}


@pytest.fixture(params=[*(pytest.param(name, marks=pytest.mark.long) for name in ("files", "hashmap")), "rocksdb"])
def job(request: pytest.FixtureRequest, cluster: MiniCluster, tmp_path: Path) -> FileBackedJob:
    """The module of the pipeline for ``files`` registers that backend in place of the one in memory."""
    return FileBackedJob(cluster, tmp_path, request.param)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shared_files_carry_a_job_through_kills_and_rescaling(job: FileBackedJob, tmp_path: Path) -> None:
    cluster = job.cluster
    job.start(2)
    cluster.wait_for_checkpoints(job.job_id, 3)
    job.kill_a_worker()
    cluster.wait_for_checkpoints(job.job_id, 3)
    savepoint = cluster.savepoint(job.job_id, tmp_path / "savepoints", stop=True)
    saved = CompletedCheckpoint.from_json(read_metadata(savepoint).document)
    handles = [h for state in saved.states.values() for entry in state.operators.values() for h in entry.keyed]
    assert handles
    assert all(isinstance(handle, IncrementalKeyedStateHandle) for handle in handles)
    assert not any(map(is_shared_path, files_of(saved))), "a savepoint shares nothing"
    job.start(1, savepoint=savepoint)
    cluster.wait_for_checkpoints(job.job_id, 3)
    job.kill_a_worker()
    cluster.wait_for_checkpoints(job.job_id, 2)
    savepoint = cluster.savepoint(job.job_id, tmp_path / "savepoints", stop=True)
    job.start(3, rate=0, savepoint=savepoint)
    cluster.wait_for_status(job.job_id, JobStatus.FINISHED)
    job.assert_exact()


def is_shared_path(path: str) -> bool:
    return "://" in path or path.startswith("/")


def table_bytes(job: FileBackedJob) -> list[float]:
    """What each operator's database says of its files, as the metrics of subtasks show it."""
    call, dispatcher = job.cluster.call, job.cluster.dispatcher
    vertices = call(dispatcher.job_details(job.job_id)).vertices
    subtasks = [
        metrics for v in vertices for metrics in call(dispatcher.vertex_metrics(job.job_id, v.vertex_id)).values()
    ]
    return [m[name] for m in subtasks for name in m if name.endswith(".rocksdb.total-sst-files-size")]


def test_later_checkpoints_reuse_files_of_earlier_ones_and_unused_files_are_deleted(job: FileBackedJob) -> None:
    cluster = job.cluster
    retained = {"execution__checkpointing__externalized_checkpoint_retention": "RETAIN_ON_CANCELLATION"}
    job.start(2, rate=300, state__backend__rocksdb__metrics__total_sst_files_size="true", **retained)

    def refers_back() -> bool:
        """The latest one uses a shared file that was written for another one."""
        try:
            latest = job.latest()
        except OSError:
            return False
        return latest is not None and any(
            is_shared_path(path) and not resolve(path).name.startswith(f"chk-{latest.id}-") for path in files_of(latest)
        )

    cluster.wait_until(refers_back, "an increment")
    if job.backend == "rocksdb":
        cluster.wait_until(lambda: min(table_bytes(job), default=0) > 0, "metrics of every database")
    cluster.call(cluster.dispatcher.cancel_job(job.job_id))
    cluster.wait_for_status(job.job_id, JobStatus.CANCELED)
    latest = job.latest()
    assert latest is not None
    used = {resolve(path).name for path in files_of(latest) if is_shared_path(path)}

    def shared() -> set[str]:
        return {path.name for path in (job.checkpoints / "shared").iterdir()}

    assert used <= shared(), "a completed checkpoint lacks a file"
    # What a checkpoint that was under way at the end has written may stay: its name says whose it is.
    assert {name for name in shared() - used if int(name.split("-")[1]) <= latest.id} == set()


@pytest.mark.row("203.3")
def test_a_savepoint_duplicates_files_of_checkpoints_and_outlives_them(job: FileBackedJob, tmp_path: Path) -> None:
    cluster = job.cluster
    job.start(2, rate=300)
    cluster.wait_for_checkpoints(job.job_id, 5)
    savepoint = cluster.savepoint(job.job_id, tmp_path / "savepoints", stop=True)
    for _ in range(10):  # a database that has just merged all of its files has none that a checkpoint holds
        job.start(2, rate=10, savepoint=savepoint)  # hardly anything changes from here on
        cluster.wait_for_checkpoints(job.job_id, 2)
        savepoint = cluster.savepoint(job.job_id, tmp_path / "savepoints", stop=True)
        taken = cluster.of_job(job.job_id, lambda job: job.checkpoint_statistics()).latest_savepoint
        assert taken is not None
        if taken.is_incremental:
            break
    assert taken.is_incremental
    assert 0 < taken.reused_size <= taken.state_size
    saved = CompletedCheckpoint.from_json(read_metadata(savepoint).document)
    assert not any(map(is_shared_path, files_of(saved)))
    names = {path.name for path in Path(resolve(savepoint).path).iterdir()}
    assert files_of(saved) | {"_metadata", "catalogue"} == names
    cluster.wait_until(lambda: not job.checkpoints.exists(), "the end of the checkpoints")
    moved = (tmp_path / "savepoints").rename(tmp_path / "moved") / Path(savepoint).name
    job.start(1, rate=0, savepoint=moved.as_uri())
    cluster.wait_for_status(job.job_id, JobStatus.FINISHED)
    job.assert_exact()


@pytest.mark.parametrize("job", [pytest.param("files", marks=pytest.mark.long), "rocksdb"], indirect=True)
def test_local_files_are_removed_with_their_worker_and_with_their_job(job: FileBackedJob) -> None:
    cluster = job.cluster
    job.start(2)
    cluster.wait_for_checkpoints(job.job_id, 2)
    seen = local_files(cluster)
    assert seen
    job.kill_a_worker()
    cluster.wait_for_checkpoints(job.job_id, 1)
    seen |= local_files(cluster)
    cluster.call(cluster.dispatcher.cancel_job(job.job_id))
    cluster.wait_for_status(job.job_id, JobStatus.CANCELED)
    cluster.wait_until(lambda: not any(path.exists() for path in seen), "the local files to go")
    cluster.wait_until(lambda: local_files(cluster) == set(), "those of the last attempt to go")
