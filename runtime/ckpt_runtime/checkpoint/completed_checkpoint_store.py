"""The retained completed checkpoints, and which of them a new one subsumes. Pure; the pointers are in HA."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """``owned``: its files are deleted when it is subsumed. A savepoint restored with NO_CLAIM is not owned."""

    checkpoint: CompletedCheckpoint
    owned: bool = True


class CompletedCheckpointStore:
    """Holds checkpoints by ascending id, and of savepoints the restored one and the one of a stop."""

    def __init__(self, retained: int, recovered: Iterable[RetainedCheckpoint] = ()) -> None:
        self.retained = retained
        self._entries = sorted(recovered, key=lambda entry: entry.checkpoint.id)

    @property
    def latest(self) -> CompletedCheckpoint | None:
        return self._entries[-1].checkpoint if self._entries else None

    @property
    def latest_id(self) -> int:
        """The id of the latest checkpoint; -1 if there is none."""
        return self._entries[-1].checkpoint.id if self._entries else -1

    @property
    def latest_is_owned(self) -> bool:
        """False after a restore from a snapshot that the user owns, until a checkpoint of this job is stored."""
        return not self._entries or self._entries[-1].owned

    @property
    def entries(self) -> tuple[RetainedCheckpoint, ...]:
        return tuple(self._entries)

    def add(self, entry: RetainedCheckpoint) -> list[RetainedCheckpoint]:
        """Adds the newest checkpoint and returns the subsumed ones, oldest first; never the newest itself.

        Raises ValueError if the id is not greater than the latest.
        """
        if entry.checkpoint.id <= self.latest_id:
            raise ValueError(f"checkpoint {entry.checkpoint.id} is not newer than {self.latest_id}")
        self._entries.append(entry)
        subsumed = self._entries[: -self.retained]
        self._entries = self._entries[-self.retained :]
        return subsumed

    def lowest_retained(self) -> int | None:
        """The id of the first retained checkpoint whose files are the job's; a savepoint only if claimed."""
        kept = (entry for entry in self._entries if entry.owned or not entry.checkpoint.is_savepoint)
        return next((entry.checkpoint.id for entry in kept), None)

    def clear(self) -> list[RetainedCheckpoint]:
        """Empties the store at the end of the job and returns what was in it."""
        entries, self._entries = self._entries, []
        return entries
