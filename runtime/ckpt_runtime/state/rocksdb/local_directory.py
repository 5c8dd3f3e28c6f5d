"""The directory of a backend's database: in the worker's temporary directory, or below one that the user configures.

The former is deleted with its worker, however the worker ends. The latter is locked by the process that uses it: the
files of a killed process are deleted when the next directory is created there.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from ckpt_runtime.processes.held_directory import HeldDirectory

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
