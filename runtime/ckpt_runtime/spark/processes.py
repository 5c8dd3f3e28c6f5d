"""Holding on to processes of this machine that are no children: told apart from whoever gets their pid next.

Linux only. Elsewhere :func:`machine` is empty, and nobody tries.

Start times are the kernel's ticks since boot, read here. psutil gives the time of day of a start, which moves when the
clock is set: another process, or a later command, would take a living process for a stranger. psutil's walk
down a process tree compares such times too and skips processes that seem older than their parent, while the supervisor
must not miss any; and it takes three times as long.
"""

from __future__ import annotations

import os
import select
import signal
import weakref
from contextlib import suppress
from pathlib import Path

from ckpt_runtime import process_mark
from ckpt_runtime.client.process_id import started, stat_fields

WORKER = "ckpt-worker"
TEMPLATE = "ckpt-template"
SUPERVISOR = "ckpt-supervisor"


def set_name(name: str) -> None:
    """What ``ps -o comm`` and ``top`` show of this process; forked ones have the same command line. Linux only."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def machine() -> str:
    """As :func:`~ckpt_runtime.process_mark.machine`; empty where there are no process descriptors."""
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return ""
    return process_mark.machine()


def descendants(pid: int) -> list[int]:
    """All processes below one, those that have ended and wait for their parent included; parents come first."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError, ValueError):
                parents[int(entry)] = int(stat_fields(entry)[1])
    found: list[int] = []
    wanted = {pid}
    while wanted:
        wanted = {child for child, parent in parents.items() if parent in wanted}
        found += sorted(wanted)
    return found


def hold(pid: int, began: int) -> int:
    """A descriptor that becomes readable when the process ends. Raises OSError when it is gone or another one."""
    descriptor = os.pidfd_open(pid)
    try:
        if started(pid) != began:
            raise ProcessLookupError(f"process {pid} is another one by now")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class AdoptedProcess:
    """A process that another one started; can be waited for and killed like a child. Raises OSError when it is gone."""

    def __init__(self, pid: int, began: int) -> None:
        self._descriptor = hold(pid, began)
        weakref.finalize(self, os.close, self._descriptor)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> None:
        """Blocks until it has ended; its exit code is for its parent alone."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.poll()

    def release(self) -> None:
        """It lives on without this process."""
