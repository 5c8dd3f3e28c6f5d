"""The new files of one subtask's snapshot: named, counted, and deleted again when nobody waits for it any more."""

from __future__ import annotations

from contextlib import suppress

from msgspec import structs

from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location, delete_file, resolve
from ckpt_runtime.storage.state_file_writer import StateFileWriter


class NewFiles:
    """The task's side of :class:`~ckpt_runtime.state.snapshots.SnapshotFiles`.

    ``written_bytes`` is the content of all of them, inline or not; ``locations`` are those that became files.
    """

    def __init__(self, options: CheckpointOptions, inline_threshold: int) -> None:
        self.directory = resolve(options.directory)
        self.written_bytes = 0
        self.locations: list[Location] = []
        self._threshold = inline_threshold
        self._shared = resolve(options.shared_directory) if options.shared_directory else None

    def private(self, suffix: str = "") -> StateFileWriter:
        if suffix:
            return _NewFile(self, self.directory, 0, name_suffix=suffix)
        return _NewFile(self, self.directory, self._threshold)

    def shared(self) -> StateFileWriter:
        """Its name begins with the checkpoint's, which tells whose a file is that a killed worker left."""
        if self._shared is None:
            return self.private()
        return _NewFile(self, self._shared, self._threshold, name_prefix=f"{self.directory.name}-")

    def discard(self) -> None:
        """Deletes them; what cannot be deleted stays."""
        for location in self.locations:
            with suppress(StorageError):
                delete_file(location)


class _NewFile(StateFileWriter):
    def __init__(
        self, files: NewFiles, directory: Location, threshold: int, *, name_prefix: str = "", name_suffix: str = ""
    ) -> None:
        super().__init__(directory, threshold, name_prefix, name_suffix)
        self._files = files
        self._is_private = directory is files.directory

    def finish(self) -> StateFile:
        file = super().finish()
        self._files.written_bytes += file.length
        if file.inline is None:
            self._files.locations.append(self.location)
        return file if self._is_private or file.inline is not None else structs.replace(file, path=self.location.url)
