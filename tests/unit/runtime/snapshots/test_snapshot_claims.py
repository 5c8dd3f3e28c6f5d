"""Claims of jobs that resume from one another, with real files: which job may claim what, and what each one deletes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, StateFile
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.jobmaster.job_host import Pool, Result
from ckpt_runtime.jobmaster.job_record import JobRecord
from ckpt_runtime.jobmaster.storage_effects import StorageEffects
from ckpt_runtime.snapshots.clean_up import JobCleanUp
from ckpt_runtime.snapshots.job_claims import JobClaims, OwnedElsewhereError, claim_snapshot
from ckpt_runtime.snapshots.snapshot import disposal_of, open_snapshot
from ckpt_runtime.storage import filesystem
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage, SnapshotDisposal
from ckpt_runtime.storage.claims import CLAIM_NAME, Claimant, ClaimedError, read_claim
from ckpt_runtime.storage.errors import InvalidLocationError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.state_files import StateFileWriter
from tests.support.snapshots import write_snapshot

FIRST, SECOND, THIRD = ("1" * 32, "2" * 32, "3" * 32)


class Jobs:
    """Directories of jobs below one checkpoint directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def storage(self, job_id: str) -> CheckpointStorage:
        storage = CheckpointStorage(str(self.root), job_id)
        storage.initialize()
        return storage

    def shared_file(self, job_id: str, number: int) -> StateFile:
        with StateFileWriter(self.storage(job_id).shared, 0, f"chk-{number}-") as writer:
            writer.write(b"state")
            file = writer.finish()
        return StateFile(writer.location.url, file.length, file.checksum)

    def checkpoint(self, job_id: str, number: int, *files: StateFile) -> CompletedCheckpoint:
        directory = self.storage(job_id).initialize_checkpoint(number)
        return replace(write_snapshot(directory, *files), job_id=job_id, id=number, directory=directory.url)

    def claim(self, snapshot: CompletedCheckpoint, job_id: str, cluster: str = "a", *written: str) -> JobClaims:
        found = open_snapshot(snapshot.directory).metadata
        return claim_snapshot(found, Claimant(job_id, cluster, self.storage(job_id).location.url), written)

    def owner(self, job_id: str) -> str | None:
        claim = read_claim(self.storage(job_id).location)
        return None if claim is None else claim.owner.job_id


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    return Jobs(tmp_path)


def is_there(file: StateFile) -> bool:
    return Path(file.path.removeprefix("file://")).exists()


def discard(snapshot: CompletedCheckpoint) -> None:
    open_snapshot(snapshot.directory).disposal().execute()


def test_a_claim_deletes_what_no_sibling_needs_and_stays_while_anything_is_left(jobs: Jobs) -> None:
    both, own = jobs.shared_file(FIRST, 1), jobs.shared_file(FIRST, 2)
    sibling, claimed = jobs.checkpoint(FIRST, 1, both), jobs.checkpoint(FIRST, 2, both, own)
    claims = jobs.claim(claimed, SECOND)
    with pytest.raises(ClaimedError):
        jobs.claim(sibling, THIRD)
    discard(claimed)
    claims.delete([both.path, own.path], 1)
    assert (is_there(both), is_there(own)) == (True, False)
    assert open_snapshot(sibling.directory).verify() == []
    assert jobs.owner(FIRST) == SECOND
    claims.release()
    assert jobs.owner(FIRST) is None
    assert is_there(both)
    assert jobs.claim(sibling, THIRD).places == (jobs.storage(FIRST).location.url,)


@pytest.mark.parametrize("missed", ["_metadata", CLAIM_NAME])
def test_a_store_that_misses_a_file_for_a_moment_costs_no_sibling_a_file_and_leaves_none(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, missed: str
) -> None:
    both, own = jobs.shared_file(FIRST, 1), jobs.shared_file(FIRST, 2)
    sibling, claimed = jobs.checkpoint(FIRST, 1, both), jobs.checkpoint(FIRST, 2, both, own)
    claims = jobs.claim(claimed, SECOND)
    discard(claimed)
    read, misses = filesystem.read_bytes, [3]

    def forgetful(location: Location, limit: int) -> bytes:
        if location.name == missed and misses[0]:
            misses[0] -= 1
            raise NotFoundError(f"cannot find {location.url}", location.url)
        return read(location, limit)

    monkeypatch.setattr(filesystem, "read_bytes", forgetful)
    with pytest.raises(StorageError, match="is there and cannot be read"):
        claims.delete([both.path, own.path], 1)
    misses[0] = 2
    claims.delete([both.path, own.path], 1)
    assert (is_there(both), is_there(own)) == (True, False)
    misses[0] = 2
    claims.release()
    assert jobs.owner(FIRST) is None
    assert open_snapshot(sibling.directory).verify() == []


