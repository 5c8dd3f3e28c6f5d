"""What a state in front of the database owes to a snapshot: the entries that the database does not hold yet.

States write to a cache. Taking a snapshot freezes what has changed in it, which is written to the database later by
another thread, in the order of the snapshots. Until then a state must find these entries itself, and must not evict
them: the database would answer with what they were before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class FrozenDirty(Protocol):
    """The changed entries of a state as of one moment; they do not change any more."""

    def puts(self) -> Iterable[tuple[bytes, bytes]]:
        """Keys and values as the database has them, from any thread; once more when writing them has failed."""

    def deletes(self) -> Iterable[bytes]:
        """Keys that are no more, none of them in :meth:`puts`. Called as that one is."""

    def release(self) -> None:
        """The database has these entries, or will never be asked for them again. Called once, from any thread."""


class CachedState(Protocol):
    """A state whose changes lie in memory first."""

    def freeze(self) -> FrozenDirty | None:
        """Takes what has changed since the last call, in a time that depends on that alone; None for nothing.

        Called by the subtask's thread.
        """
