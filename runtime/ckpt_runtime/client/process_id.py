"""Processes of this machine by pid and start time, which distinguishes a process from a later one with the same pid."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta


def stat_fields(pid: int | str) -> list[str]:
    """The fields after the process name in its ``stat``: state, parent and more. Raises OSError, see proc(5)."""
    # The name may contain blanks and brackets, so only the last bracket is certain to end it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def started(pid: int) -> int:
    """When a process began, in clock ticks since boot. Raises ProcessLookupError."""
    try:
        return int(stat_fields(pid)[19])
    except (OSError, IndexError) as error:
        raise ProcessLookupError(f"process {pid} has ended") from error


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process by pid and start time; ``started`` is None if the system does not provide it."""

    # Only pids that may be signalled: 1 is init, and smaller numbers stand for process groups.
    pid: Annotated[int, Meta(gt=1)]
    started: int | None

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """The id of a process that runs now."""
        try:
            return cls(pid, started(pid))
        except ProcessLookupError:
            return cls(pid, None)

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs and its pid has not been reused. A child that has ended is reaped."""
        with suppress(ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == self.pid:
                return False
        try:
            fields = stat_fields(self.pid)
            return fields[0] not in ("Z", "X") and int(fields[19]) == self.started
        except (OSError, IndexError):
            return self.started is None and not Path("/proc/self/stat").exists() and _answers(self.pid)

    def signal(self, number: int) -> None:
        """Send a signal to this process only, if it still runs."""
        if self.is_alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def _answers(pid: int) -> bool:
    """Whether a process with this pid exists, for systems that do not provide start times."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
