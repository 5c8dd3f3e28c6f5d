"""A versioned document that only the current leader can change, even if a former one still tries.

Its content has a schema. The leader's epoch is part of the document, and every change is a compare-and-set: a new
leader that has adopted the document has closed it for all earlier epochs, in one step with its own change. The fence
only refuses earlier.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from msgspec import to_builtins

from ckpt_runtime.graph.schema import DocumentError, NonNegative, checked
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.leader_store import NotLeaderError
from ckpt_runtime.storage.versioned_document import VersionedDocument

S = TypeVar("S")
T = TypeVar("T")
Fence = Callable[[], None]
"""Called before each change; raises when this process may not, or may no longer, change anything."""


def no_fence() -> None:
    """The fence of a process without competitors."""


class FencedDocument(Generic[T]):
    """One document. ``epoch`` is this leader's; a document that no leader has changed has epoch 0."""

    def __init__(self, directory: Location, schema: type[T], fence: Fence = no_fence, epoch: int = 0) -> None:
        """``directory`` need not exist; an empty document must match ``schema``. Touches nothing."""
        self._document = VersionedDocument(directory)
        self._schema = schema
        self._fence = fence
        self._epoch = epoch

    @property
    def directory(self) -> Location:
        return self._document.directory

    def read(self) -> T:
        """The current content, or that of an empty document. Raises :class:`CorruptFileError` naming the file."""
        revision = self._document.read()
        return self._content({} if revision is None else revision.document)

    def change(self, modify: Callable[[T], T]) -> T:
        """Fetches, modifies, writes; repeats if another process was faster or the outcome is unknown.

        ``modify`` may be called on its own result, which it must return unchanged, and may raise to change nothing.
        Raises :class:`NotLeaderError`, :class:`AmbiguousWriteError` when it is unknown whether the change is stored,
        :class:`StorageError` when it is not.
        """
        changed: T

        def check(present: dict[str, Any] | None) -> None:
            self._fence()
            # Checked in each round: a later leader may have adopted the document since the last one.
            check_epoch(self._checked((present or {}).get("epoch", 0), NonNegative), self._epoch, self.directory)

        def make(present: dict[str, Any] | None) -> dict[str, Any] | None:
            nonlocal changed
            content = self._content(present or {})
            changed = modify(content)
            # A document of an older epoch is written even if unchanged: that closes it for earlier leaders.
            if changed == content and (present or {}).get("epoch") == self._epoch:
                return None
            return {**to_builtins(changed), "epoch": self._epoch}

        self._document.change(make, check)
        return changed

    def adopt(self) -> T:
        """Closes the document for all earlier epochs, which can no longer change the returned content."""
        return self.change(lambda present: present)

    def _content(self, document: dict[str, Any]) -> T:
        return self._checked({key: value for key, value in document.items() if key != "epoch"}, self._schema)

    def _checked(self, value: object, schema: type[S]) -> S:
        try:
            return checked(value, schema)
        except DocumentError as error:
            raise CorruptFileError(f"{self.directory.url} is not usable: {error}", self.directory.url) from error


def check_epoch(stored: int, own: int, directory: Location) -> None:
    """Raises :class:`NotLeaderError` for a document that a later leader has taken over."""
    if stored > own:
        message = f"{directory.url} belongs to the leader of epoch {stored}; this driver's epoch is {own}"
        raise NotLeaderError(message, directory.url)
