"""Stored jobs: the graph, code archive and configuration that a new driver needs to run a job again.

Every change is fetch, modify, write under one lock with a compare-and-set underneath, so a driver that is no longer the
leader loses. A change never creates a job that does not exist.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import to_builtins

from ckpt_runtime.configuration.configuration import ChangeNote
from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES
from ckpt_runtime.graph.schema import checked
from ckpt_runtime.storage.checkpoint_storage import check_job_id, is_job_id
from ckpt_runtime.storage.errors import AlreadyExistsError, ConflictError, CorruptFileError, NotFoundError
from ckpt_runtime.storage.filesystem import Location, delete_tree, list_names, make_directory, read_bytes
from ckpt_runtime.storage.publish import checksum_of, publish
from ckpt_runtime.storage.versioned_document import Fence, Revision, VersionedDocument, check_epoch, no_fence

MAX_ARCHIVE_BYTES = 1 << 30
_PLAN_NAME = "plan"
_ARCHIVE_NAME = "archive"


@dataclass(frozen=True, slots=True)
class StoredJob:
    """An execution plan as it is stored.

    ``graph`` is a job graph's JSON form. ``configuration`` holds the job's own options, and the overrides of FLIP-571
    under ``$internal.job-checkpoint-overrides``. ``version`` counts accepted changes of the configuration (FLIP-530),
    and ``notes`` are the latest ones.
    ``properties`` are JSON values that the submitter chooses (entry point, arguments, what to restore from).
    ``archive_checksum`` is empty for a job without an archive. ``epoch`` is that of the leader that changed it last.
    """

    job_id: str
    graph: Mapping[str, Any]
    configuration: Mapping[str, str] = field(default_factory=dict)
    version: int = 1
    properties: Mapping[str, Any] = field(default_factory=dict)
    archive_checksum: str = ""
    epoch: int = 0
    notes: tuple[ChangeNote, ...] = ()

    @property
    def checkpoint_overrides(self) -> str | None:
        """The stored text of the overrides of FLIP-571; None for a job that never had any."""
        return self.configuration.get(JOB_CHECKPOINT_OVERRIDES)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        document: dict[str, Any] = to_builtins(self)
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> StoredJob:
        """Raises :class:`DocumentError` or :class:`InvalidLocationError` for a document of another shape."""
        stored = checked(document, cls)
        check_job_id(stored.job_id)
        return stored


class JobStore:
    """All jobs of one high-availability directory. Thread-safe."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._directory = directory
        self._fence = fence
        self._epoch = epoch
        self._lock = threading.Lock()

    def put(self, job: StoredJob, archive: bytes | None = None) -> StoredJob:
        """Stores a new job and its archive; the returned job carries the archive's checksum.

        Raises :class:`AlreadyExistsError` for a known job id, :class:`AmbiguousWriteError` when it is unknown whether
        the job was stored, :class:`StorageError` when it was not.
        """
        self._fence()
        directory = self._job_directory(job.job_id)
        plan = VersionedDocument(directory.child(_PLAN_NAME))
        stored = replace(job, epoch=self._epoch)
        with self._lock:
            # Checked before the archive is written, which may be large.
            if plan.read() is not None:
                raise AlreadyExistsError(f"job {job.job_id} is already stored in {directory.url}", directory.url)
            if archive is not None:
                # Archive first: the plan makes the job exist, and must not refer to a missing archive.
                checksum = checksum_of(archive)
                file = self._archive_file(directory, checksum)
                make_directory(directory)
                # An existing one was left by an attempt that crashed before the plan; its name contains its checksum.
                with suppress(AlreadyExistsError):
                    publish(file, archive)
                stored = replace(stored, archive_checksum=checksum)
            try:
                plan.write(0, stored.to_json())
            except ConflictError as error:
                message = f"job {job.job_id} is already stored in {directory.url}"
                raise AlreadyExistsError(message, directory.url) from error
        return stored

    def get(self, job_id: str) -> StoredJob:
        """The job. Raises :class:`NotFoundError` for an unknown one, :class:`CorruptFileError` for a damaged file."""
        return self._read(job_id)[1]

    def read_archive(self, job: StoredJob) -> bytes | None:
        """The verified archive of a job; None when it has none."""
        if not job.archive_checksum:
            return None
        file = self._archive_file(self._job_directory(job.job_id), job.archive_checksum)
        archive = read_bytes(file, MAX_ARCHIVE_BYTES)
        if checksum_of(archive) != job.archive_checksum:
            raise CorruptFileError(f"{file.url} is damaged: its checksum is not {job.archive_checksum}", file.url)
        return archive

    def list_ids(self) -> list[str]:
        """Ids of all stored jobs, sorted, including those with a damaged plan."""
        names = [name for name in list_names(self._directory) if is_job_id(name)]
        return [name for name in names if VersionedDocument(self._directory.child(name, _PLAN_NAME)).exists()]

    def update(self, job_id: str, modify: Callable[[StoredJob], StoredJob], *, always: bool = False) -> StoredJob:
        """Fetches, modifies and writes a job; ``modify`` gets the present one and may raise to change nothing.

        With ``always`` it is written even if nothing has changed, which makes writes that are still in flight fail.
        Raises :class:`NotFoundError` for an unknown job, :class:`NotLeaderError` when a later leader has taken it
        over, :class:`ConflictError` when another process has changed the job in the meantime,
        :class:`AmbiguousWriteError` when it is unknown whether the change is stored (:meth:`get` tells),
        :class:`StorageError` when it is not.
        """
        with self._lock:
            revision, present = self._read(job_id)
            check_epoch(present.epoch, self._epoch, self._job_directory(job_id))
            changed = replace(modify(present), epoch=self._epoch)
            if changed == present and not always:
                return present
            if changed.job_id != job_id:
                raise ValueError(f"a change cannot turn job {job_id} into {changed.job_id}")
            self._fence()
            VersionedDocument(self._job_directory(job_id).child(_PLAN_NAME)).write(revision.number, changed.to_json())
        return changed

    def adopt(self, job_id: str) -> StoredJob:
        """The job, which earlier leaders can no longer change after this call. Raises as :meth:`update`."""
        return self.update(job_id, lambda job: job)

    def remove(self, job_id: str) -> None:
        """Deletes a job, its plan first; the job may be unknown or partly deleted."""
        self._fence()
        directory = self._job_directory(job_id)
        with self._lock:
            # Plan first: a half-deleted job must not look like a job.
            VersionedDocument(directory.child(_PLAN_NAME)).delete()
            delete_tree(directory)

    def _read(self, job_id: str) -> tuple[Revision, StoredJob]:
        directory = self._job_directory(job_id)
        revision = VersionedDocument(directory.child(_PLAN_NAME)).read()
        if revision is None:
            raise NotFoundError(f"job {job_id} is not stored in {self._directory.url}", directory.url)
        try:
            return revision, StoredJob.from_json(revision.document)
        except ValueError as error:  # of its shape, or of its id
            raise CorruptFileError(f"{directory.url} holds no usable job: {error}", directory.url) from error

    def _job_directory(self, job_id: str) -> Location:
        return self._directory.child(check_job_id(job_id))

    @staticmethod
    def _archive_file(directory: Location, checksum: str) -> Location:
        return directory.child(f"{_ARCHIVE_NAME}-{checksum.rpartition(':')[2]}")
