"""New files of a snapshot that is written without a job."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.state_file_writer import StateFileWriter

_ALWAYS_A_FILE = -1


class NewFiles:
    """The :class:`~ckpt_runtime.state.snapshots.SnapshotFiles` of a snapshot in ``directory``, which shares nothing.

    The names of all files begin with ``prefix``, by which those that nothing refers to are found. ``finished`` are
    those that were.
    """

    def __init__(self, directory: Location, prefix: str = "") -> None:
        self._directory = directory
        self._prefix = prefix
        self.finished: list[StateFile] = []

    def private(self, suffix: str = "") -> StateFileWriter:
        return _NewFile(self.finished, self._directory, self._prefix, suffix)

    def shared(self) -> StateFileWriter:
        return self.private()

    def duplicate(self, file: StateFile) -> StateFile:
        """Always raises :class:`StorageError`: there is no checkpoint whose files it could be a savepoint of."""
        raise StorageError(f"{file.path} is of no checkpoint of this snapshot's job", file.path)

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        """None can be: all are to be written anew."""
        return {}


class _NewFile(StateFileWriter):
    def __init__(self, finished: list[StateFile], directory: Location, prefix: str, suffix: str) -> None:
        super().__init__(directory, _ALWAYS_A_FILE, prefix, suffix)
        self._finished = finished

    def finish(self) -> StateFile:
        file = super().finish()
        self._finished.append(file)
        return file