def test_clean_up_deletes_the_checkpoint_whose_deletion_an_earlier_driver_began(jobs: Jobs) -> None:
    shared = [jobs.shared_file(FIRST, number) for number in (1, 2)]
    older, newer = (jobs.checkpoint(FIRST, number + 1, file) for number, file in enumerate(shared))
    Path(shared[0].path.removeprefix("file://")).unlink()
    JobCleanUp(jobs.storage(FIRST), 1, keeps_nothing=False, directory_known=True, first_kept=2)()
    assert not Path(older.directory.removeprefix("file://")).exists()
    assert open_snapshot(newer.directory).verify() == []


def test_a_checkpoint_that_the_owner_has_retained_keeps_its_claim_for_an_heir(jobs: Jobs) -> None:
    file = jobs.shared_file(FIRST, 1)
    sibling, claimed = jobs.checkpoint(FIRST, 1, file), jobs.checkpoint(FIRST, 2, file)
    second = jobs.claim(claimed, SECOND)
    discard(claimed)
    retained = jobs.checkpoint(SECOND, 3, file)
    second.release()
    assert jobs.owner(FIRST) == SECOND, "its retained checkpoint needs a file there"
    with pytest.raises(ClaimedError, match=f"claimed by job {SECOND}"):
        jobs.claim(sibling, THIRD)
    third = jobs.claim(retained, THIRD)
    assert jobs.owner(FIRST) == jobs.owner(SECOND) == THIRD
    discard(retained)
    discard(sibling)
    third.delete([file.path], 4)
    assert not is_there(file)
    assert not jobs.root.joinpath(FIRST).exists(), "nothing of it is left"
    third.release()
    assert jobs.owner(SECOND) is None


def test_an_heir_that_never_replaced_its_snapshot_gives_everything_back(jobs: Jobs) -> None:
    file = jobs.shared_file(FIRST, 1)
    claimed = jobs.checkpoint(FIRST, 1, file)
    second = jobs.claim(claimed, SECOND)
    discard(claimed)
    retained = jobs.checkpoint(SECOND, 2, file)
    second.release()
    jobs.claim(retained, THIRD).release()
    assert jobs.owner(SECOND) is None
    assert jobs.owner(FIRST) == SECOND
    assert open_snapshot(retained.directory).verify() == []
    assert jobs.claim(retained, THIRD).places


def test_files_left_by_a_crash_are_deleted_at_the_end_of_the_job(jobs: Jobs) -> None:
    file = jobs.shared_file(FIRST, 1)
    claimed = jobs.checkpoint(FIRST, 1, file)
    claims = jobs.claim(claimed, SECOND)
    discard(claimed)
    claims.release()
    assert not is_there(file)
    assert not jobs.root.joinpath(FIRST).exists()


def test_only_files_named_by_the_claim_are_deleted(jobs: Jobs, tmp_path: Path) -> None:
    file, other = jobs.shared_file(FIRST, 1), jobs.shared_file(FIRST, 1)
    claims = jobs.claim(jobs.checkpoint(FIRST, 1, file), SECOND)
    claims.delete([other.path], 1)
    assert is_there(other)


def test_the_claim_of_another_job_is_respected(jobs: Jobs) -> None:
    file = jobs.shared_file(FIRST, 1)
    jobs.claim(jobs.checkpoint(FIRST, 1, file), SECOND)
    other = JobClaims(Claimant(THIRD, "a", "file:///x"), (jobs.storage(FIRST).location.url,))
    other.delete([file.path], 1)
    other.release()
    assert is_there(file)
    assert jobs.owner(FIRST) == SECOND


@pytest.mark.row("203.12")
def test_the_checkpoints_of_a_job_that_may_be_running_are_not_claimed(jobs: Jobs) -> None:
    snapshot = jobs.checkpoint(FIRST, 1, jobs.shared_file(FIRST, 1))
    storage = jobs.storage(FIRST)
    with pytest.raises(InvalidLocationError, match="an active job writes to"):
        jobs.claim(snapshot, SECOND, "a", storage.location.url)
    storage.claim("s3://ha/other")
    with pytest.raises(OwnedElsewhereError, match="in the cluster s3://ha/other"):
        jobs.claim(snapshot, SECOND)
    assert jobs.owner(FIRST) is None


def test_forged_snapshot_cannot_name_files_of_others_for_deletion(jobs: Jobs, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"x")
    forged = jobs.checkpoint(FIRST, 1, StateFile(precious.as_uri(), 1, "xxh3-128:" + "0" * 32))
    with pytest.raises(InvalidLocationError, match="which does not contain shared files of a job"):
        jobs.claim(forged, SECOND)
    assert jobs.owner(FIRST) is None
    assert not (tmp_path / "claim").exists()


