"""New files of a snapshot that is written without a job."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location
from ckpt_runtime.storage.state_file_writer import DEFAULT_MEMORY_THRESHOLD, StateFileWriter

_ALWAYS_A_FILE = -1


class UnsharedFiles:
    """The :class:`~ckpt_runtime.state.snapshots.SnapshotFiles` of a snapshot in ``directory``, which shares nothing.

    The names of all files begin with ``prefix``; ``finished`` are those that became files.
    """

    def __init__(self, directory: Location, prefix: str = "") -> None:
        self.finished: list[StateFile] = []
        self._directory = directory
        self._prefix = prefix

    def private(self, suffix: str = "") -> StateFileWriter:
        return _NewFile(self, self._directory, self._prefix, suffix)

    def shared(self) -> StateFileWriter:
        return self.private()

    def shared_from(self, path: Path) -> StateFile:
        with self.shared() as file, path.open("rb") as source:
            shutil.copyfileobj(source, file.stream)
            return file.finish()

    def duplicate(self, file: StateFile) -> StateFile:
        """Always raises :class:`StorageError`: there is no checkpoint whose files it could be a savepoint of."""
        raise StorageError(f"{file.path} is of no checkpoint of this snapshot's job", file.path)

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        """None can be: all are to be written anew."""
        return {}


class _NewFile(StateFileWriter):
    def __init__(self, files: UnsharedFiles, directory: Location, prefix: str, suffix: str) -> None:
        threshold = _ALWAYS_A_FILE if suffix else DEFAULT_MEMORY_THRESHOLD
        super().__init__(directory, threshold, name_prefix=prefix, name_suffix=suffix)
        self._files = files

    def finish(self) -> StateFile:
        file = super().finish()
        if file.inline is None:
            self._files.finished.append(file)
        return file
