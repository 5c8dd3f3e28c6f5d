"""Handles of processes of this machine that are not children, which cannot be confused with a later user of their pid.

Linux only. On other systems :func:`machine` is empty, and the functions are not used.

Start times are the kernel's ticks since boot, read here. psutil instead gives the time of day of a start, which changes
when the clock is set: another process, or a later command, would mistake a living process for a different one. psutil's
walk down a process tree also compares such times and skips processes that seem older than their parent, while the
supervisor must not miss any; and it takes three times as long.
"""

from __future__ import annotations

import os
import select
import signal
import weakref
from contextlib import suppress
from pathlib import Path

from ckpt_runtime.client.process_id import started, stat_fields
from ckpt_runtime.processes import process_mark

WORKER = "ckpt-worker"
TEMPLATE = "ckpt-template"
SUPERVISOR = "ckpt-supervisor"


def set_name(name: str) -> None:
    """Set the name shown by ``ps -o comm`` and ``top``, since forks share one command line. Linux only."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)


def machine() -> str:
    """Like :func:`~ckpt_runtime.processes.process_mark.machine`; empty if the system has no process descriptors."""
    if not hasattr(os, "pidfd_open"):
        return ""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return ""
    return process_mark.machine()


def descendants(pid: int) -> list[int]:
    """All descendants of a process, including zombies; parents are first."""
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


def processor_ticks(pid: int) -> int:
    """The processor time of a process, in clock ticks. Raises OSError if it has ended, and on non-Linux systems."""
    fields = stat_fields(pid)
    return int(fields[11]) + int(fields[12])


def hold(pid: int, began: int) -> int:
    """A descriptor that is readable once the process has ended. Raises OSError if it has ended or its pid is reused."""
    descriptor = os.pidfd_open(pid)
    try:
        if started(pid) != began:
            raise ProcessLookupError(f"pid {pid} now belongs to another process")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


class AdoptedProcess:
    """A process that another one started; can be waited for and killed like a child. Raises OSError if it has ended."""

    def __init__(self, pid: int, began: int) -> None:
        self.pid = pid
        self._descriptor = hold(pid, began)
        weakref.finalize(self, os.close, self._descriptor)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def wait(self) -> None:
        """Block until the process has ended; only its parent can read its exit code."""
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        poll.poll()

    def release(self) -> None:
        """Stop watching the process, which keeps running."""
