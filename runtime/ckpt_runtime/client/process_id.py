"""Processes of this machine by pid and start time, which tells one from whoever gets its pid next."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta


def stat_fields(pid: int | str) -> list[str]:
    """What the kernel shows of a process behind its name: state, parent, and more. Raises OSError, see proc(5)."""
    # The name may hold blanks and brackets, so that only the last bracket is sure to end it.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def started(pid: int) -> int:
    """When a process began, in clock ticks since boot. Raises ProcessLookupError."""
    try:
        return int(stat_fields(pid)[19])
    except (OSError, IndexError) as error:
        raise ProcessLookupError(f"process {pid} is gone") from error


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process by pid and start time; ``started`` is None where the system does not tell it."""

    # One that may be signalled: 1 is init, and what is below stands for groups of processes.
    pid: Annotated[int, Meta(gt=1)]
    started: int | None

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """Of a process that runs now."""
        try:
            return cls(pid, started(pid))
        except ProcessLookupError:
            return cls(pid, None)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, and the pid is not another one's by now. A child that has ended is reaped."""
        with suppress(ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG)[0] == self.pid:
                return False
        try:
            fields = stat_fields(self.pid)
            return fields[0] not in ("Z", "X") and int(fields[19]) == self.started
        except (OSError, IndexError):
            return self.started is None and not Path("/proc/self/stat").exists() and _answers(self.pid)

    def signal(self, number: int) -> None:
        """To it alone, if it still runs."""
        if self.is_alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def _answers(pid: int) -> bool:
    """For a system that does not tell when a process started."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
