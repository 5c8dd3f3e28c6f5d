"""The files of a snapshot as a state backend reads them when it restores one: each is verified before it is used."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from msgspec.structs import replace

from ckpt_runtime.checkpoint.state_handles import StateFile
from ckpt_runtime.storage.errors import CorruptFileError, NotFoundError, StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.state_file_reader import StateFileReader

logger = logging.getLogger(__name__)


@contextmanager
def missing_files_as_damage() -> Iterator[None]:
    """For files that an open snapshot refers to. Raises :class:`CorruptFileError` in place of NotFoundError."""
    try:
        yield
    except NotFoundError as error:
        raise CorruptFileError(f"{error.url}: the file is missing", error.url) from error


class StoredFiles:
    """The :class:`~ckpt_runtime.state.snapshots.SnapshotReader` of the snapshot in ``directory`` (URL).

    Each file is opened and verified once. One thread, but for :meth:`fetch`; close it after use. With ``copies_only``
    nothing that is fetched shares a block on disk with the snapshot.
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
            logger.warning("the local copy of %s is of no use, it is read from the snapshot: %s", file.path, error)
            return False

    def _reader(self, file: StateFile) -> StateFileReader:
        reader = self._open.get(file)
        if reader is None:
            reader = self._open[file] = StateFileReader(self._directory, file)
        return reader

    def close(self) -> None:
        for reader in self._open.values():
            reader.close()
