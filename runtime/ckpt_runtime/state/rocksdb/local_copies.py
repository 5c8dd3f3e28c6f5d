"""Copies of the table files of the job's last checkpoints on the worker's own disk, for a restart on the same worker.

They are hard links of files that a database had when the checkpoint was written, so they use disk space only after the
database has deleted them. A file is identified by its name in the storage, its length and its checksum; the reader of a
copy verifies these. A worker has one object, for all of its databases and all deployments of its job.

They are in the worker's temporary directory, which its agent removes, because the worker is killed when its job ends.
Hard links require one file system, so there are no copies if databases are on another one.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias
from uuid import uuid4

from ckpt_runtime.checkpoint.state_handles import StateFile

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
