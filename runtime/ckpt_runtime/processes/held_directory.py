"""Temporary directories held by a process, which are cleaned up even after that process was killed.

The using process locks a file in the directory, and loses the lock when it ends in any way. Creating the next directory
with the same prefix on the machine removes those that no process holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

LOCK = ".held"
"""The file that is locked instead of the directory: a directory without it belongs to other software."""

Clean = Callable[[Path], None]


def remove_tree(path: Path) -> None:
    """Remove a directory with its content; errors are ignored."""
    shutil.rmtree(path, ignore_errors=True)


class HeldDirectory:
    """A new private directory that exists until :meth:`remove`, the end of a ``with`` block or garbage collection.

    ``clean`` is called for directories that are no longer used. Raises OSError if none can be made.
    """

    def __init__(self, prefix: str, root: str | Path | None = None, clean: Clean = remove_tree) -> None:
        where = Path(tempfile.gettempdir() if root is None else root)
        remove_abandoned(prefix, where, clean)
        self.path, descriptor = _new(prefix, where)
        self._end = weakref.finalize(self, _end, self.path, descriptor, clean)

    def remove(self) -> None:
        """Clean and release the directory. Idempotent."""
        self._end()

    def leave(self) -> None:
        """Release the directory without cleaning it, because another process holds it."""
        ended = self._end.detach()
        if ended is not None:
            os.close(ended[2][1])

    def __enter__(self) -> str:
        return str(self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def hold(directory: str | Path) -> int:
    """A descriptor that keeps another process's directory until it is closed. Raises OSError if that is missing."""
    file = Path(directory, LOCK)
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # The file may have been removed before it was locked, and another one with the same name may exist.
        if os.stat(file).st_ino != os.fstat(descriptor).st_ino:
            raise FileNotFoundError(f"{directory} has gone")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(prefix: str, root: Path, clean: Clean = remove_tree) -> None:
    """Clean this user's directories that no process holds."""
    for file in root.glob(f"{prefix}*/{LOCK}"):
        with suppress(OSError):  # it is in use, or has disappeared in the meantime
            descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.geteuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    clean(file.parent)
            finally:
                os.close(descriptor)


def _new(prefix: str, root: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=root))
        try:
            os.close(os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
            return path, hold(path)
        except FileNotFoundError:
            continue  # another process deleted it as abandoned before it was locked
        except BaseException:
            remove_tree(path)
            raise


def _end(path: Path, descriptor: int, clean: Clean) -> None:
    # The lock is held until the directory is removed, so that no two processes clean it at the same time.
    clean(path)
    os.close(descriptor)
