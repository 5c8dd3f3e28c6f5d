"""Memory, processor time and threads of this process, for Flink's process metrics that have a meaning without a JVM."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

_Count = Annotated[int, Meta(ge=0)]
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_SHORTEST_S = 0.5
"""A load over a shorter time would be noise: the previous one is given again."""


class ProcessFigures(Struct, frozen=True):
    """``memory`` and ``memory_limit`` in bytes; the limit is the container's, or else the memory of the machine.

    ``cpu_load`` is the share of all cores that the process has used since the previous measurement, 0 to 1.
    """

    memory: _Count
    memory_limit: _Count
    cpu_ns: _Count
    cpu_load: Annotated[float, Meta(ge=0, le=1)]
    threads: _Count


class ProcessMeter:
    """Measures this process. To be used by one thread."""

    def __init__(self) -> None:
        self._last = (time.monotonic(), time.process_time_ns())
        self._load = 0.0

    def measure(self) -> ProcessFigures:
        now_s, cpu_ns = time.monotonic(), time.process_time_ns()
        passed_s = now_s - self._last[0]
        if passed_s >= _SHORTEST_S:
            used_s = (cpu_ns - self._last[1]) / 1e9
            self._load = min(1.0, max(0.0, used_s / passed_s / (os.cpu_count() or 1)))
            self._last = (now_s, cpu_ns)
        return ProcessFigures(_memory(), _memory_limit(), cpu_ns, self._load, threading.active_count())


def _memory() -> int:
    """The resident memory; its greatest value so far on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


@cache
def _memory_limit() -> int:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # the file is missing, or contains "max"
            return min(machine, int(file.read_text()))
    return machine
