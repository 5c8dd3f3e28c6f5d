"""Deadlines of tests: they follow the speed of the machine, and what else runs on it.

A test that waits for a condition says how long that may take on a quiet machine; :func:`patient` gives how long to wait
on this one now. Time that a test asserts something about (a timeout that must expire, a pause that must be kept) is not
a deadline and stays as it is.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_LOOPS = 100_000
_QUIET_S = 0.01
"""Seconds that the loop takes on the machine for which the deadlines were written."""
_MOST = 12.0
"""A test that hangs is not to take hours."""
_LOW_PRIORITY, _OF_LOW_PRIORITY = 10, 4.0
"""A process of that niceness or more waits for most others: by what factor longer."""


def _measured() -> float:
    """How many times slower than that machine a processor of this one is; at least 1.

    The best of five counts:
    what else runs interrupts one or the other, and hardly all of them.
    """
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        total = 0
        for number in range(_LOOPS):
            total += number & 7
        best = min(best, time.perf_counter() - begun)
    return max(1.0, best / _QUIET_S)


_SPEED = _measured()
_PROCESSORS = len(os.sched_getaffinity(0))


def slowness() -> float:
    """The factor by which everything takes longer now: the processor's own, times those who wait for each processor.

    The load of the last minute lags behind what has just been started, and the number of processes that want to run at
    this moment jumps: the larger one counts.
    """
    one_minute, *_, running = Path("/proc/loadavg").read_text().split()[:4]
    load = max(float(one_minute), float(running.partition("/")[0])) / _PROCESSORS
    waits = max(1.0, load) * (_OF_LOW_PRIORITY if os.nice(0) >= _LOW_PRIORITY else 1.0)
    return min(_MOST, _SPEED * waits)


def patient(seconds: float) -> float:
    """How many seconds to wait for what takes at most ``seconds`` on a quiet machine."""
    return seconds * slowness()
