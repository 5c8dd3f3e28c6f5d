"""The disk that output and checkpoints lie on: it fills, it is slow, and parts of it vanish as a lost mount does.

As root it is a small tmpfs. A part that has vanished is covered by an empty read-only file system, or by a plain file
where nothing can be mounted: nothing may be written in its place, since that would be hidden when it comes back.
"""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
from pathlib import Path

from tests.chaos.slow_mount import SlowMount

_SIZE = "128m"
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Disk:
    """``root`` is its directory. Use :meth:`unmount` at the end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.is_small = _mount(root, f"size={_SIZE}")
        self._covered: list[tuple[Path, bool]] = []
        self._slow: SlowMount | None = None

    def vanish(self, name: str, *, mounted: bool) -> None:
        """Hides a directory. ``mounted`` under an empty file system if possible, else behind a file."""
        path = self.root / name
        if mounted and self.is_small and _mount(path, "ro"):
            self._covered.append((path, True))
            return
        _away(path).touch()
        _exchange(path, _away(path))
        self._covered.append((path, False))

    def fill(self) -> None:
        """Takes all that is free. Only where :attr:`is_small`."""
        with (self.root / "ballast").open("wb", buffering=0) as ballast:
            try:
                while ballast.write(bytes(1 << 16)):
                    continue
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def slow_down(self, delay_s: float | None) -> bool:
        """Each open takes so long; with ``None`` until :meth:`heal`. Says whether that can be done."""
        if not self.is_small:
            return False
        try:
            self._slow = SlowMount(self.root, delay_s)
        except OSError:
            return False
        return True

    def heal(self) -> int:
        """Everything is back, fast, and there is room. Returns how many opens have been slow."""
        delayed = 0
        if self._slow is not None:
            self._slow.release()
            delayed, self._slow = self._slow.delayed, None
        (self.root / "ballast").unlink(missing_ok=True)
        for path, mounted in self._covered:
            if mounted:
                subprocess.run(["umount", "--lazy", str(path)], check=True)
            else:
                _exchange(path, _away(path))
                _away(path).unlink()
        self._covered.clear()
        return delayed

    def unmount(self) -> None:
        self.heal()
        if self.is_small:
            subprocess.run(["umount", "--lazy", str(self.root)], check=True)


def _away(path: Path) -> Path:
    return path.with_name(f"{path.name}.away")


def _exchange(one: Path, other: Path) -> None:
    """At once, as a mount goes and comes: a sink that finds nothing at its path may make a new directory there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, bytes(one), _AT_FDCWD, bytes(other), _RENAME_EXCHANGE) != 0:
        raise OSError(ctypes.get_errno(), f"cannot exchange {one} and {other}")


def _mount(path: Path, options: str) -> bool:
    """Whether it worked: only root may, and not in every container."""
    if os.geteuid() != 0:
        return False
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
