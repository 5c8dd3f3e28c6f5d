"""The new files of one subtask's snapshot: names and counts them, and deletes them if it is discarded."""

from __future__ import annotations

import logging
import shutil
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

from msgspec import structs

from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.storage.duplication import NO_SUCH_MEANS, Duplicator, Means, linked_state_file
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location, discard_file, naming, resolve
from ckpt_runtime.storage.publish import fsync_directory
from ckpt_runtime.storage.state_files import StateFileWriter

logger = logging.getLogger(__name__)

DUPLICATED_AT_ONCE = 8
_CHUNK_BYTES = 1 << 20


class NewFiles:
    """The task's side of :class:`~ckpt_runtime.state.snapshots.SnapshotFiles`.

    ``written_bytes`` is the size of the written content, inline or not, and ``duplicated_bytes`` that of duplicates;
    ``duplicated`` counts the duplicates by means, and ``locations`` are the new files. Their content is durable at
    once, their names after :meth:`settle`.
    """

    def __init__(self, options: CheckpointOptions, inline_threshold: int, *, copies_only: bool = False) -> None:
        self.directory = resolve(options.directory)
        self.written_bytes = 0
        self.duplicated_bytes = 0
        self.duplicated: Counter[Means] = Counter()
        self.locations: list[Location] = []
        self._may_link = not copies_only
        self._duplicator = Duplicator(self.directory, copies_only=copies_only)
        self._unsettled: dict[str, Location] = {}
        self._given_up = False
        self._lock = threading.Lock()
        self._threshold = inline_threshold
        self._shared = resolve(options.shared_directory) if options.shared_directory else None

    def give_up(self) -> None:
        """Gives up the snapshot: later writes raise StorageError. Called by any thread."""
        self._given_up = True

    def check_wanted(self) -> None:
        """Raises StorageError once the files are given up."""
        if self._given_up:
            raise StorageError(f"{self.directory.url}: this snapshot was abandoned", self.directory.url)

    def private(self, suffix: str = "") -> StateFileWriter:
        if suffix:
            return _NewFile(self, self.directory, 0, name_suffix=suffix)
        return _NewFile(self, self.directory, self._threshold)

    def shared(self) -> StateFileWriter:
        """A shared file. Its name begins with the checkpoint's, which identifies files that a killed worker left."""
        if self._shared is None:
            return self.private()
        return _NewFile(self, self._shared, self._threshold, name_prefix=f"{self.directory.name}-")

    def shared_from(self, path: Path) -> StateFile:
        """A shared file from a local one: inline if small, a hard link where possible, otherwise a copy."""
        self.check_wanted()
        directory = self._shared or self.directory
        if self._may_link and directory.is_local and path.stat().st_size > self._threshold:
            try:
                return self._linked(path, directory)
            except OSError as error:
                if error.errno not in NO_SUCH_MEANS:
                    raise
                self._may_link = False
        with self.shared() as file, path.open("rb") as source:
            shutil.copyfileobj(source, file.stream, _CHUNK_BYTES)
            return file.finish()

    def _linked(self, path: Path, directory: Location) -> StateFile:
        is_private = self._shared is None
        target = directory.child(str(uuid4()) if is_private else f"{self.directory.name}-{uuid4()}")
        file = linked_state_file(str(path), target)
        with self._lock:
            self.locations.append(target)
            self.written_bytes += file.length
        self.settle_later(directory)
        return file if is_private else structs.replace(file, path=target.url)

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        found = {name: file for name, file in files.items() if file.inline is not None}
        # Resolved here and not in the threads: fsspec makes one object for each thread.
        sources = {name: resolve(file.path) for name, file in files.items() if file.inline is None}

        def duplicated(name: str) -> Means | None:
            self.check_wanted()
            try:
                found[name], means = self._duplicate(sources[name], files[name])
            except StorageError as error:
                logger.warning("the file is written again: %s", error)
                return None
            return means

        if sources:
            names = list(sources)
            # A hard link takes less time than starting a thread for it.
            while names and duplicated(names.pop()) is Means.HARD_LINK:
                pass
            if names:
                with ThreadPoolExecutor(min(DUPLICATED_AT_ONCE, len(names)), "ckpt-duplicate") as pool:
                    list(pool.map(duplicated, names))
            if self.directory.is_local:
                self.settle_later(self.directory)
            by_means = ", ".join(f"{count} by {means}" for means, count in self.duplicated.items()) or "none"
            logger.info("%s: files duplicated so far: %s", self.directory.url, by_means)
        return found

    def settle_later(self, directory: Location) -> None:
        """Notes that a local directory has new entries."""
        with self._lock:
            self._unsettled[directory.path] = directory

    def settle(self) -> None:
        """Makes the names of all files durable; called once, after the last file."""
        with self._lock:
            directories, self._unsettled = self._unsettled, {}
        for path, directory in directories.items():
            with naming("write", directory):
                fsync_directory(path)

    def _duplicate(self, source: Location, file: StateFile) -> tuple[StateFile, Means]:
        duplicate, means = self._duplicator.duplicate(source, file)
        with self._lock:
            self.locations.append(self.directory.child(duplicate.path))
            self.duplicated_bytes += duplicate.length
            self.duplicated[means] += 1
        return duplicate, means

    def count(self, written: int) -> None:
        """Adds bytes that were written to a new file."""
        with self._lock:
            self.written_bytes += written

    def discard(self) -> None:
        """Deletes the files; those that cannot be deleted stay."""
        for location in self.locations:
            discard_file(location)


class _NewFile(StateFileWriter):
    def __init__(
        self, files: NewFiles, directory: Location, threshold: int, *, name_prefix: str = "", name_suffix: str = ""
    ) -> None:
        super().__init__(directory, threshold, name_prefix, name_suffix)
        self._files = files
        self._is_private = directory is files.directory

    def write(self, data: bytes | bytearray | memoryview) -> int:
        self._files.check_wanted()
        written = super().write(data)
        self._files.count(written)
        return written

    def _settle_entry(self, directory: Location) -> None:
        self._files.settle_later(directory)

    def abort(self) -> None:
        if not self._ended:
            # The bytes that were counted during writing are discarded.
            self._files.count(-self.bytes_written)
        super().abort()

    def finish(self) -> StateFile:
        file = super().finish()
        if file.inline is None:
            self._files.locations.append(self.location)
        return file if self._is_private or file.inline is not None else structs.replace(file, path=self.location.url)
