"""Where a backend has its database: in the worker's temporary directory, or below one that the user has named.

The former goes with its worker, however that ends. Directories elsewhere are locked by the process that uses them, and
the lock goes with the process: whoever makes a directory there removes those which nobody holds any more.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PREFIX = "ckpt-state-"
_KEY = "state.backend.rocksdb.localdir"


class LocalDirectory:
    """A new directory, below ``root`` if there is one. Raises OSError naming the option."""

    def __init__(self, root: str | None, make_directory: Callable[[], str]) -> None:
        self._lock = -1
        if root is None:
            self.path = Path(make_directory())
            return
        try:
            Path(root).mkdir(parents=True, exist_ok=True)
            alone = _locked(Path(root), fcntl.LOCK_EX)  # or a new directory would be removed before it is locked
            try:
                _remove_abandoned(Path(root))
                self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
                self._lock = _locked(self.path, fcntl.LOCK_EX)
            finally:
                os.close(alone)
        except OSError as error:
            raise OSError(error.errno, f"{_KEY}: {error.strerror}", root) from error

    def remove(self) -> None:
        """With all its content; once more does no harm."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(directory: Path, operation: int) -> int:
    """A descriptor that holds the lock until it is closed. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, operation)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove_abandoned(root: Path) -> None:
    for directory in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is in use, or another user's
            lock = _locked(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
