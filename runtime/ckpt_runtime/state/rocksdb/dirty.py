"""The interface of cached states to snapshots: the entries that the database does not hold yet.

States write to a cache. Taking a snapshot freezes its changed entries, which another thread writes to the database
later, in the order of the snapshots. Until then a state must find these entries itself, and must not evict them: the
database would return their old values.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class FrozenDirty(Protocol):
    """The changed entries of a state as of one moment; they no longer change."""

    def puts(self) -> Iterable[tuple[bytes, bytes]]:
        """Encoded keys and values, from any thread; called again when writing them has failed."""

    def deletes(self) -> Iterable[bytes]:
        """Keys to delete, none of them in :meth:`puts`. Called under the same conditions."""

    def release(self) -> None:
        """Releases the entries: the database has them, or they are no longer needed. Called once, from any thread."""


class CachedState(Protocol):
    """A state whose changes are first kept in memory."""

    def freeze(self) -> FrozenDirty | None:
        """Takes the changes since the last call, in time that depends only on them; None when there are none.

        Called by the subtask's thread.
        """
