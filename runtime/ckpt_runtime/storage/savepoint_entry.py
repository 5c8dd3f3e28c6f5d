"""The catalogue's entry of one savepoint: a document in its directory, so that it goes wherever the savepoint goes.

It says what the metadata does not: whose job it was by name, which program ran, who took it, and what came of each
verification and restore drill. Any number of sessions and tools may add to it at the same time (compare-and-set). A
savepoint is restored without it. Blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
    """What was done with a savepoint to find out whether it is good."""

    VERIFICATION = "VERIFICATION"
    DRILL = "DRILL"


@dataclass(frozen=True, slots=True)
class Mark:
    """The result of one verification or drill; ``detail`` says in words what was found."""

    at_ms: int
    passed: bool
    by: str | None = None
    detail: str = ""
    duration_ms: NonNegative | None = None


@dataclass(frozen=True, slots=True)
class SavepointEntry:
    """Facts of when it was taken, and the latest marks, newest last. None: not known, of a savepoint without an entry.

    ``program`` names the pipeline's code by its digest, ``configuration_version`` the job's configuration.
    ``disposing`` are its files, by relative paths, once it is being deleted: they can be found when the metadata is
    gone.
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

    @property
    def lineage_id(self) -> str:
        """That of its job; entries of earlier releases do not have it."""
        return self.lineage or self.job_id

    @property
    def duration_ms(self) -> int:
        """From the trigger to the metadata."""
        return max(0, self.completed_at_ms - self.triggered_at_ms)

    def marked(self, kind: MarkKind, mark: Mark) -> SavepointEntry:
        """With one more mark; the oldest go."""
        if kind is MarkKind.DRILL:
            return replace(self, drills=_with(self.drills, mark))
        return replace(self, verifications=_with(self.verifications, mark))


def _with(marks: tuple[Mark, ...], mark: Mark) -> tuple[Mark, ...]:
    bounded = replace(mark, detail=mark.detail[:MAX_NOTE_CHARS])
    return (*marks, bounded)[-MAX_MARKS:]


def entry_document(savepoint: Location) -> VersionedDocument:
    """Where the entry of a savepoint lies."""
    return VersionedDocument(savepoint.child(CATALOGUE_NAME))


def read_entry(savepoint: Location) -> SavepointEntry | None:
    """None for a savepoint without one. Raises :class:`CorruptFileError` for what is none."""
    revision = entry_document(savepoint).read()
    return None if revision is None else _checked(revision.document, savepoint)


def change_entry(
    savepoint: Location, change: Callable[[SavepointEntry], SavepointEntry], initial: Callable[[], SavepointEntry]
) -> SavepointEntry:
    """Reads, changes and writes, again when somebody else was faster. ``initial`` gives what there is without an entry.

    ``change`` may be called on its own result, which it has to leave as it is then. Raises :class:`NotFoundError` when
    the savepoint's directory is not there, :class:`AmbiguousWriteError` when it is unknown whether the change is
    stored, :class:`StorageError` when it is not.
    """
    changed: SavepointEntry

    def make(document: dict[str, Any] | None) -> dict[str, Any] | None:
        nonlocal changed
        present = initial() if document is None else _checked(document, savepoint)
        changed = change(present)
        if document is not None and changed == present:
            return None
        # Writing would make it anew: an entry must not bring back a savepoint that has just gone.
        check_directory(savepoint)
        written: dict[str, Any] = to_builtins(changed)
        return written

    entry_document(savepoint).change(make)
    return changed


def delete_entry(savepoint: Location) -> None:
    """The last of a savepoint to go; none there is fine."""
    entry_document(savepoint).delete()


def _checked(document: object, savepoint: Location) -> SavepointEntry:
    try:
        return checked(document, SavepointEntry)
    except DocumentError as error:
        url = savepoint.child(CATALOGUE_NAME).url
        raise CorruptFileError(f"{url} is no entry of the savepoint catalogue: {error}", url) from error
