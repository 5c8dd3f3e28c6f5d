"""A process as others may find it in storage: enough to prove on its own machine that it is gone, and never by a clock.

The mark names the boot of a kernel, a pid namespace, a pid and when that process began. Somewhere else, or after a
boot, nothing is proven: then a user has to say it.
"""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_runtime.client.process_id import started, stat_fields

RELEASED = "released"
"""In the place of a mark: a user has said that the process is gone."""


def machine() -> str:
    """Equal for two processes that see each other's pids: the same boot of a kernel, the same pid namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def own_mark() -> str | None:
    """Of this process; None where the system does not tell enough."""
    here = machine()
    return f"{here}/{os.getpid()}/{started(os.getpid())}" if here else None


def is_here(mark: str | None) -> bool:
    """Whether it is of this very boot and namespace, so that the process would be seen."""
    return mark is not None and mark != RELEASED and mark.rpartition("/")[0].rpartition("/")[0] == machine() != ""


def is_gone(mark: str | None) -> bool:
    """Whether it is certain that this process runs no more. What cannot be told is no proof."""
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
    except (OSError, IndexError, ValueError):  # another user's, perhaps, which is not shown
        return False
