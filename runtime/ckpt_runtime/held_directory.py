"""Temporary directories that have an owner, also when the process that uses them is killed.

A file in the directory is locked by whoever uses it, and the lock goes with the process, however that ends. Who makes
the next directory of the kind on the machine removes those that nobody holds any more.
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
"""Not the directory itself: one without this file is of somebody who likes the same names."""

Clean = Callable[[Path], None]


def remove_tree(path: Path) -> None:
    """With all that is in it, as far as that goes."""
    shutil.rmtree(path, ignore_errors=True)


class HeldDirectory:
    """A new private directory, until :meth:`remove`, the end of a ``with`` block or of the last reference to this.

    ``clean`` does what is to be done with one that is not used any more. Raises OSError when there can be none.
    """

    def __init__(self, prefix: str, root: str | Path | None = None, clean: Clean = remove_tree) -> None:
        where = Path(tempfile.gettempdir() if root is None else root)
        remove_abandoned(prefix, where, clean)
        self.path, descriptor = _new(prefix, where)
        self._end = weakref.finalize(self, _end, self.path, descriptor, clean)

    def remove(self) -> None:
        """Once more does no harm."""
        self._end()

    def leave(self) -> None:
        """To another process that holds it."""
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
    """A descriptor that keeps the directory of another process until it is closed. Raises OSError when it has gone."""
    file = Path(directory, LOCK)
    descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        # Locked, but perhaps too late: somebody may have removed it in between, and another one of its name be there.
        if os.stat(file).st_ino != os.fstat(descriptor).st_ino:
            raise FileNotFoundError(f"{directory} has gone")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def remove_abandoned(prefix: str, root: Path, clean: Clean = remove_tree) -> None:
    """Cleans those of this user that no process holds."""
    for file in root.glob(f"{prefix}*/{LOCK}"):
        with suppress(OSError):  # it is in use, or has gone meanwhile
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
            continue  # somebody has taken it for abandoned in the moment before it was held
        except BaseException:
            remove_tree(path)
            raise


def _end(path: Path, descriptor: int, clean: Clean) -> None:
    # Held until it is gone: no two may clean it at the same time.
    clean(path)
    os.close(descriptor)
