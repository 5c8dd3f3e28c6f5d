"""Orders the deletion of checkpoints: first the pointer, and the files only after it is certainly gone. Pure.

The only owner of deletions in the coordinator. Counts the checkpoints being cleaned, because these delay triggers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.effects import DiscardCheckpoint, DiscardLocation, Effect, RemoveFromStore

_Discard = DiscardCheckpoint | DiscardLocation


class UnaskedAnswerError(LookupError):
    """The storage answered a request that is not in progress. Nothing has changed."""


class CheckpointCleaner:
    """Deletes checkpoints; ``emit`` takes the effects."""

    def __init__(self, emit: Callable[[Effect], None]) -> None:
        self._emit = emit
        self._removing: dict[int, tuple[_Discard | None, int]] = {}
        self._directories: dict[int, str] = {}
        self._deleting: Counter[int] = Counter()

    @property
    def busy(self) -> int:
        """How many checkpoints are being cleaned."""
        return len(self._removing) + self._deleting.total()

    @property
    def pointers_are_gone(self) -> bool:
        """Whether all pointers to the checkpoints being cleaned are certainly gone."""
        return not self._removing

    @property
    def pointed_to(self) -> tuple[str, ...]:
        """Directories of checkpoints whose pointers may still exist: the next driver would read them."""
        return tuple(self._directories.values())

    @property
    def retiring(self) -> tuple[int, ...]:
        """Checkpoints whose pointers may still exist, so none of their shared files is deleted yet."""
        return tuple(self._directories)

    def is_cleaning(self, checkpoint_id: int) -> bool:
        return checkpoint_id in self._removing or checkpoint_id in self._deleting

    def retire(self, checkpoint: CompletedCheckpoint, discard: bool) -> None:
        """Removes the pointer of a checkpoint and then, with ``discard``, its files."""
        self._directories[checkpoint.id] = checkpoint.directory
        self._remove(checkpoint.id, DiscardCheckpoint(checkpoint) if discard else None)

    def sweep(self, checkpoint_id: int, directory: str) -> None:
        """Deletes a leftover of an earlier driver, and the pointer that it may have written late."""
        self._remove(checkpoint_id, DiscardLocation(checkpoint_id, directory))

    def _remove(self, checkpoint_id: int, then: _Discard | None) -> None:
        self._removing[checkpoint_id] = (then, 0)
        self._emit(_removal(checkpoint_id, then, 0))

    def discard_location(self, checkpoint_id: int, directory: str) -> None:
        """Deletes the directory of an aborted checkpoint, which never had a pointer."""
        self._deleting[checkpoint_id] += 1
        self._emit(DiscardLocation(checkpoint_id, directory))

    def removed(self, checkpoint_id: int) -> None:
        """The pointer is gone. Raises :class:`UnaskedAnswerError` if no removal was in progress."""
        discard, _ = self._removal_of(checkpoint_id)
        del self._removing[checkpoint_id]
        self._directories.pop(checkpoint_id, None)
        if discard is not None:
            self._deleting[checkpoint_id] += 1
            self._emit(discard)

    def remove_failed(self, checkpoint_id: int) -> None:
        """Tries the removal again. Raises :class:`UnaskedAnswerError` if none was in progress."""
        discard, attempt = self._removal_of(checkpoint_id)
        self._removing[checkpoint_id] = (discard, attempt + 1)
        self._emit(_removal(checkpoint_id, discard, attempt + 1))

    def _removal_of(self, checkpoint_id: int) -> tuple[_Discard | None, int]:
        if checkpoint_id not in self._removing:
            raise UnaskedAnswerError(checkpoint_id)
        return self._removing[checkpoint_id]

    def cleaned(self, checkpoint_id: int) -> None:
        """Files were deleted. Raises :class:`UnaskedAnswerError` when nothing was being deleted."""
        if checkpoint_id not in self._deleting:
            raise UnaskedAnswerError(checkpoint_id)
        self._deleting[checkpoint_id] -= 1
        self._deleting += Counter()  # drops zeros


def _removal(checkpoint_id: int, then: _Discard | None, attempt: int) -> RemoveFromStore:
    discards = then.checkpoint.directory if isinstance(then, DiscardCheckpoint) else None
    return RemoveFromStore(checkpoint_id, attempt, discards)
