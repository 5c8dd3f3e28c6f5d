"""The files of a snapshot outside a job: reading for a state backend, and writing of new files.

Each file is verified before it is used for a restore. Files that a failed write left are deleted.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from msgspec.structs import replace

from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import Location, delete_empty_directory, is_directory, make_directory, resolve
from ckpt_runtime.storage.state_files import DEFAULT_MEMORY_THRESHOLD, StateFileReader, StateFileWriter

logger = logging.getLogger(__name__)


@contextmanager
def missing_files_as_damage() -> Iterator[None]:
    """Turns NotFoundError into :class:`CorruptFileError`, for files that an opened snapshot refers to."""
    try:
        yield
    except NotFoundError as error:
        raise CorruptFileError(f"{error.url}: the file is missing", error.url) from error


class StoredFiles:
    """The :class:`~ckpt_runtime.state.snapshots.SnapshotReader` of the snapshot in ``directory`` (URL).

    Each file is opened and verified once. Only :meth:`fetch` may be called by several threads; close it after use. With
    ``copies_only``, fetched files share no block on disk with the snapshot.
    """

    def __init__(self, directory: str, *, copies_only: bool = False) -> None:
        self._directory = resolve(directory)
        self._copies_only = copies_only
        self._open: dict[StateFile, StateFileReader] = {}

    def read(self, file: StateFile, offset: int, length: int) -> bytes | memoryview:
        return self._reader(file).read(offset, length)

    def fetch(self, file: StateFile, path: str, *, may_link: bool = False) -> None:
        with closing(StateFileReader(self._directory, file)) as reader:
            if may_link and not self._copies_only and reader.link_to(path):
                return
            with open(path, "xb") as target:
                try:
                    reader.copy_to(target)
                except BaseException:
                    with suppress(OSError):
                        os.unlink(path)
                    raise

    def take(self, file: StateFile, copy: str, path: str) -> bool:
        try:
            directory, name = os.path.split(copy)
            with closing(StateFileReader(resolve(directory), replace(file, path=name))) as local:
                return local.link_to(path)
        except StorageError as error:
            logger.warning("cannot use the local copy of %s, the file is read from the snapshot: %s", file.path, error)
            return False

    def _reader(self, file: StateFile) -> StateFileReader:
        reader = self._open.get(file)
        if reader is None:
            reader = self._open[file] = StateFileReader(self._directory, file)
        return reader

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()


_ALWAYS_A_FILE = -1


@contextmanager
def new_directory(target: Location, source: Location, discard: Callable[[], None]) -> Iterator[None]:
    """Creates the directory of a snapshot that is derived from the one in ``source``; use it in a ``with`` block.

    If the block fails, ``discard`` is called to delete the files, and the new directory and the parents that were
    created for it are deleted as far as they are empty. Nothing is deleted if the metadata may have been written.
    Raises :class:`AlreadyExistsError`, and the errors of :func:`check_outside`.
    """
    check_outside(target, source)
    made = _missing(target)
    try:
        make_directory(target, exist_ok=False)
        yield
    except (AlreadyExistsError, AmbiguousWriteError):
        raise
    except BaseException:
        discard()
        with suppress(StorageError):
            for directory in made:
                delete_empty_directory(directory)
        raise


def check_outside(target: Location, source: Location) -> None:
    """Raises :class:`InvalidLocationError` for a target inside the source snapshot, where no tool would find it."""
    if source.real().contains(target.real()):
        raise InvalidLocationError(f"{target.url} lies in the snapshot {source.url}", target.url)


def _missing(target: Location) -> list[Location]:
    """The directory and its parents that do not exist, innermost first."""
    missing: list[Location] = []
    directory = target
    while not (directory.is_object_store or directory == directory.parent or is_directory(directory)):
        missing.append(directory)
        directory = directory.parent
    return missing


class UnsharedFiles:
    """The :class:`~ckpt_runtime.state.snapshots.SnapshotFiles` of a snapshot in ``directory`` without shared files.

    The names of all files begin with ``prefix``. ``finished`` lists the files, without content stored in handles.
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

    def duplicate_all(self, files: Mapping[str, StateFile]) -> dict[str, StateFile]:
        """Duplicates none, so that the backend writes all of them again."""
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
