"""Who uses which shared state file, and which can go (Flink's SharedStateRegistry). Pure; deletes nothing itself.

A file with an absolute path is shared between checkpoints; one with a relative path belongs to its checkpoint alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint.state_handles import StateFile, SubtaskState


class SharedStateConflictError(RuntimeError):
    """Two different files were registered under one path; names the path and both."""


@dataclass(slots=True)
class _Entry:
    file: StateFile
    created_by: int
    last_used_by: int
    deletable: bool


def is_shared(file: StateFile) -> bool:
    """Whether the file may be used by several checkpoints."""
    return "://" in file.path or file.path.startswith("/")


class SharedStateRegistry:
    """Entries by physical path. Files of a snapshot that the job does not own are kept but never deleted."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, checkpoint_id: int, state: SubtaskState, deletable: bool = True) -> None:
        """Notes that ``checkpoint_id`` uses the state's shared files. Called at acknowledgement, before completion.

        Raises :class:`SharedStateConflictError` when a known path has another length or checksum.
        """
        shared = [file for file in state.files() if is_shared(file)]
        for file in shared:
            entry = self._entries.get(file.path)
            if entry is not None and entry.file != file:
                raise SharedStateConflictError(f"shared file {file.path}: registered {entry.file}, now {file}")
        for file in shared:
            entry = self._entries.setdefault(file.path, _Entry(file, checkpoint_id, checkpoint_id, deletable))
            entry.last_used_by = max(entry.last_used_by, checkpoint_id)

    def register_all(self, checkpoint_id: int, states: Iterable[SubtaskState], deletable: bool = True) -> None:
        """The files of a whole (restored) checkpoint."""
        for state in states:
            self.register(checkpoint_id, state, deletable)

    def unregister_unused(self, lowest_retained: int) -> tuple[str, ...]:
        """Drops what no checkpoint from ``lowest_retained`` on uses; returns the paths to delete, sorted."""
        unused = [path for path, entry in self._entries.items() if entry.last_used_by < lowest_retained]
        return tuple(sorted(path for path in unused if self._entries.pop(path).deletable))

    def creators_in_use(self) -> frozenset[int]:
        """Ids whose directories hold a file that is still used."""
        return frozenset(entry.created_by for entry in self._entries.values())
