"""The files of a database, locally and in a snapshot: their kinds, and how they are fetched.

Content is in table files, which never change and are shared between snapshots; a manifest, which changes, lists those
that belong to the database. Snapshots keep no other file: ``CURRENT`` only names the manifest, and the log is off.

The directory of a backend's database is in the worker's temporary directory, or below one that the user configures.
The former is deleted with its worker, however the worker ends. The latter is locked by the process that uses it: the
files of a killed process are deleted when the next directory is created there.

For a restart on the same worker, its disk keeps copies of the table files of the job's last checkpoints. They are
hard links of files that a database had when the checkpoint was written, so they use disk space only after the
database has deleted them. A file is identified by its name in the storage, its length and its checksum; the reader of a
copy verifies these. A worker has one object, for all of its databases and all deployments of its job.

They are in the worker's temporary directory, which its agent removes, because the worker is killed when its job ends.
Hard links require one file system, so there are no copies if databases are on another one.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias, TypeVar
from uuid import uuid4

from ckpt_runtime.checkpoint.completed_checkpoint import IncrementalKeyedStateHandle, StateFile
from ckpt_runtime.processes.held_directory import HeldDirectory
from ckpt_runtime.state.backend import SnapshotReader
from ckpt_runtime.state.errors import CorruptStateError

logger = logging.getLogger(__name__)


MOST_CHECKPOINTS = 8
"""Maximum number of checkpoints with kept files: the last completed one, and those whose outcome is not known yet."""

_Known: TypeAlias = tuple[str, int, str]


class LocalCopies:
    """See the module docstring. Snapshot writers keep and remove files; subtasks report outcomes of checkpoints."""

    def __init__(self, make_directory: Callable[[], str]) -> None:
        self._make_directory = make_directory
        self._directory: Path | None = None
        self._lock = threading.Lock()
        self._paths: dict[_Known, Path] = {}
        self._checkpoints: dict[int, set[_Known]] = {}
        self._completed = -1
        self._closed = False
        self._warned = False

    def keep(self, checkpoint_id: int, files: Mapping[StateFile, Path]) -> None:
        """Links local files with the content of the checkpoint's files. Files that cannot be linked are not kept."""
        with self._lock:
            if self._closed:
                return
            mine = self._checkpoints.setdefault(checkpoint_id, set())
            for file, path in files.items():
                if file.inline is None and self._link(_known(file), path):
                    mine.add(_known(file))
            while len(self._checkpoints) > MOST_CHECKPOINTS:
                del self._checkpoints[min(number for number in self._checkpoints if number != self._completed)]
            unwanted = self._unwanted()
        _remove(unwanted)

    def _link(self, known: _Known, path: Path) -> bool:
        if known in self._paths:
            return True
        try:
            if self._directory is None:
                self._directory = Path(self._make_directory())
            copy = self._directory / f"{uuid4()}.sst"
            os.link(path, copy)
        except OSError as error:
            if not self._warned:
                logger.warning("a restart will read the checkpoint: there is no local copy of %s: %s", path, error)
            self._warned = True
            return False
        self._paths[known] = copy
        return True

    def path_of(self, file: StateFile) -> Path | None:
        """The local file that should have this file's content."""
        with self._lock:
            return self._paths.get(_known(file))

    def forget(self, file: StateFile) -> None:
        """Drops the copy of a file, which does not have the expected content."""
        with self._lock:
            for files in self._checkpoints.values():
                files.discard(_known(file))
            unwanted = self._unwanted()
        _remove(unwanted)

    def completed(self, checkpoint_id: int) -> None:
        """Forgets earlier checkpoints. The next :meth:`keep` deletes their files, so that the subtask does not wait."""
        with self._lock:
            if checkpoint_id > self._completed:
                self._completed = checkpoint_id
                self._checkpoints = {
                    number: files for number, files in self._checkpoints.items() if number >= checkpoint_id
                }

    def aborted(self, checkpoint_id: int) -> None:
        """Forgets the checkpoint, which will not be restored."""
        with self._lock:
            self._checkpoints.pop(checkpoint_id, None)

    def _unwanted(self) -> list[Path]:
        """Files of no checkpoint. The caller deletes them without the lock, because a subtask may wait for it."""
        wanted = {known for files in self._checkpoints.values() for known in files}
        return [self._paths.pop(known) for known in self._paths.keys() - wanted]

    def close(self) -> None:
        """Deletes all files; nothing is kept after this. Calling it again does no harm."""
        with self._lock:
            self._closed = True
            self._paths.clear()
            self._checkpoints.clear()
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
                self._directory = None


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(OSError):  # it is deleted with the directory
            path.unlink()


