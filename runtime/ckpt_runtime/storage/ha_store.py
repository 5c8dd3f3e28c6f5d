"""The high-availability directory: everything that a new driver needs to continue where an old one ended.

Layout below ``<high-availability.storageDir>/<cluster id>``::

    leader.json  leader/<epoch>  lease-<epoch>.json
    jobs/<job id>/plan/<revision>  jobs/<job id>/archive-<checksum>
    jobs/<job id>/checkpoints/<revision>  jobs/<job id>/counters/<revision>  jobs/<job id>/failures/<revision>
    results/<job id>/<revision>
    snapshots/<job id>/
    programs/holds/<revision>  programs/archive-<checksum>
    retired/<revision>  upgrades/<revision>

:class:`HaStore` combines the stores. Leader, jobs and checkpoint pointers have modules of their own; the small stores
are defined here: results of ended jobs, held programs, retired job ids and upgrades in progress. Only the leader can
change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Struct, field
from msgspec.structs import replace

from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.storage.checkpoint_pointer_store import CheckpointPointerStore, JobCounters
from ckpt_runtime.storage.checkpoint_storage import check_job_id, is_job_id
from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import Location, delete_file, list_names, make_directory, read_bytes, resolve
from ckpt_runtime.storage.job_store import MAX_ARCHIVE_BYTES, JobStore
from ckpt_runtime.storage.leader_store import LeaderStore
from ckpt_runtime.storage.publish import checksum_of, publish
from ckpt_runtime.storage.versioned_document import Fence, FencedDocument, VersionedDocument, no_fence


class _StoredResult(Struct, frozen=True, omit_defaults=True):
    """Has no result when the document was only adopted, to keep an earlier leader from storing one."""

    result: dict[str, Any] | None = None
    dirty: bool | None = None


class JobResultStore:
    """The results of one high-availability directory."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._directory = directory
        self._fence = fence
        self._epoch = epoch

    def create_dirty(self, job_id: str, result: Mapping[str, Any]) -> None:
        """Stores the result of a job that has just ended.

        Raises :class:`AlreadyExistsError` when it has one, :class:`AmbiguousWriteError` when it is unknown whether
        the result is stored.
        """
        document = self._document(job_id)
        url = document.directory.url
        new = _StoredResult(dict(result), True)

        def created(present: _StoredResult) -> _StoredResult:
            if present.result is not None and present != new:
                raise AlreadyExistsError(f"job {job_id} already has a result in {url}", url)
            return new

        document.change(created)

    def mark_clean(self, job_id: str) -> None:
        """Notes that the job's clean-up is finished. Raises :class:`NotFoundError` for a job without a result."""
        self._document(job_id).change(lambda present: _StoredResult(self._result(job_id, present), False))

    def adopt(self, job_id: str) -> None:
        """After this call earlier leaders can neither store a result of the job nor change it."""
        self._document(job_id).adopt()

    def get(self, job_id: str) -> dict[str, Any]:
        """The result of a job. Raises :class:`NotFoundError` for a job that has not ended."""
        return self._result(job_id, self._document(job_id).read())

    def has(self, job_id: str) -> bool:
        """Whether the job has ended; an unreadable result counts as well."""
        try:
            return self._document(job_id).read().result is not None
        except CorruptFileError:
            return True

    def is_dirty(self, job_id: str) -> bool:
        """Whether the job's clean-up is unfinished. Raises :class:`NotFoundError` for a job that has not ended."""
        stored = self._document(job_id).read()
        self._result(job_id, stored)
        return bool(stored.dirty)

    def list_ids(self, *, dirty_only: bool = False) -> list[str]:
        """Ids of all jobs that have ended, sorted; with ``dirty_only`` only those whose clean-up is unfinished."""
        ids = [name for name in list_names(self._directory) if is_job_id(name) and self.has(name)]
        return [job_id for job_id in ids if not dirty_only or self.is_dirty(job_id)]

    def remove(self, job_id: str) -> None:
        """Deletes a result; a missing result is not an error."""
        self._fence()
        VersionedDocument(self._document(job_id).directory).delete()

    def _result(self, job_id: str, stored: _StoredResult) -> dict[str, Any]:
        if stored.result is None:
            url = self._document(job_id).directory.url
            raise NotFoundError(f"job {job_id} has no result in {self._directory.url}", url)
        return stored.result

    def _document(self, job_id: str) -> FencedDocument[_StoredResult]:
        return FencedDocument(self._directory.child(check_job_id(job_id)), _StoredResult, self._fence, self._epoch)


