"""A file system that is slow to open anything, or does not answer: the kernel asks this process before each open.

That is fanotify's permission to open, of Linux, for root. When this process ends, all waiting calls continue.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import select
import struct
import threading
import time
from pathlib import Path

_CLASS_CONTENT, _CLOEXEC, _NONBLOCK = 0x4, 0x1, 0x2
_MARK_ADD, _MARK_MOUNT = 0x1, 0x10
_OPEN_PERM, _ON_DIRECTORIES = 0x10000, 0x40000000
_ALLOW = 1
_AT_FDCWD = -100
_EVENT = struct.Struct("IBBHQii")
"""Length, version, reserved, length of this head, mask, descriptor, process."""
_ANSWER = struct.Struct("iI")


class SlowMount:
    """From now until :meth:`release` each open of a file or directory of the mount at ``root`` takes ``delay_s``.

    With ``None`` it takes until then. Raises OSError where the kernel does not allow it.
    """

    def __init__(self, root: Path, delay_s: float | None) -> None:
        self._delay_s = delay_s
        self._waiting: list[tuple[float, int]] = []
        libc = ctypes.CDLL(None, use_errno=True)
        self._events = libc.fanotify_init(_CLASS_CONTENT | _CLOEXEC | _NONBLOCK, os.O_RDONLY | os.O_CLOEXEC)
        if self._events < 0:
            raise OSError(ctypes.get_errno(), "cannot ask the kernel for its opens")
        mask = ctypes.c_uint64(_OPEN_PERM | _ON_DIRECTORIES)
        if libc.fanotify_mark(self._events, _MARK_ADD | _MARK_MOUNT, mask, _AT_FDCWD, bytes(root)) != 0:
            error = ctypes.get_errno()
            os.close(self._events)
            raise OSError(error, f"cannot watch the opens of {root}")
        self.delayed = 0
        """How many opens have been made to wait."""
        self._over, self._told = os.pipe()
        self._thread = threading.Thread(target=self._answer, name="slow-mount", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Waiting calls continue, and no later one waits."""
        os.close(self._told)
        self._thread.join()
        os.close(self._over)

    def _answer(self) -> None:
        try:
            while True:
                timed = self._waiting and self._delay_s is not None
                pause_s = max(0.0, self._waiting[0][0] - time.monotonic()) if timed else None
                readable = select.select([self._events, self._over], [], [], pause_s)[0]
                if self._over in readable:
                    return
                if self._events in readable:
                    self._ask()
                while self._waiting and self._waiting[0][0] <= time.monotonic():
                    self._allow(heapq.heappop(self._waiting)[1])
        finally:
            for _, descriptor in self._waiting:
                self._allow(descriptor)
            os.close(self._events)  # the kernel allows what it has not asked yet

    def _ask(self) -> None:
        events = os.read(self._events, 1 << 16)
        due = float("inf") if self._delay_s is None else time.monotonic() + self._delay_s
        while events:
            length, _, _, _, _, descriptor, pid = _EVENT.unpack_from(events)
            events = events[length:]
            if pid == os.getpid():  # this process itself looks at the disk to heal it
                self._allow(descriptor)
            else:
                self.delayed += 1
                heapq.heappush(self._waiting, (due, descriptor))

    def _allow(self, descriptor: int) -> None:
        """The process that asked may have been killed meanwhile."""
        try:
            os.write(self._events, _ANSWER.pack(descriptor, _ALLOW))
        except FileNotFoundError:
            pass
        finally:
            os.close(descriptor)
