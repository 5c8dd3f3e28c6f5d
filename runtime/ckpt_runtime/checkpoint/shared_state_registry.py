"""Who uses which shared state file, and which can go (Flink's SharedStateRegistry). Pure; deletes nothing itself.

A file with an absolute path is shared between checkpoints; one with a relative path belongs to its checkpoint alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint.state_handles import StateFile, SubtaskState

# Bounds memory. Tasks build upon recent checkpoints only, so that old paths do not come again.
GIVEN_UP_REMEMBERED = 100_000


class SharedStateConflictError(RuntimeError):
    """A state refers to a file that it may not use: another one of this path, a deleted one, or one of the user's."""


class FileGivenUpError(SharedStateConflictError):
    """No more is wrong than that files were given up meanwhile: a full checkpoint has taken the place of their last."""


@dataclass(slots=True)
class _Entry:
    file: StateFile
    last_used_by: int
    deletable: bool


def is_shared(file: StateFile) -> bool:
    """Whether the file may be used by several checkpoints."""
    return "://" in file.path or file.path.startswith("/")


class SharedStateRegistry:
    """Entries by physical path. Files of a snapshot that the job does not own are kept but never deleted."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._given_up: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, checkpoint_id: int, state: SubtaskState, deletable: bool = True) -> None:
        """Notes that ``checkpoint_id`` uses the state's shared files. Called at acknowledgement, before completion.

        Raises :class:`SharedStateConflictError` when a known path has another length or checksum, was given up, or
        belongs to a snapshot that stays the user's. A task that has not heard of the latest completed checkpoint yet
        may build upon an older one, whose files are gone when the latest was a full one: that alone is a
        :class:`FileGivenUpError`. The state's other files are registered all the same, so that they go when their
        checkpoint does.
        """
        conflicts: list[SharedStateConflictError] = []
        for file in (file for file in state.files() if is_shared(file)):
            entry = self._entries.get(file.path)
            conflict = self._conflict(file, entry, deletable)
            if conflict is not None:
                conflicts.append(conflict)
                continue
            if entry is None:
                entry = self._entries[file.path] = _Entry(file, checkpoint_id, deletable)
            # Acknowledgements of concurrent checkpoints come in any order.
            entry.last_used_by = max(entry.last_used_by, checkpoint_id)
        if conflicts:
            given_up = all(isinstance(conflict, FileGivenUpError) for conflict in conflicts)
            kind = FileGivenUpError if given_up else SharedStateConflictError
            raise kind("; ".join(map(str, conflicts)))

    def _conflict(self, file: StateFile, entry: _Entry | None, deletable: bool) -> SharedStateConflictError | None:
        if entry is None and file.path in self._given_up:
            return FileGivenUpError(f"shared file {file.path} was given up: nothing retained uses it")
        if entry is None:
            return None
        if entry.file != file:
            return SharedStateConflictError(f"shared file {file.path}: registered {entry.file}, now {file}")
        if deletable and not entry.deletable:
            return SharedStateConflictError(f"shared file {file.path} belongs to a snapshot that stays the user's")
        return None

    def register_all(self, checkpoint_id: int, states: Iterable[SubtaskState], deletable: bool = True) -> None:
        """The files of a whole (restored) checkpoint."""
        for state in states:
            self.register(checkpoint_id, state, deletable)

    def unregister_unused(self, lowest_retained: int) -> tuple[str, ...]:
        """Drops what no checkpoint from ``lowest_retained`` on uses; returns the paths to delete, sorted."""
        unused = [path for path, entry in self._entries.items() if entry.last_used_by < lowest_retained]
        # Remembered before they go: an acknowledgement that names one may be on its way already.
        self._given_up.update(dict.fromkeys(unused))
        while len(self._given_up) > GIVEN_UP_REMEMBERED:
            self._given_up.popitem(last=False)
        return tuple(sorted(path for path in unused if self._entries.pop(path).deletable))

    def unregister_all(self, kept: Collection[str] = ()) -> tuple[str, ...]:
        """The end of a job, of which files at the paths ``kept`` remain: returns the paths to delete, sorted."""
        paths = tuple(sorted(path for path, entry in self._entries.items() if entry.deletable and path not in kept))
        self._entries.clear()
        return paths

    def knows(self, path: str) -> bool:
        """Whether the file is in use, or was until it was given up."""
        return path in self._entries or path in self._given_up
