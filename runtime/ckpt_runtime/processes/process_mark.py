"""The mark of a process in storage, with which its machine can prove later, without a clock, that it has ended.

The mark names the boot of a kernel, a pid namespace, a pid and the start time of the process. On another machine, or
after a reboot, it proves nothing: then a user has to confirm that the process has ended.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_runtime.client.process_id import started, stat_fields

RELEASED = "released"
"""Replaces a mark after a user has confirmed that the process has ended."""


def machine() -> str:
    """An id that is equal for processes that see each other's pids: same boot of a kernel, same pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def own_mark() -> str | None:
    """The mark of this process; None if the system does not provide enough information."""
    here = machine()
    return f"{here}/{os.getpid()}/{started(os.getpid())}" if here else None


def is_here(mark: str | None) -> bool:
    """Whether the mark is from this boot and namespace, so that the process would be visible."""
    return mark is not None and mark != RELEASED and mark.rpartition("/")[0].rpartition("/")[0] == machine() != ""


def is_gone(mark: str | None) -> bool:
    """Whether it is certain that the process no longer runs; False if that cannot be determined."""
    if mark == RELEASED:
        return True
    if mark is None or not is_here(mark):
        return False
    _, pid, began = mark.rsplit("/", 2)
    if not (pid.isdecimal() and began.isdecimal()):
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    try:
        fields = stat_fields(pid)
        return int(fields[19]) != int(began) or (fields[0] in ("Z", "X") and int(fields[17]) <= 1)
    except (OSError, IndexError, ValueError):  # perhaps another user's process, which is not visible
        return False
