"""A versioned document that only the present leader can change, whatever a former one still believes.

Its content has a schema. The leader's epoch is part of the document, and every change is a compare-and-set: a new
leader that has adopted the document has closed it for all earlier epochs, in one step with its own change. The fence
before it is only a quick no.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from msgspec import to_builtins

from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.storage.errors import AmbiguousWriteError, ConflictError, CorruptFileError, StorageError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.leader_store import NotLeaderError
from ckpt_runtime.storage.versioned_document import VersionedDocument

T = TypeVar("T")
Fence = Callable[[], None]
"""Called before anything is changed; raises when this process may not change anything (any more)."""

_ATTEMPTS = 100
_UNKNOWN_OUTCOMES = 5


def no_fence() -> None:
    """The fence of a process that is alone."""


class FencedDocument(Generic[T]):
    """One document. ``epoch`` is this leader's; a document that was never changed by a leader has epoch 0."""

    def __init__(self, directory: Location, schema: type[T], fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist; an empty document has to fit ``schema``. Touches nothing."""
        self._document = VersionedDocument(directory)
        self._schema = schema
        self._fence = fence
        self._epoch = epoch

    @property
    def directory(self) -> Location:
        return self._document.directory

    def read(self) -> T:
        """The present content, or that of an empty document. Raises :class:`CorruptFileError` naming the file."""
        revision = self._document.read()
        return self._content({} if revision is None else revision.document)

    def change(self, modify: Callable[[T], T]) -> T:
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
                # Read anew in each round: a later leader may have adopted the document since the last one.
                check_epoch(present.get("epoch", 0), self._epoch, self.directory)
            except StorageError as error:
                if unknown:
                    raise AmbiguousWriteError(str(error), self.directory.url, error) from error
                raise
            content = self._content(present)
            changed = modify(content)
            # Of an older epoch it is written all the same: that is what closes it for earlier leaders.
            if changed == content and present.get("epoch") == self._epoch:
                return changed
            try:
                document = {**to_builtins(changed), "epoch": self._epoch}
                self._document.write(0 if revision is None else revision.number, document)
            # Somebody was faster, or it was this very change, whose answer was lost: reading tells.
            except ConflictError:
                continue
            except AmbiguousWriteError:
                # Written again on top of what is read: of a change that has arrived `modify` makes nothing new.
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

    def adopt(self) -> T:
        """Closes the document for all earlier epochs; what is returned can no longer be changed by them."""
        return self.change(lambda present: present)

    def _content(self, document: dict[str, Any]) -> T:
        try:
            return checked({key: value for key, value in document.items() if key != "epoch"}, self._schema)
        except DocumentError as error:
            raise CorruptFileError(f"{self.directory.url} is not usable: {error}", self.directory.url) from error


def check_epoch(stored: int, own: int, directory: Location) -> None:
    """Raises :class:`NotLeaderError` for a document that a later leader has taken over."""
    if stored > own:
        message = f"{directory.url} belongs to the leader of epoch {stored}; this driver's epoch is {own}"
        raise NotLeaderError(message, directory.url)
