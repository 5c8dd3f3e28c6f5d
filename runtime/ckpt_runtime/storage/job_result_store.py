"""Results of ended jobs, which outlive the driver, so that an ended job is never run again.

A result is *dirty* until everything else of the job is cleaned up; a new driver finishes the clean-up of dirty ones.
A new driver adopts the results of all jobs that it finds before it reads them: a job that it runs must not get a result
from a former leader, which is still about to store one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ckpt_runtime.storage.checkpoint_storage import check_job_id, is_job_id
from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError, NotFoundError
from ckpt_runtime.storage.fenced_document import Fence, FencedDocument, no_fence
from ckpt_runtime.storage.filesystem import Location, list_names
from ckpt_runtime.storage.versioned_document import VersionedDocument


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
        """Deletes a result; a missing one is fine."""
        self._fence()
        VersionedDocument(self._document(job_id).directory).delete()

    def _result(self, job_id: str, stored: _StoredResult) -> dict[str, Any]:
        if stored.result is None:
            url = self._document(job_id).directory.url
            raise NotFoundError(f"job {job_id} has no result in {self._directory.url}", url)
        return stored.result

    def _document(self, job_id: str) -> FencedDocument[_StoredResult]:
        return FencedDocument(self._directory.child(check_job_id(job_id)), _StoredResult, self._fence, self._epoch)
