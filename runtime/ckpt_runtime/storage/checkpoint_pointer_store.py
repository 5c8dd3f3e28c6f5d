"""Pointers to a job's completed checkpoints, and the counter that gives checkpoints their ids.

The pointer makes a checkpoint restorable by the next driver: it is added after ``_metadata`` is published and removed
before anything of the checkpoint is deleted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt_runtime.storage.documents import MAX_DOCUMENT_BYTES, decode_document, encode_document
from ckpt_runtime.storage.errors import AlreadyExistsError, AmbiguousWriteError, ConflictError, StorageError
from ckpt_runtime.storage.filesystem import Location, delete_file, list_names, make_directory, read_bytes
from ckpt_runtime.storage.job_store import Fence, no_fence
from ckpt_runtime.storage.publish import publish
from ckpt_runtime.storage.versioned_document import VersionedDocument

_NAME = re.compile(r"([0-9]{20})\.json")
_ATTEMPTS = 100
FIRST_CHECKPOINT_ID = 1


@dataclass(frozen=True, slots=True)
class CheckpointPointer:
    """``document`` says where the checkpoint lies, as whoever added it wrote it."""

    checkpoint_id: int
    document: dict[str, Any]


class CheckpointPointerStore:
    """The pointers of one job, each a file that is created once and never changed."""

    def __init__(self, directory: Location, fence: Fence = no_fence) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._directory = directory
        self._fence = fence

    def add(self, checkpoint_id: int, document: Mapping[str, Any]) -> None:
        """Adds a pointer. Adding the very same one again is fine, which is how an unknown outcome is settled.

        Raises :class:`AlreadyExistsError` when there is a different one, :class:`AmbiguousWriteError` when it is
        unknown whether it was added, :class:`StorageError` when it was not.
        """
        self._fence()
        file = self._file(checkpoint_id)
        data = encode_document(document)
        make_directory(self._directory)
        try:
            publish(file, data)
        except AlreadyExistsError:
            if read_bytes(file, 2 * MAX_DOCUMENT_BYTES) != data:
                raise

    def get(self, checkpoint_id: int) -> CheckpointPointer:
        """Raises :class:`NotFoundError`, or :class:`CorruptFileError` naming the file."""
        file = self._file(checkpoint_id)
        return CheckpointPointer(checkpoint_id, decode_document(read_bytes(file, 2 * MAX_DOCUMENT_BYTES), file.url))

    def list(self) -> list[CheckpointPointer]:
        """All pointers by ascending id. Raises :class:`CorruptFileError` naming a damaged one: none is left out."""
        matches = (_NAME.fullmatch(name) for name in list_names(self._directory))
        return [self.get(int(match[1])) for match in matches if match]

    def remove(self, checkpoint_id: int) -> None:
        """Removes a pointer and makes sure that it is gone; none there is fine."""
        self._fence()
        delete_file(self._file(checkpoint_id))

    def _file(self, checkpoint_id: int) -> Location:
        if checkpoint_id < 0:
            raise ValueError(f"checkpoint id {checkpoint_id} is negative")
        return self._directory.child(f"{checkpoint_id:020d}.json")


class CheckpointIdCounter:
    """The next checkpoint id of one job. Ids rise and are never given twice, whatever crashes and whoever leads."""

    def __init__(self, directory: Location, fence: Fence = no_fence) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = VersionedDocument(directory)
        self._fence = fence

    def get(self) -> int:
        """The id that the next :meth:`get_and_increment` returns, if nobody else comes first."""
        revision = self._document.read()
        return FIRST_CHECKPOINT_ID if revision is None else int(revision.document["next"])

    def get_and_increment(self) -> int:
        """Takes an id. It is this caller's alone; an id whose taking ended in an error is skipped for good."""
        return self._advance(lambda present: present + 1)

    def set_at_least(self, checkpoint_id: int) -> None:
        """Makes sure that no id below ``checkpoint_id`` is given from now on (after a restore)."""
        if self.get() < checkpoint_id:
            self._advance(lambda present: max(present, checkpoint_id))

    def _advance(self, step: Any) -> int:
        """The value before a step that nobody else has taken."""
        for _ in range(_ATTEMPTS):
            self._fence()
            revision = self._document.read()
            present = FIRST_CHECKPOINT_ID if revision is None else int(revision.document["next"])
            try:
                self._document.write(0 if revision is None else revision.number, {"next": step(present)})
            except (ConflictError, AmbiguousWriteError):
                continue
            return present
        url = self._document.directory.url
        raise StorageError(f"cannot advance the checkpoint id counter {url}: it changes all the time", url)