class AtOnce:
    """A host that does everything when it is asked to; ``later`` has what is to be done again."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []

    def now(self) -> Instant:
        return Instant(0, 0)

    def in_pool(self, pool: Pool | str, call: Callable[[], Any], answer: Callable[[Result[Any]], None]) -> None:
        result = call()
        answer(lambda: result)

    def call_later(self, delay_ms: float, call: Callable[[], None]) -> None:
        self.later.append(call)


class FailingRecord(JobRecord):
    """Cannot settle a disposal the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.settled: list[int] = []
        self.failures = 1

    def settle(self, checkpoint_id: int) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise StorageError("away", "ha")
        self.settled.append(checkpoint_id)


def effects(
    jobs: Jobs, claims: JobClaims, host: AtOnce, reported: list[Any], record: JobRecord, *retained: CompletedCheckpoint
) -> StorageEffects:
    """Of the second job under a driver that took it over."""
    entries = [RetainedCheckpoint(checkpoint) for checkpoint in retained]
    storage = jobs.storage(SECOND)
    return StorageEffects(
        SECOND, storage, record, cast(Any, host), reported.append, lambda: entries, range(3, 5), claims
    )


@pytest.mark.row("203.6")
def test_claimed_files_that_a_dead_driver_did_not_get_to_are_found_by_the_next(jobs: Jobs) -> None:
    needed, unused, foreign = (jobs.shared_file(FIRST, 1) for _ in range(3))
    jobs.checkpoint(FIRST, 1, foreign)
    claimed = jobs.checkpoint(FIRST, 2, needed, unused)
    claims = jobs.claim(claimed, SECOND)
    own = jobs.checkpoint(SECOND, 3, needed)
    discard(claimed)  # and there it died
    host, reported = AtOnce(), list[Any]()
    shell = effects(jobs, claims, host, reported, JobRecord(), own)
    shell.execute(out.FindLeftovers())
    (found,) = reported
    assert found.shared == (unused.path,)
    shell.execute(out.DeleteSharedFiles(found.shared))
    assert [is_there(file) for file in (needed, unused, foreign)] == [True, False, True]


@pytest.mark.row("203.6")
def test_claimed_files_of_a_disposal_that_fails_at_the_start_of_a_driver_are_found_by_it(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = jobs.shared_file(FIRST, 1)
    claimed = jobs.checkpoint(FIRST, 2, shared)
    claims, own = jobs.claim(claimed, SECOND), jobs.checkpoint(SECOND, 3)
    disposal = disposal_of(claimed.directory, claimed=True)
    host, reported = AtOnce(), list[Any]()
    shell = effects(jobs, claims, host, reported, JobRecord(), own)
    with monkeypatch.context() as patch:
        patch.setattr(SnapshotDisposal, "execute", _fail)
        shell.dispose({2: disposal})
        assert open_snapshot(claimed.directory).verify() == []
    shell.execute(out.FindLeftovers())
    assert reported[0].shared == (shared.path,)


def _fail(*_: object) -> None:
    raise StorageError("away", "snapshots")


@pytest.mark.row("203.6")
def test_a_claimed_snapshot_that_a_dead_driver_did_not_get_to_keeps_its_files(jobs: Jobs) -> None:
    """A snapshot that lacks files must not look complete: its deletion begins with its metadata."""
    shared = jobs.shared_file(FIRST, 1)
    claimed = jobs.checkpoint(FIRST, 2, shared)
    claims = jobs.claim(claimed, SECOND)
    own = jobs.checkpoint(SECOND, 3)
    reported = list[Any]()
    effects(jobs, claims, AtOnce(), reported, JobRecord(), own).execute(out.FindLeftovers())
    assert reported[0].shared == ()
    assert open_snapshot(claimed.directory).verify() == []
    discard(claimed)
    claims.release()
    assert not is_there(shared)


@pytest.mark.row("203.6")
def test_a_disposal_that_was_done_and_not_recorded_is_done_again(jobs: Jobs) -> None:
    """With the last claimed file the directory of the job that wrote it goes as well."""
    claimed = jobs.checkpoint(FIRST, 2)
    claims = jobs.claim(claimed, SECOND)
    host, record = AtOnce(), FailingRecord()
    disposal = open_snapshot(claimed.directory).disposal()
    shell = effects(jobs, claims, host, [], record)
    shell.dispose({2: disposal})
    assert not jobs.root.joinpath(FIRST).exists()
    assert record.settled == []
    host.later.pop()()
    assert record.settled == [2]
    assert effects(jobs, claims, host, [], record).dispose({2: disposal}) is None
    assert record.settled == [2, 2]