_ARCHIVE = "archive-"


class HeldProgram(Struct, frozen=True):
    """``holds`` maps each holder to the start of its hold, in milliseconds since the epoch."""

    checksum: str
    uploaded_at_ms: int
    holds: dict[str, int]


class _HeldPrograms(Struct, frozen=True):
    programs: dict[str, HeldProgram] = field(default_factory=dict)


class HeldProgramStore:
    """The held programs of one cluster, by program id. Calls block and raise StorageError."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._directory = directory
        self._document = FencedDocument(directory.child("holds"), _HeldPrograms, fence, epoch)
        self._fence = fence

    def adopt(self) -> Mapping[str, HeldProgram]:
        """All programs; earlier leaders can no longer hold or release any. Deletes archives that are not held."""
        programs = self._document.adopt().programs
        named = {self._name(program.checksum) for program in programs.values()}
        for name in list_names(self._directory):
            if name.startswith(_ARCHIVE) and name not in named:
                with suppress(StorageError):  # the next leader tries again
                    delete_file(self._directory.child(name))
        return programs

    def read_archive(self, program: HeldProgram) -> bytes:
        """The program's archive. Raises CorruptFileError for a damaged one."""
        file = self._directory.child(self._name(program.checksum))
        archive = read_bytes(file, MAX_ARCHIVE_BYTES)
        if checksum_of(archive) != program.checksum:
            raise CorruptFileError(f"{file.url} is damaged: its checksum is not {program.checksum}", file.url)
        return archive

    def hold(self, program_id: str, uploaded_at_ms: int, archive: bytes, owner: str, since_ms: int) -> None:
        """Stores a program and a hold on it; the call may be repeated."""
        self._fence()
        checksum = checksum_of(archive)
        make_directory(self._directory)
        with suppress(AlreadyExistsError):
            # Archive first: the document must only name archives that exist.
            publish(self._directory.child(self._name(checksum)), archive)

        def held(present: _HeldPrograms) -> _HeldPrograms:
            known = present.programs.get(program_id) or HeldProgram(checksum, uploaded_at_ms, {})
            changed = replace(known, holds={owner: since_ms, **known.holds})
            return _HeldPrograms({**present.programs, program_id: changed})

        self._document.change(held)

    def release(self, program_id: str, owner: str) -> None:
        """Removes a hold, and with the last one the archive; a program without a hold is not an error."""
        gone: list[HeldProgram] = []

        def released(present: _HeldPrograms) -> _HeldPrograms:
            gone.clear()
            known = present.programs.get(program_id)
            if known is None:
                return present
            holds = {name: since for name, since in known.holds.items() if name != owner}
            others = {name: program for name, program in present.programs.items() if name != program_id}
            if holds:
                return _HeldPrograms({**others, program_id: replace(known, holds=holds)})
            gone.append(known)
            return _HeldPrograms(others)

        programs = self._document.change(released).programs
        still_named = {program.checksum for program in programs.values()}
        for program in gone:
            if program.checksum not in still_named:
                delete_file(self._directory.child(self._name(program.checksum)))

    @staticmethod
    def _name(checksum: str) -> str:
        return _ARCHIVE + checksum.rpartition(":")[2]


KEPT_MS: Final = 30 * 24 * 3_600_000
"""How long an id is kept; no request stays in flight for longer."""


