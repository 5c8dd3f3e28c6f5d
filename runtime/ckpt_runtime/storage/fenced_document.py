"""A versioned document that only the present leader can change, whatever a former one still believes.

The leader's epoch is part of the document, and every change is a compare-and-set: a new leader that has adopted the
document has closed it for all earlier epochs, in one step with its own change. The fence before it is only a quick no.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckpt_runtime.storage.errors import AmbiguousWriteError, ConflictError, StorageError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.leader_store import NotLeaderError
from ckpt_runtime.storage.versioned_document import VersionedDocument

Fence = Callable[[], None]
"""Called before anything is changed; raises when this process may not change anything (any more)."""

_ATTEMPTS = 100
_UNKNOWN_OUTCOMES = 5


def no_fence() -> None:
    """The fence of a process that is alone."""


class FencedDocument:
    """One document. ``epoch`` is this leader's; a document that was never changed by a leader has epoch 0."""

    def __init__(self, directory: Location, fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist. Touches nothing."""
        self._document = VersionedDocument(directory)
        self._fence = fence
        self._epoch = epoch

    @property
    def directory(self) -> Location:
        return self._document.directory

    def read(self) -> dict[str, Any]:
        """The present content without its epoch; empty when there is none."""
        revision = self._document.read()
        return {} if revision is None else _content(revision.document)

    def change(self, modify: Callable[[dict[str, Any]], dict[str, Any]]) -> dict[str, Any]:
        """Fetches, modifies, writes; again when somebody else was faster, or when the outcome is unknown.

        ``modify`` may be called on its own result, which it has to leave as it is, and may raise to change nothing.
        Raises :class:`NotLeaderError`, :class:`AmbiguousWriteError` when it is unknown whether the change is stored,
        :class:`StorageError` when it is not.
        """
        unknown = 0
        for _ in range(_ATTEMPTS):
            try:
                self._fence()
                revision = self._document.read()
                present: dict[str, Any] = {} if revision is None else revision.document
                check_epoch(present.get("epoch", 0), self._epoch, self.directory)
            except StorageError as error:
                if unknown:
                    raise AmbiguousWriteError(str(error), self.directory.url, error) from error
                raise
            changed = modify(_content(present))
            document = {**changed, "epoch": self._epoch}
            if document == present:
                return changed
            try:
                self._document.write(0 if revision is None else revision.number, document)
            except ConflictError:
                continue
            except AmbiguousWriteError:
                unknown += 1
                if unknown == _UNKNOWN_OUTCOMES:
                    raise
                continue
            except StorageError as error:
                if unknown:  # the first write may still be on its way
                    raise AmbiguousWriteError(str(error), self.directory.url, error) from error
                raise
            return changed
        message = f"cannot change {self.directory.url}: it changes all the time"
        raise (AmbiguousWriteError if unknown else StorageError)(message, self.directory.url)

    def adopt(self) -> dict[str, Any]:
        """Closes the document for all earlier epochs; what is returned can no longer be changed by them."""
        return self.change(lambda present: present)


def check_epoch(stored: int, own: int, directory: Location) -> None:
    """Raises :class:`NotLeaderError` for a document that a later leader has taken over."""
    if stored > own:
        message = f"{directory.url} belongs to the leader of epoch {stored}; this driver's epoch is {own}"
        raise NotLeaderError(message, directory.url)


def _content(document: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in document.items() if key != "epoch"}
