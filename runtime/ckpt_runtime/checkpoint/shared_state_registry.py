"""Tracks which shared state files are used and which can be deleted (Flink's SharedStateRegistry). Pure.

It deletes nothing itself. A file with an absolute path is shared between checkpoints; one with a relative path belongs
to its checkpoint only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from ckpt_runtime.checkpoint.state_handles import StateFile, SubtaskState

# Limits memory. Tasks only build upon recent checkpoints, so old paths do not recur.
GIVEN_UP_REMEMBERED = 100_000


class SharedStateConflictError(RuntimeError):
    """A state refers to a file it may not use: a different file at this path, a deleted one, or the user's."""


class FileGivenUpError(SharedStateConflictError):
    """The only conflict is that files were given up: a full checkpoint replaced the last one that used them."""


@dataclass(slots=True)
class _Entry:
    file: StateFile
    last_used_by: int
    deletable: bool


def is_shared(file: StateFile) -> bool:
    """Whether the file may be used by several checkpoints."""
    return "://" in file.path or file.path.startswith("/")


class SharedStateRegistry:
    """The shared files by physical path. Files of a snapshot that the job does not own are never deleted."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._given_up: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, checkpoint_id: int, state: SubtaskState, deletable: bool = True) -> None:
        """Registers that ``checkpoint_id`` uses the state's shared files; called at acknowledgement.

        Raises :class:`SharedStateConflictError` if a known path has another length or checksum, was given up, or
        belongs to a snapshot that the user owns. A task that does not know the latest completed checkpoint yet may
        build upon an older one, whose files are gone if the latest is a full one: if this is the only conflict, the
        error is a :class:`FileGivenUpError`. The state's other files are registered anyway, so that they are deleted
        together with their checkpoint.
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
            return FileGivenUpError(f"shared file {file.path} was already released: no retained checkpoint uses it")
        if entry is None:
            return None
        if entry.file != file:
            return SharedStateConflictError(f"shared file {file.path}: registered {entry.file}, now {file}")
        if deletable and not entry.deletable:
            return SharedStateConflictError(f"shared file {file.path} belongs to a snapshot that the user owns")
        return None

    def register_all(self, checkpoint_id: int, states: Iterable[SubtaskState], deletable: bool = True) -> None:
        """Registers the files of a whole (restored) checkpoint."""
        for state in states:
            self.register(checkpoint_id, state, deletable)

    def unregister_unused(self, lowest_retained: int) -> tuple[str, ...]:
        """Drops files not used from checkpoint ``lowest_retained`` on; returns the sorted paths to delete."""
        unused = [path for path, entry in self._entries.items() if entry.last_used_by < lowest_retained]
        # Remembered before they are deleted: an acknowledgement that names one may already be on its way.
        self._given_up.update(dict.fromkeys(unused))
        while len(self._given_up) > GIVEN_UP_REMEMBERED:
            self._given_up.popitem(last=False)
        return tuple(sorted(path for path in unused if self._entries.pop(path).deletable))

    def unregister_all(self, kept: Collection[str] = ()) -> tuple[str, ...]:
        """Clears the registry at the end of a job; returns the sorted paths to delete, without ``kept``."""
        paths = tuple(sorted(path for path, entry in self._entries.items() if entry.deletable and path not in kept))
        self._entries.clear()
        return paths

    def knows(self, path: str) -> bool:
        """Whether the file is in use, or was until it was given up."""
        return path in self._entries or path in self._given_up
