"""Results of ended jobs: what outlives the driver, so that an ended job is never run again.

A result is *dirty* until everything else of the job is cleaned up; a new driver finishes the clean-up of dirty ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt_runtime.storage.checkpoint_storage import check_job_id
from ckpt_runtime.storage.errors import AlreadyExistsError, ConflictError, NotFoundError
from ckpt_runtime.storage.filesystem import Location, list_names
from ckpt_runtime.storage.job_store import Fence, no_fence
from ckpt_runtime.storage.versioned_document import Revision, VersionedDocument


class JobResultStore:
    """The results of one high-availability directory."""

    def __init__(self, directory: Location, fence: Fence = no_fence) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._directory = directory
        self._fence = fence

    def create_dirty(self, job_id: str, result: Mapping[str, Any]) -> None:
        """Stores the result of a job that has just ended.

        Raises :class:`AlreadyExistsError` when it has one, :class:`AmbiguousWriteError` when it is unknown whether
        the result is stored.
        """
        self._fence()
        document = self._document(job_id)
        try:
            document.write(0, {"dirty": True, "result": dict(result)})
        except ConflictError as error:
            url = document.directory.url
            raise AlreadyExistsError(f"job {job_id} already has a result in {url}", url) from error

    def mark_clean(self, job_id: str) -> None:
        """Notes that nothing else of the job is left. Raises :class:`NotFoundError` for a job without a result."""
        revision = self._read(job_id)
        if revision.document["dirty"]:
            self._fence()
            self._document(job_id).write(revision.number, {**revision.document, "dirty": False})

    def get(self, job_id: str) -> dict[str, Any]:
        """Raises :class:`NotFoundError` for a job that has not ended."""
        result: dict[str, Any] = self._read(job_id).document["result"]
        return result

    def has(self, job_id: str) -> bool:
        """Whether the job has ended."""
        return self._document(job_id).read() is not None

    def list_ids(self, *, dirty_only: bool = False) -> list[str]:
        """Ids of all jobs that have ended, sorted; or of those whose clean-up is not finished."""
        ids = [name for name in list_names(self._directory) if len(name) == 32 and self.has(name)]
        return [job_id for job_id in ids if not dirty_only or self._read(job_id).document["dirty"]]

    def remove(self, job_id: str) -> None:
        """Forgets a result; none there is fine."""
        self._fence()
        self._document(job_id).delete()

    def _read(self, job_id: str) -> Revision:
        document = self._document(job_id)
        revision = document.read()
        if revision is None:
            raise NotFoundError(f"job {job_id} has no result in {self._directory.url}", document.directory.url)
        return revision

    def _document(self, job_id: str) -> VersionedDocument:
        return VersionedDocument(self._directory.child(check_job_id(job_id)))
