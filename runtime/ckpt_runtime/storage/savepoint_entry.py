"""The catalogue's entry of one savepoint: a document in its directory, so that it moves with the savepoint.

It adds to the metadata: the name of the job, the program that ran, the user that took the savepoint, and the result of
each verification and restore drill. Any number of sessions and tools may add to it at the same time
(compare-and-set). A savepoint is restored without it. Blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from msgspec import to_builtins

from ckpt_runtime.graph.schema import DocumentError, NonNegative, checked
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.filesystem import Location, check_directory
from ckpt_runtime.storage.versioned_document import VersionedDocument

CATALOGUE_NAME = "catalogue"
MAX_MARKS = 20
MAX_NOTE_CHARS = 1_000


class MarkKind(StrEnum):
    """How a savepoint was checked."""

    VERIFICATION = "VERIFICATION"
    DRILL = "DRILL"


@dataclass(frozen=True, slots=True)
class Mark:
    """The result of one verification or drill; ``detail`` describes the finding in words."""

    at_ms: int
    passed: bool
    by: str | None = None
    detail: str = ""
    duration_ms: NonNegative | None = None


@dataclass(frozen=True, slots=True)
class SavepointEntry:
    """Facts about a savepoint at the time it was taken, and the latest marks, newest last. None: unknown, for
    savepoints without an entry.

    ``program`` names the pipeline's code by its digest, ``configuration_version`` the job's configuration.
    ``repositioned`` maps the uids of sources to the positions that a user has set.
    ``disposing`` are the relative paths of its files once it is being deleted, so that they can be found when the
    metadata is gone.
    """

    job_id: str
    savepoint_id: NonNegative
    triggered_at_ms: int
    completed_at_ms: int
    format: str
    state_backend: str
    bytes: NonNegative
    files: NonNegative
    written_by: str | None = None
    job_name: str | None = None
    program: str | None = None
    configuration_version: int | None = None
    cluster: str | None = None
    taken_by: str | None = None
    verifications: tuple[Mark, ...] = ()
    drills: tuple[Mark, ...] = ()
    disposing: tuple[str, ...] | None = None
    lineage: str | None = None
    repositioned: dict[str, str] = field(default_factory=dict)

    @property
    def lineage_id(self) -> str:
        """The lineage of its job; entries of earlier releases do not store it, so the job id stands in."""
        return self.lineage or self.job_id

    @property
    def duration_ms(self) -> int:
        """Time from the trigger to the publication of the metadata."""
        return max(0, self.completed_at_ms - self.triggered_at_ms)

    def marked(self, kind: MarkKind, mark: Mark) -> SavepointEntry:
        """The entry with one more mark; the oldest marks are dropped."""
        if kind is MarkKind.DRILL:
            return replace(self, drills=_with(self.drills, mark))
        return replace(self, verifications=_with(self.verifications, mark))


def _with(marks: tuple[Mark, ...], mark: Mark) -> tuple[Mark, ...]:
    bounded = replace(mark, detail=mark.detail[:MAX_NOTE_CHARS])
    return (*marks, bounded)[-MAX_MARKS:]


def entry_document(savepoint: Location) -> VersionedDocument:
    """The document that holds the entry of a savepoint."""
    return VersionedDocument(savepoint.child(CATALOGUE_NAME))


def read_entry(savepoint: Location) -> SavepointEntry | None:
    """The entry; None for a savepoint without one. Raises :class:`CorruptFileError` for an invalid one."""
    revision = entry_document(savepoint).read()
    return None if revision is None else _checked(revision.document, savepoint)


def change_entry(
    savepoint: Location, change: Callable[[SavepointEntry], SavepointEntry], initial: Callable[[], SavepointEntry]
) -> SavepointEntry:
    """Reads, changes and writes; repeats if another process was faster. ``initial`` is used if there is no entry.

    ``change`` may be called on its own result and must then return it unchanged. Raises :class:`NotFoundError` when
    the savepoint's directory is missing, :class:`AmbiguousWriteError` when it is unknown whether the change is
    stored, :class:`StorageError` when it is not.
    """
    changed: SavepointEntry

    def make(document: dict[str, Any] | None) -> dict[str, Any] | None:
        nonlocal changed
        present = initial() if document is None else _checked(document, savepoint)
        changed = change(present)
        if document is not None and changed == present:
            return None
        # Writing would recreate the directory: an entry must not bring back a savepoint that was just deleted.
        check_directory(savepoint)
        written: dict[str, Any] = to_builtins(changed)
        return written

    entry_document(savepoint).change(make)
    return changed


def delete_entry(savepoint: Location) -> None:
    """Deletes the entry, the last file of a savepoint; a missing entry is not an error."""
    entry_document(savepoint).delete()


def _checked(document: object, savepoint: Location) -> SavepointEntry:
    try:
        return checked(document, SavepointEntry)
    except DocumentError as error:
        url = savepoint.child(CATALOGUE_NAME).url
        raise CorruptFileError(f"{url} is not an entry of the savepoint catalogue: {error}", url) from error
