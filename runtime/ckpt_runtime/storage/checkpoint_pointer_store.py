"""Pointers to a job's completed checkpoints, and the counters of its checkpoint ids and attempts.

The pointer makes a checkpoint restorable by the next driver: it is added after ``_metadata`` is published and removed
before anything of the checkpoint is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, structs, to_builtins

from ckpt_runtime.graph.schema import DocumentError, NonNegative, checked
from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError
from ckpt_runtime.storage.fenced_document import Fence, FencedDocument, no_fence
from ckpt_runtime.storage.filesystem import Location

FIRST_CHECKPOINT_ID = 1

_Stored = dict[str, dict[str, Any]]
_Numbered = Mapping[int, dict[str, Any]]
_DISPOSAL = "disposal-"
"""Before the id of a checkpoint whose pointer is gone and whose files are being deleted."""
_SAVEPOINT = "savepoint-"
"""Before the id of a savepoint that is being taken, which nobody else would find after a crash."""


class CheckpointPointer(Struct, frozen=True):
    """Where a checkpoint lies, and whether its files are the job's to delete."""

    directory: str
    owned: bool


class _PendingSavepoint(Struct, frozen=True):
    directory: str


class CheckpointPointerStore:
    """The pointers of one job, in one document: a driver that lost its lease can add none (see ``fenced_document``)."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, _Stored, fence, epoch)

    def add(self, checkpoint_id: int, pointer: CheckpointPointer) -> None:
        """Adds a pointer. Adding the very same one again is fine, which is how an unknown outcome is settled.

        Raises :class:`AlreadyExistsError` when there is a different one, :class:`AmbiguousWriteError` when it is
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
        """All pointers by ascending id. Raises :class:`CorruptFileError` naming a damaged file: none is left out."""
        return self._pointers(self._document.read())

    def adopt(self) -> Mapping[int, CheckpointPointer]:
        """All pointers, of which an earlier leader can from now on neither add nor remove any."""
        return self._pointers(self._document.adopt())

    def remove(self, checkpoint_id: int, disposal: Mapping[str, Any] | None = None) -> None:
        """Removes a pointer and makes sure that it is gone; none there is fine.

        ``disposal`` is left in its place, in the same step, until :meth:`settle`.
        """
        gone = str(checkpoint_id)

        def removed(present: _Stored) -> _Stored:
            left = {key: value for key, value in present.items() if key != gone}
            return left if disposal is None else {**left, _DISPOSAL + gone: dict(disposal)}

        self._document.change(removed)

    def disposals(self) -> Mapping[int, Mapping[str, Any]]:
        """What :meth:`remove` left, by checkpoint id. Raises :class:`CorruptFileError`."""
        return self._numbered({key: value for key, value in self._document.read().items() if key.startswith(_DISPOSAL)})

    def settle(self, checkpoint_id: int) -> None:
        """The disposal is done; none there is fine."""
        done = f"{_DISPOSAL}{checkpoint_id}"
        self._document.change(lambda present: {key: value for key, value in present.items() if key != done})

    def expect_savepoint(self, checkpoint_id: int, directory: str) -> None:
        """A savepoint is about to be taken into this directory, which does not exist yet."""
        pending = to_builtins(_PendingSavepoint(directory))
        self._document.change(lambda present: {**present, f"{_SAVEPOINT}{checkpoint_id}": pending})

    def settle_savepoint(self, checkpoint_id: int) -> None:
        """The savepoint is complete, or its directory is gone; none there is fine."""
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
    """No checkpoint id and no attempt from these on was ever used; the last savepoint has ``savepoint_id``, or 0."""

    next_checkpoint_id: NonNegative = FIRST_CHECKPOINT_ID
    next_attempt: NonNegative = 0
    savepoint_id: NonNegative = 0


class JobCounters:
    """The next checkpoint id, the next attempt and the last savepoint of one job. They only rise.

    A number is used after it was stored.
    """

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, Counters, fence, epoch)

    def get(self) -> Counters:
        """What is stored. Raises :class:`CorruptFileError`."""
        return self._document.read()

    def adopt(self) -> Counters:
        """As :meth:`get`; an earlier leader can from now on use no further number."""
        return self._document.adopt()

    def reserve_checkpoint(self, checkpoint_id: int) -> None:
        """No later driver uses this id or a smaller one. Repeating an unknown outcome is fine."""
        self._raise_to(Counters(next_checkpoint_id=checkpoint_id + 1))

    def reserve_attempt(self, attempt: int) -> None:
        """No later driver uses this attempt or a smaller one. Repeating an unknown outcome is fine."""
        self._raise_to(Counters(next_attempt=attempt + 1))

    def keep_savepoint(self, checkpoint_id: int) -> None:
        """The last savepoint has at least this id. Repeating an unknown outcome is fine."""
        self._raise_to(Counters(savepoint_id=checkpoint_id))

    def _raise_to(self, least: Counters) -> None:
        def raised(present: Counters) -> Counters:
            return Counters(*map(max, structs.astuple(present), structs.astuple(least)))

        self._document.change(raised)
