"""What a process that dies before one of its changes to a directory would leave: a copy from before each of them.

Changes of this process alone are seen, by Python's audit events, which come before the operation itself. While a copy
is made other threads may be in the midst of a change: a copy during which something changed is made again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_PATHS = {"os.mkdir": 1, "os.rmdir": 1, "os.remove": 1, "os.rename": 2, "os.link": 2, "os.truncate": 1}
"""Events, and how many of their arguments are paths; a descriptor of the directory is the last one."""
_ATTEMPTS = 100

_watch: Callable[[str, tuple[Any, ...]], None] | None = None
_hooked = False


class CrashStates:
    """Copies of ``directory``, each different from the one before, in ``copies``. ``begins`` says from when on."""

    def __init__(self, directory: Path, into: Path, begins: Callable[[], bool] = lambda: True) -> None:
        self._directory = directory
        self._into = into
        self._begins = begins
        self._lock = threading.RLock()
        self._looking = threading.local()
        self._begun = False
        self._latest = ""
        self.copies: list[Path] = []
        self.changes: list[str] = []
        """What was about to happen at each copy."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """While it is open, no other one may be."""
        global _watch, _hooked
        if not _hooked:
            sys.addaudithook(_told)
            _hooked = True
        _watch = self._take
        try:
            yield
        finally:
            _watch = None
            self._copy("the end")

    def restore(self, copy: Path) -> None:
        """Puts the directory back to what it was."""
        shutil.rmtree(self._directory)
        shutil.copytree(copy, self._directory)

    def _take(self, event: str, arguments: tuple[Any, ...]) -> None:
        if getattr(self._looking, "is_at_it", False) or not self._concerns(event, arguments):
            return
        self._looking.is_at_it = True
        try:
            with self._lock:
                self._begun = self._begun or self._begins()
                if self._begun:
                    self._copy(f"{event} {arguments[0]}")
        finally:
            self._looking.is_at_it = False

    def _concerns(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open":
            path, _, flags = arguments
            return isinstance(flags, int) and bool(flags & _WRITING) and self._is_mine(path, -1)
        count = _PATHS.get(event, 0)
        descriptor = arguments[-1] if event in ("os.mkdir", "os.rmdir", "os.remove") else -1
        return any(self._is_mine(path, descriptor) for path in arguments[:count])

    def _is_mine(self, path: Any, descriptor: Any) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False
        base = os.readlink(f"/proc/self/fd/{descriptor}") if isinstance(descriptor, int) and descriptor >= 0 else ""
        return Path(base, os.fsdecode(path)).is_relative_to(self._directory)

    def _copy(self, change: str) -> None:
        copy = self._into / f"{len(self.copies):04d}"
        for _ in range(_ATTEMPTS):
            before = _fingerprint(self._directory)
            if before == self._latest:
                return
            shutil.rmtree(copy, ignore_errors=True)
            with suppress(shutil.Error, FileNotFoundError):
                shutil.copytree(self._directory, copy)
                if _fingerprint(self._directory) == before:
                    self._latest = before
                    self.copies.append(copy)
                    self.changes.append(change)
                    return
        raise AssertionError(f"{self._directory} changes all the time")


def _told(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch is not None and (event == "open" or event in _PATHS):
        _watch(event, arguments)


def _fingerprint(directory: Path) -> str:
    """Of all names and contents. Temporary names count: no reader may fail because of them."""
    digest = hashlib.sha256()
    for place, directories, names in os.walk(directory):
        directories.sort()
        for name in sorted(names):
            with suppress(FileNotFoundError):
                path = Path(place, name)
                digest.update(os.fsencode(path.relative_to(directory)) + b"\0" + path.read_bytes() + b"\0")
        digest.update(os.fsencode(place) + b"\0")
    return digest.hexdigest()