class _RetiredIds(Struct, frozen=True):
    ids: dict[str, int] = field(default_factory=dict)


class RetiredIdStore:
    """The retired ids of one cluster, with their time in milliseconds since the epoch. Blocks; raises StorageError."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, _RetiredIds, fence, epoch)

    def adopt(self) -> Mapping[str, int]:
        """All retired ids; earlier leaders can no longer retire any."""
        return self._document.adopt().ids

    def read(self) -> Mapping[str, int]:
        """All retired ids."""
        return self._document.read().ids

    def retire(self, job_id: str, now_ms: int) -> None:
        """Retires an id; the call may be repeated. Forgets ids older than :data:`KEPT_MS`."""

        def retired(present: _RetiredIds) -> _RetiredIds:
            kept = {known: since for known, since in present.ids.items() if now_ms - since < KEPT_MS}
            return _RetiredIds({job_id: now_ms, **kept})

        self._document.change(retired)


@dataclass(frozen=True, slots=True)
class HeldUpgrade:
    """An upgrade that replaces, suspends or resumes the job of a lineage, and the time until which others must wait.

    ``owner`` is the token that the requests of the upgrade carry; ``requester`` describes the requester in words.
    ``job_id`` is the job that the upgrade began with; ``snapshot`` is the snapshot that it will resume from, once
    known.
    """

    owner: str
    job_id: str
    since_ms: NonNegative
    until_ms: NonNegative
    requester: str | None = None
    snapshot: str | None = None


class HeldUpgrades(Struct, frozen=True):
    """All upgrades in progress, by lineage."""

    upgrades: Mapping[str, HeldUpgrade] = field(default_factory=dict)


DEFAULT_CLUSTER_ID = "default"


class HaStore:
    """One cluster's directory. ``fence`` is called before every change of a store and raises to forbid it.

    ``epoch`` is that of this leader: it cannot change documents that a later leader has adopted, even when the fence is
    late.
    """

    def __init__(
        self, directory: str | Location, cluster_id: str = DEFAULT_CLUSTER_ID, fence: Fence = no_fence, epoch: int = 0
    ) -> None:
        """Touches nothing. Raises :class:`InvalidLocationError` for an unusable directory or cluster id."""
        base = directory if isinstance(directory, Location) else resolve(directory)
        self.root = base.child(cluster_id)
        self.fence = fence
        self._epoch = epoch
        self.leader = LeaderStore(self.root)
        self.jobs = JobStore(self.root.child("jobs"), fence, epoch)
        self.results = JobResultStore(self.root.child("results"), fence, epoch)
        self.programs = HeldProgramStore(self.root.child("programs"), fence, epoch)
        self.retired = RetiredIdStore(self.root.child("retired"), fence, epoch)
        self.upgrades = FencedDocument(self.root.child("upgrades"), HeldUpgrades, fence, epoch)
        self.snapshots = self.root.child("snapshots")
        """The checkpoint directory of jobs that do not configure one."""

    def pointers(self, job_id: str) -> CheckpointPointerStore:
        """The checkpoint pointers of one job; :meth:`JobStore.remove` deletes them with the job."""
        return CheckpointPointerStore(self._job(job_id).child("checkpoints"), self.fence, self._epoch)

    def counters(self, job_id: str) -> JobCounters:
        """Checkpoint ids and attempts of one job; :meth:`JobStore.remove` deletes the counters with the job."""
        return JobCounters(self._job(job_id).child("counters"), self.fence, self._epoch)

    def failures(self, job_id: str) -> FencedDocument[dict[str, Any]]:
        """The exception history of one job; :meth:`JobStore.remove` deletes it with the job."""
        return FencedDocument(self._job(job_id).child("failures"), dict[str, Any], self.fence, self._epoch)

    def _job(self, job_id: str) -> Location:
        return self.root.child("jobs", check_job_id(job_id))
