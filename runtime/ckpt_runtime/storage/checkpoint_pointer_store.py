"""Pointers to a job's completed checkpoints, and the counters of its checkpoint ids and attempts.

The pointer makes a checkpoint restorable by the next driver: it is added after ``_metadata`` is published and removed
before anything of the checkpoint is deleted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ckpt_runtime.storage.errors import AlreadyExistsError, CorruptFileError
from ckpt_runtime.storage.fenced_document import Fence, FencedDocument, no_fence
from ckpt_runtime.storage.filesystem import Location

FIRST_CHECKPOINT_ID = 1

_DISPOSAL = "disposal-"
"""Before the id of a checkpoint whose pointer is gone and whose files are being deleted."""


@dataclass(frozen=True, slots=True)
class CheckpointPointer:
    """``document`` says where the checkpoint lies, as whoever added it wrote it."""

    checkpoint_id: int
    document: dict[str, Any]


class CheckpointPointerStore:
    """The pointers of one job, in one document: a driver that lost its lease can add none (see ``fenced_document``)."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, fence, epoch)

    def add(self, checkpoint_id: int, document: Mapping[str, Any]) -> None:
        """Adds a pointer. Adding the very same one again is fine, which is how an unknown outcome is settled.

        Raises :class:`AlreadyExistsError` when there is a different one, :class:`AmbiguousWriteError` when it is
        unknown whether it was added, :class:`StorageError` when it was not.
        """
        if checkpoint_id < 0:
            raise ValueError(f"checkpoint id {checkpoint_id} is negative")
        key, url = str(checkpoint_id), self._document.directory.url

        def added(present: dict[str, Any]) -> dict[str, Any]:
            if present.get(key, document) != document:
                raise AlreadyExistsError(f"{url} already has another pointer to checkpoint {checkpoint_id}", url)
            return {**present, key: dict(document)}

        self._document.change(added)

    def list(self) -> Sequence[CheckpointPointer]:
        """All pointers by ascending id. Raises :class:`CorruptFileError` naming a damaged file: none is left out."""
        return self._pointers(self._document.read())

    def adopt(self) -> Sequence[CheckpointPointer]:
        """All pointers, of which an earlier leader can from now on neither add nor remove any."""
        return self._pointers(self._document.adopt())

    def remove(self, checkpoint_id: int, disposal: Mapping[str, Any] | None = None) -> None:
        """Removes a pointer and makes sure that it is gone; none there is fine.

        ``disposal`` is left in its place, in the same step, until :meth:`settle`.
        """
        gone = str(checkpoint_id)

        def removed(present: dict[str, Any]) -> dict[str, Any]:
            left = {key: value for key, value in present.items() if key != gone}
            return left if disposal is None else {**left, _DISPOSAL + gone: dict(disposal)}

        self._document.change(removed)

    def disposals(self) -> Mapping[int, dict[str, Any]]:
        """What :meth:`remove` left, by checkpoint id. Raises :class:`CorruptFileError`."""
        document = self._document.read()
        try:
            return {
                int(key.removeprefix(_DISPOSAL)): dict(value)
                for key, value in document.items()
                if key.startswith(_DISPOSAL)
            }
        except (TypeError, ValueError) as error:
            url = self._document.directory.url
            raise CorruptFileError(f"{url} holds no usable disposals: {error!r}", url) from error

    def settle(self, checkpoint_id: int) -> None:
        """The disposal is done; none there is fine."""
        done = f"{_DISPOSAL}{checkpoint_id}"
        self._document.change(lambda present: {key: value for key, value in present.items() if key != done})

    def _pointers(self, document: dict[str, Any]) -> Sequence[CheckpointPointer]:
        pointers = {key: value for key, value in document.items() if not key.startswith(_DISPOSAL)}
        try:
            found = [CheckpointPointer(int(key), dict(value)) for key, value in pointers.items()]
        except (TypeError, ValueError) as error:
            url = self._document.directory.url
            raise CorruptFileError(f"{url} holds no usable pointers: {error!r}", url) from error
        return sorted(found, key=lambda pointer: pointer.checkpoint_id)


@dataclass(frozen=True, slots=True)
class Counters:
    """No checkpoint id and no attempt from these on was ever used; the last savepoint has ``savepoint_id``, or 0."""

    next_checkpoint_id: int = FIRST_CHECKPOINT_ID
    next_attempt: int = 0
    savepoint_id: int = 0


class JobCounters:
    """The next checkpoint id, the next attempt and the last savepoint of one job. They only rise.

    A number is used after it was stored.
    """

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = FencedDocument(directory, fence, epoch)

    def get(self) -> Counters:
        """What is stored. Raises :class:`CorruptFileError`."""
        return self._counters(self._document.read())

    def adopt(self) -> Counters:
        """As :meth:`get`; an earlier leader can from now on use no further number."""
        return self._counters(self._document.adopt())

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
        def raised(document: dict[str, Any]) -> dict[str, Any]:
            present = self._counters(document)
            names = [field.name for field in fields(Counters)]
            return {name: max(getattr(present, name), getattr(least, name)) for name in names}

        self._document.change(raised)

    def _counters(self, document: dict[str, Any]) -> Counters:
        try:
            return Counters(**{name: int(value) for name, value in document.items()})
        except (TypeError, ValueError) as error:
            url = self._document.directory.url
            raise CorruptFileError(f"{url} holds no usable counters: {error!r}", url) from error
