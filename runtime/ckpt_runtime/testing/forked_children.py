"""The processes that a template has forked: who asked for one hears of its beginning and of its end."""

from __future__ import annotations

import os
import select
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class _Child:
    pid: int
    told: socket.socket


class ForkedChildren:
    """By their process descriptors, which ``poll`` shows as readable when the process has ended.

    Each has a connection to who asked for it, on which its pid is sent first, with its descriptor, and its exit code in
    the end.
    """

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self._children: dict[int, _Child] = {}

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._children

    def __len__(self) -> int:
        return len(self._children)

    def add(self, pid: int, told: socket.socket) -> None:
        """Raises OSError, and then there is no such process any more."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:  # nobody could tell its end: it must not live
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._children[descriptor] = _Child(pid, told)
        self._poll.register(descriptor, select.POLLIN)
        with suppress(OSError):  # who asked is gone
            socket.send_fds(told, [str(pid).encode()], [descriptor])

    def reap(self, descriptor: int) -> None:
        """Waits for its end."""
        child = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(child.pid, 0)
        with child.told, suppress(OSError):
            child.told.send(str(os.waitstatus_to_exitcode(status)).encode())

    def kill_all(self) -> None:
        """And waits for them."""
        for descriptor, child in list(self._children.items()):
            os.kill(child.pid, signal.SIGKILL)
            self.reap(descriptor)

    def close(self) -> None:
        """In a child: it keeps nothing of the others."""
        for descriptor, child in self._children.items():
            os.close(descriptor)
            child.told.close()