def _known(file: StateFile) -> _Known:
    """The identity of a file. Its name in the storage is unique, and distinguishes files with equal content."""
    return file.path.rpartition("/")[2], file.length, file.checksum


R = TypeVar("R")

_TABLE = re.compile(r"[0-9]{6,20}\.sst")
_MANIFEST = re.compile(r"MANIFEST-[0-9]{6,20}")


def is_table(name: str) -> bool:
    """Whether it is the name of a table file."""
    return _TABLE.fullmatch(name) is not None


def is_kept(name: str) -> bool:
    """Whether a snapshot keeps a file of this name."""
    return is_table(name) or _MANIFEST.fullmatch(name) is not None


def tables_of(handle: IncrementalKeyedStateHandle) -> dict[str, StateFile]:
    """The table files of a handle, which may be shared."""
    return {name: file for name, file in handle.files.items() if is_table(name)}


def at_once(threads: int, transfer: Callable[[str], R], names: Collection[str]) -> dict[str, R]:
    """The result of ``transfer`` for each name, with ``threads`` calls at a time.

    After a failure no further call begins, and the error is raised when the running ones have ended.
    """
    if min(threads, len(names)) <= 1:
        return {name: transfer(name) for name in names}
    with ThreadPoolExecutor(min(threads, len(names)), "ckpt-transfer") as pool:
        return dict(zip(names, pool.map(transfer, names), strict=True))


def fetch(
    handle: IncrementalKeyedStateHandle,
    reader: SnapshotReader,
    directory: Path,
    threads: int,
    copies: LocalCopies | None = None,
) -> None:
    """Makes the directory of a database from a snapshot's files, or from valid local copies of them.

    Raises CorruptStateError for files that form no database.
    """
    manifests = [name for name in handle.files if _MANIFEST.fullmatch(name)]
    unknown = [name for name in handle.files if not is_kept(name)]
    if unknown or len(manifests) != 1:
        raise CorruptStateError(f"the files {sorted(handle.files)} are those of no database")
    directory.mkdir()

    def transfer(name: str) -> bool:
        file, path = handle.files[name], str(directory / name)
        copy = copies.path_of(file) if copies is not None and is_table(name) else None
        if copies is not None and copy is not None:
            if reader.take(file, str(copy), path):
                return True
            copies.forget(file)
        reader.fetch(file, path, may_link=is_table(name))
        return False

    taken = at_once(threads, transfer, handle.files)
    if copies is not None:
        local = [handle.files[name].length for name, is_local in taken.items() if is_local]
        counts = (len(local), sum(local), len(taken) - len(local))
        logger.info("restored from %d local files of %d bytes, and %d of the checkpoint", *counts)
    (directory / "CURRENT").write_text(f"{manifests[0]}\n")


_PREFIX = "ckpt-state-"
_KEY = "state.backend.rocksdb.localdir"


class LocalDirectory:
    """A new directory, below ``root`` if there is one. Raises OSError naming the option."""

    def __init__(self, root: str | None, make_directory: Callable[[], str]) -> None:
        self._held: HeldDirectory | None = None
        if root is None:
            self.path = Path(make_directory())
            return
        try:
            Path(root).mkdir(mode=0o700, parents=True, exist_ok=True)
            # The lock is in a private directory of this user. Any user with read access could hold a lock on ``root``.
            self._held = HeldDirectory(_PREFIX, root)
        except OSError as error:
            raise OSError(error.errno, f"{_KEY}: {error.strerror}", root) from error
        self.path = self._held.path

    def remove(self) -> None:
        """Deletes it with all its content; calling it again does no harm."""
        if self._held is not None:
            self._held.remove()
        else:
            shutil.rmtree(self.path, ignore_errors=True)
