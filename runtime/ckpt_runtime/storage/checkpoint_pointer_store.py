"""Pointers to a job's completed checkpoints, and the counters of its checkpoint ids and attempts.

The pointer makes a checkpoint restorable by the next driver: it is added after ``_metadata`` is published and removed
before any file of the checkpoint is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs, to_builtins

from ckpt_runtime.graph.schema import DocumentError, NonNegative, checked
from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.versioned_document import Fence, FencedDocument, no_fence

FIRST_CHECKPOINT_ID = 1

_Stored = dict[str, dict[str, Any]]
_Numbered = Mapping[int, dict[str, Any]]
_DISPOSAL = "disposal-"
"""Key prefix of a checkpoint whose pointer is gone and whose files are being deleted."""
_SAVEPOINT = "savepoint-"
"""Key prefix of a savepoint that is being taken, which could not be found otherwise after a crash."""


class CheckpointPointer(Struct, frozen=True):
    """The location of a checkpoint, and whether the job owns its files and may delete them."""

    directory: str
    owned: bool


class _PendingSavepoint(Struct, frozen=True):
    directory: str


class CheckpointPointerStore:
    """The pointers of one job, in one :class:`FencedDocument`: a driver without the lease cannot add any."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, _Stored, fence, epoch)

    def add(self, checkpoint_id: int, pointer: CheckpointPointer) -> None:
        """Adds a pointer. Adding it again is allowed and settles an unknown outcome.

        Raises :class:`AlreadyExistsError` when a different one exists, :class:`AmbiguousWriteError` when it is
        unknown whether it was added, :class:`StorageError` when it was not.
        """
        if checkpoint_id < 0:
            raise ValueError(f"checkpoint id {checkpoint_id} is negative")
        key, document, url = str(checkpoint_id), to_builtins(pointer), self._document.directory.url

        def added(present: _Stored) -> _Stored:
            if present.get(key, document) != document:
                raise AlreadyExistsError(f"{url} already has another pointer to checkpoint {checkpoint_id}", url)
            return {**present, key: document}

        self._document.change(added)

    def list(self) -> Mapping[int, CheckpointPointer]:
        """All pointers by ascending id, none skipped. Raises :class:`CorruptFileError` naming a damaged file."""
        return self._pointers(self._document.read())

    def adopt(self) -> Mapping[int, CheckpointPointer]:
        """All pointers; after this call earlier leaders can neither add nor remove any."""
        return self._pointers(self._document.adopt())

    def remove(self, checkpoint_id: int, disposal: Mapping[str, Any] | None = None) -> None:
        """Removes a pointer and verifies the removal; a missing pointer is not an error.

        ``disposal`` replaces it in the same step and stays until :meth:`settle`.
        """
        gone = str(checkpoint_id)

        def removed(present: _Stored) -> _Stored:
            left = {key: value for key, value in present.items() if key != gone}
            return left if disposal is None else {**left, _DISPOSAL + gone: dict(disposal)}

        self._document.change(removed)

    def disposals(self) -> Mapping[int, Mapping[str, Any]]:
        """The disposals that :meth:`remove` stored, by checkpoint id. Raises :class:`CorruptFileError`."""
        return self._numbered({key: value for key, value in self._document.read().items() if key.startswith(_DISPOSAL)})

    def settle(self, checkpoint_id: int) -> None:
        """Removes a completed disposal; a missing disposal is not an error."""
        done = f"{_DISPOSAL}{checkpoint_id}"
        self._document.change(lambda present: {key: value for key, value in present.items() if key != done})

    def expect_savepoint(self, checkpoint_id: int, directory: str) -> None:
        """Notes that a savepoint is about to be taken into this directory, which does not exist yet."""
        pending = to_builtins(_PendingSavepoint(directory))
        self._document.change(lambda present: {**present, f"{_SAVEPOINT}{checkpoint_id}": pending})

    def settle_savepoint(self, checkpoint_id: int) -> None:
        """Removes the note: the savepoint is complete, or its directory is removed. A missing note is not an error."""
        done = f"{_SAVEPOINT}{checkpoint_id}"
        self._document.change(lambda present: {key: value for key, value in present.items() if key != done})

    def pending_savepoints(self) -> Mapping[int, str]:
        """Directories of savepoints that are not settled, by checkpoint id. Raises :class:`CorruptFileError`."""
        pending = {key: value for key, value in self._document.read().items() if key.startswith(_SAVEPOINT)}
        try:
            found = {number: checked(value, _PendingSavepoint) for number, value in self._numbered(pending).items()}
        except DocumentError as error:
            raise self._corrupt(error) from error
        return {number: savepoint.directory for number, savepoint in found.items()}

    def _pointers(self, document: _Stored) -> Mapping[int, CheckpointPointer]:
        kept = {key: value for key, value in document.items() if not key.startswith((_DISPOSAL, _SAVEPOINT))}
        found = self._numbered(kept)
        try:
            return {number: checked(value, CheckpointPointer) for number, value in found.items()}
        except DocumentError as error:
            raise self._corrupt(error) from error

    def _numbered(self, document: _Stored) -> _Numbered:
        try:
            return dict(sorted((int(key.rpartition("-")[2]), value) for key, value in document.items()))
        except ValueError as error:
            raise self._corrupt(error) from error

    def _corrupt(self, error: ValueError) -> CorruptFileError:
        url = self._document.directory.url
        return CorruptFileError(f"{url} is not usable: {error}", url)


class Counters(Struct, frozen=True):
    """The first unused checkpoint id and attempt; ``savepoint_id`` is that of the last savepoint, or 0."""

    next_checkpoint_id: NonNegative = FIRST_CHECKPOINT_ID
    next_attempt: NonNegative = 0
    savepoint_id: NonNegative = 0


class JobCounters:
    """The next checkpoint id and attempt and the last savepoint of a job. They only rise, and are stored before use."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, Counters, fence, epoch)

    def get(self) -> Counters:
        """The stored counters. Raises :class:`CorruptFileError`."""
        return self._document.read()

    def adopt(self) -> Counters:
        """Like :meth:`get`; after this call earlier leaders can no longer reserve numbers."""
        return self._document.adopt()

    def reserve_checkpoint(self, checkpoint_id: int) -> None:
        """Ensures that no later driver uses this id or a smaller one. May be repeated after an unknown outcome."""
        self._raise_to(Counters(next_checkpoint_id=checkpoint_id + 1))

    def reserve_attempt(self, attempt: int) -> None:
        """Ensures that no later driver uses this attempt or a smaller one. May be repeated after an unknown outcome."""
        self._raise_to(Counters(next_attempt=attempt + 1))

    def keep_savepoint(self, checkpoint_id: int) -> None:
        """Stores that the last savepoint has at least this id. May be repeated after an unknown outcome."""
        self._raise_to(Counters(savepoint_id=checkpoint_id))

    def _raise_to(self, least: Counters) -> None:
        def raised(present: Counters) -> Counters:
            return Counters(*map(max, structs.astuple(present), structs.astuple(least)))

        self._document.change(raised)
