"""NO_CLAIM and CLAIM with real tasks whose checkpoints share files: what a job needs, deletes and leaves alone."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, IncrementalKeyedStateHandle
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.connectors import numbers
from ckpt_runtime.connectors.splits import SPLITS
from ckpt_runtime.jobmaster.gateway_values import CheckpointKind, SnapshotInUse
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.effort import cells
from tests.support.jobs import SequenceJob, all_run, fast, program_of, wait_for_restarts
from tests.support.outputs import hidden, visible
from tests.support.patience import patient

BLOCK = 200
ROWS = 9000
KEYS_PER_SOURCE = 40
KEYS = SPLITS * KEYS_PER_SOURCE


class SharingJob:
    """The ``file_backed`` pipeline: its checkpoints share files, and some are retained."""

    program: tuple[str, ...] = ("file_backed:pipeline",)

    def __init__(self, cluster: MiniCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.job_id = ""

    def start(
        self,
        snapshot: Path | None = None,
        mode: str = "NO_CLAIM",
        interval: str = "250ms",
        rate: int = 300,
        rows: int = ROWS,
    ) -> None:
        self.job_id = submit(
            self.cluster, self.directory, snapshot, mode, interval, rate, rows=rows, program=self.program
        )

    @property
    def home(self) -> Path:
        return self.directory / "checkpoints" / self.job_id

    @property
    def retained(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted((path.parent for path in self.home.glob("chk-*/_metadata")), key=lambda path: int(path.name[4:]))

    def latest(self) -> CompletedCheckpoint | None:
        """The one that is there now; it may go at any moment."""
        try:
            return open_snapshot(str(self.retained[-1])).metadata if self.retained else None
        except StorageError:
            return None

    def refers_into(self, place: Path) -> bool | None:
        """Whether the latest checkpoint needs a file of the place; None when there is none to look at."""
        latest = self.latest()
        return None if latest is None else any(str(place) in path for path in files_of(latest))

    def cancel(self) -> None:
        self.cluster.call(self.cluster.dispatcher.cancel_job(self.job_id))
        self.cluster.wait_for_status(self.job_id, JobStatus.CANCELED)

    def stop(self) -> Path:
        return local(self.cluster.savepoint(self.job_id, self.directory / "savepoints", stop=True))

    def goes_on(self) -> None:
        """To its end, without the pauses in which a test does something to it."""
        self.start(self.stop(), rate=0)

    def kill_a_worker(self) -> None:
        restarts = self.cluster.restarts(self.job_id)
        self.cluster.wait_for_status(self.job_id, JobStatus.RUNNING)
        os.kill(self.cluster.worker_pids(self.job_id)[0], signal.SIGKILL)
        wait_for_restarts(self.cluster, self.job_id, restarts + 1)

    def finished(self) -> None:
        """With each row once, and state that never lost or repeated one."""
        self.cluster.wait_for_status(self.job_id, JobStatus.FINISHED)
        out = self.directory / "out"
        seen, counts = visible(out / "seen"), visible(out / "counts")
        assert hidden(out) == []
        assert len(seen) == len(counts) == ROWS
        assert not seen.duplicated(["source", "n"]).any()
        assert (seen.seen == seen.n % BLOCK + 1).all()
        assert not counts.duplicated(["source", "block", "rows"]).any()


def submit(
    cluster: MiniCluster,
    directory: Path,
    snapshot: Path | None,
    mode: str,
    interval: str = "1h",
    rate: int = 100,
    *,
    rows: int = ROWS,
    program: tuple[str, ...] = SharingJob.program,
    fork: bool = False,
) -> str:
    entry, *block = program
    return cluster.submit(
        program_of(entry.partition(":")[0]),
        entry=entry,
        arguments=[str(directory / "out"), str(rows), str(rate), *block],
        configuration=fast(
            execution__checkpointing__dir=str(directory / "checkpoints"),
            execution__checkpointing__interval=interval,
            execution__checkpointing__incremental="true",
            execution__checkpointing__num_retained="3",
            execution__checkpointing__externalized_checkpoint_retention="RETAIN_ON_CANCELLATION",
            execution__state_recovery__claim_mode=mode,
            state__storage__fs__memory_threshold="0",
            pipeline__max_parallelism="64",
        ),
        parallelism=1,
        savepoint=None if snapshot is None else str(snapshot),
        fork=fork,
    )


def local(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def files_of(checkpoint: CompletedCheckpoint) -> set[str]:
    return {file.path for state in checkpoint.states.values() for file in state.files()}


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def job(cluster: MiniCluster, tmp_path: Path) -> Iterator[SharingJob]:
    job = SharingJob(cluster, tmp_path)
    yield job
    if job.job_id and not cluster.status(job.job_id).is_globally_terminal:
        job.cancel()


def snapshot_of(job: SharingJob, kind: str) -> tuple[Path, Path]:
    """A snapshot that a job has left, and the directory in which all its files lie."""
    job.start()
    job.cluster.wait_for_checkpoints(job.job_id, 4)
    if kind == "native savepoint":
        found = job.stop()
        return found, found
    job.cancel()
    job.cluster.wait_until(lambda: not (job.home / "taskowned").exists(), "the clean-up")
    return job.retained[-1], job.home


@pytest.mark.row("203.6")
@pytest.mark.parametrize("kind", [pytest.param("native savepoint", marks=pytest.mark.long), "incremental checkpoint"])
def test_first_checkpoint_without_a_claim_is_full_and_makes_the_snapshot_unnecessary(
    job: SharingJob, kind: str
) -> None:
    snapshot, place = snapshot_of(job, kind)
    before = content(place)
    job.start(snapshot)
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    assert job.refers_into(place) is not True
    assert content(place) == before, "it stays the user's, byte by byte"
    shutil.rmtree(place)
    job.kill_a_worker()
    job.cluster.wait_for_checkpoints(job.job_id, 1)
    job.goes_on()
    job.finished()


@pytest.mark.row("203.6")
@pytest.mark.row("203.12")
@pytest.mark.parametrize("kind", ["native savepoint", pytest.param("incremental checkpoint", marks=pytest.mark.long)])
def test_files_of_a_claimed_snapshot_are_deleted_as_checkpoints_replace_them(job: SharingJob, kind: str) -> None:
    snapshot, place = snapshot_of(job, kind)
    siblings = [path for path in job.retained if path != snapshot] if kind != "native savepoint" else []
    job.start(snapshot, "CLAIM", interval="1h", rate=100)
    assert (place / "claim").exists()
    with pytest.raises(SnapshotInUse, match=f"cannot be claimed while job {job.job_id} is .*: that job would"):
        submit(job.cluster, job.directory, snapshot, "CLAIM", fork=True)
    dispatcher = job.cluster.dispatcher
    job.cluster.wait_until(lambda: all_run(job.cluster, job.job_id), "all subtasks to run")
    job.cluster.call(dispatcher.trigger_checkpoint(job.job_id, CheckpointKind.CONFIGURED, None))
    job.cluster.wait_until(lambda: job.refers_into(place) is not None, "the first checkpoint")
    assert job.refers_into(place), "it stands upon files of the snapshot"
    job.cluster.call(dispatcher.jobs[job.job_id].living().patch_checkpoint_config(CheckpointOverrides(interval_ms=250)))
    job.kill_a_worker()
    job.cluster.wait_until(lambda: not snapshot.joinpath("_metadata").exists(), "the end of the snapshot")
    assert all(open_snapshot(str(sibling)).verify() == [] for sibling in siblings)
    savepoint = job.stop()
    if kind == "native savepoint":
        job.cluster.wait_until(lambda: not place.exists(), "the last file of the savepoint to go")
    else:
        job.cluster.wait_until(lambda: not (place / "claim").exists(), "the end of the claim")
        assert siblings
        assert all(open_snapshot(str(sibling)).verify() == [] for sibling in siblings)
    job.start(savepoint, rate=0)
    job.finished()


@pytest.mark.row("203.6")
@pytest.mark.row("203.12")
def test_snapshot_claimed_by_an_ended_job_of_this_session_can_be_disposed_of(job: SharingJob) -> None:
    """What its retained checkpoint needs stays until that has gone; and that stays while a living job needs it."""
    cluster, dispatcher = job.cluster, job.cluster.dispatcher
    savepoint, place = snapshot_of(job, "native savepoint")
    job.start(savepoint, "CLAIM", interval="1h", rate=100)
    cluster.wait_until(lambda: all_run(cluster, job.job_id), "all subtasks to run")
    cluster.call(dispatcher.trigger_checkpoint(job.job_id, CheckpointKind.CONFIGURED, None))
    cluster.wait_until(lambda: job.refers_into(place), "the checkpoint that stands upon files of the savepoint")
    with pytest.raises(SnapshotInUse, match=f"cannot be disposed of while job {job.job_id} is RUNNING"):
        dispose(cluster, savepoint)
    job.cancel()
    cluster.wait_for_clean_up(job.job_id)
    assert (place / "claim").exists()
    retained = job.retained[-1]
    job.start(retained)
    with pytest.raises(SnapshotInUse, match=f"while job {job.job_id} is .*: that job would start from it"):
        dispose(cluster, retained)
    dispose(cluster, savepoint)
    assert not (place / "_metadata").exists()
    assert (place / "claim").exists()
    assert open_snapshot(str(retained)).verify() == []
    cluster.wait_until(lambda: all_run(cluster, job.job_id), "all subtasks to run")
    job.cancel()
    cluster.wait_for_clean_up(job.job_id)
    dispose(cluster, retained)
    assert not retained.exists()
    dispose(cluster, savepoint)
    assert not place.exists()


def dispose(cluster: MiniCluster, path: Path) -> None:
    """Raises what the disposal is refused with, or fails with."""
    with CkptClient(cluster.rest_url) as client:
        trigger_id = cluster.call(cluster.dispatcher.dispose_savepoint(str(path), None))
        client.wait_for_operation("savepoint-disposal", trigger_id, timeout_s=patient(180))


@pytest.mark.row("203.6")
def test_a_job_of_another_cluster_that_claims_the_same_savepoint_is_refused_with_the_reason(job: SharingJob) -> None:
    snapshot, _ = snapshot_of(job, "native savepoint")
    job.start(snapshot, "CLAIM", interval="1h", rate=100)
    with MiniCluster() as other:
        before = content(snapshot)
        with pytest.raises(SnapshotInUse, match="is unknown here: it has claimed.*ckpt snapshot release file:/"):
            submit(other, job.directory, snapshot, "CLAIM")
        with pytest.raises(SnapshotInUse, match="cannot be disposed of while job"):
            other.call(other.dispatcher.dispose_savepoint(str(snapshot), None))
        assert content(snapshot) == before


@pytest.mark.row("203.6")
@pytest.mark.parametrize(
    ("kind", "mode"), cells(["native savepoint", "canonical savepoint", "full checkpoint"], ["NO_CLAIM", "CLAIM"])
)
def test_both_restore_modes_work_on_snapshots_of_whole_files(
    cluster: MiniCluster, tmp_path: Path, kind: str, mode: str
) -> None:
    """The backend in memory without increments."""
    job = SequenceJob(cluster, tmp_path)
    options = fast(
        execution__checkpointing__externalized_checkpoint_retention="RETAIN_ON_CANCELLATION",
        execution__state_recovery__claim_mode=mode,
        state__storage__fs__memory_threshold="0",
    )
    job.start(configuration=options)
    job.running()
    cluster.wait_for_checkpoints(job.job_id, 2)
    if kind == "full checkpoint":
        job.canceled()
        cluster.wait_until(lambda: len(job.left_behind()) == 1, "the clean-up")
        snapshot = job.checkpoints / job.job_id / job.left_behind()[0]
    else:
        form = SavepointFormat.CANONICAL if kind == "canonical savepoint" else SavepointFormat.NATIVE
        snapshot = local(cluster.savepoint(job.job_id, tmp_path / "savepoints", stop=True, savepoint_format=form))
    before = content(snapshot)
    job.start(savepoint=str(snapshot), configuration=options)
    job.running()
    cluster.wait_for_checkpoints(job.job_id, 1)
    if mode == "CLAIM":
        cluster.wait_until(lambda: not snapshot.exists(), "the end of the snapshot, its claim included")
    else:
        assert content(snapshot) == before
        shutil.rmtree(snapshot)
    job.inject("map-raise")
    job.restarted(1)
    job.stopped()


@pytest.mark.long
@pytest.mark.row("203.6")
@pytest.mark.row("203.12")
def test_state_in_memory_of_which_little_changes_stays_in_a_claimed_savepoint_and_leaves_another(
    job: SharingJob,
) -> None:
    """While the savepoint is claimed, checkpoints refer to its parts, also after a restart. Otherwise none does."""
    job.program = ("blocks:pipeline", f"n % {KEYS_PER_SOURCE}")
    cluster, many = job.cluster, 1000 * KEYS

    def parts_in(place: Path) -> list[bool]:
        """For each state in the latest checkpoint: whether its largest part, which has nearly all keys, is there."""
        latest = job.latest()
        states = [] if latest is None else [entry for s in latest.states.values() for entry in s.operators.values()]
        handles = [each for state in states for each in state.keyed if isinstance(each, IncrementalKeyedStateHandle)]
        return [str(place) in max(each.files.values(), key=lambda file: file.length).path for each in handles]

    job.start(rate=2 * KEYS, rows=many)
    cluster.wait_until(lambda: len(visible(job.directory / "out" / "counts")) > KEYS, "every key to be seen")
    claimed = job.stop()
    job.start(claimed, "CLAIM", rate=20, rows=many)
    for _ in range(2):
        cluster.wait_for_checkpoints(job.job_id, 2)
        assert parts_in(claimed) == [True, True]
        job.kill_a_worker()
    cluster.wait_for_checkpoints(job.job_id, 1)
    left = job.stop()
    cluster.wait_until(lambda: not claimed.exists(), "the last file of the claimed savepoint to go")
    before = content(left)
    job.start(left, "NO_CLAIM", rate=20, rows=many)
    cluster.wait_for_checkpoints(job.job_id, 1)
    assert parts_in(left) == [False, False]
    assert content(left) == before, "it stays the user's, byte by byte"
    shutil.rmtree(left)
    job.kill_a_worker()
    cluster.wait_for_checkpoints(job.job_id, 1)
    savepoint = job.stop()
    out = job.directory / "out"
    cluster.wait_for_status(job.job_id, JobStatus.FINISHED)
    rows = SPLITS * numbers.BLOCK * (visible(out / "seen").n.max() // numbers.BLOCK + 1)  # as many of each source
    job.start(savepoint, rate=0, rows=rows)
    cluster.wait_for_status(job.job_id, JobStatus.FINISHED)
    seen, counts = visible(out / "seen"), visible(out / "counts")
    assert hidden(out) == []
    assert len(seen) == len(counts) == rows
    assert not seen.duplicated(["source", "n"]).any()
    assert (seen.seen == seen.n // KEYS_PER_SOURCE + 1).all()
    assert not counts.duplicated(["source", "block", "rows"]).any()


@pytest.mark.row("203.3")
def test_disposing_of_a_savepoint_harms_no_checkpoint_and_deleting_checkpoints_no_savepoint(job: SharingJob) -> None:
    job.start()
    cluster = job.cluster
    cluster.wait_for_checkpoints(job.job_id, 2)
    doomed, kept = (local(cluster.savepoint(job.job_id, job.directory / "savepoints")) for _ in range(2))
    cluster.wait_for_checkpoints(job.job_id, 2)  # the second one commits what the savepoints cover
    job.cancel()
    cluster.call(cluster.dispatcher.dispose_savepoint(str(doomed), None))
    cluster.wait_until(lambda: not doomed.exists(), "the disposal")
    latest, home = job.retained[-1], job.home
    job.start(latest, rate=0)
    job.finished()
    shutil.rmtree(home)
    assert open_snapshot(str(kept)).verify() == []
    job.start(kept)
    job.kill_a_worker()
    cluster.wait_for_checkpoints(job.job_id, 1)
    job.goes_on()
    cluster.wait_for_status(job.job_id, JobStatus.FINISHED)
    seen = visible(job.directory / "out" / "seen")
    assert len(seen) > ROWS, "rows since the savepoint have come a second time"
    assert len(seen.drop_duplicates(["source", "n", "seen"])) == ROWS
