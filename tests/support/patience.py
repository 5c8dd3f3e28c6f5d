"""Deadlines of tests: they follow the speed of the machine, and what else runs on it.

A test that waits for a condition says how long that may take on a quiet machine. :func:`deadline` counts each second of
the wait by what it is worth at the time: beside five processes for each processor, a fifth. :func:`patient` gives the
limit by what runs now, for calls that need a number before they begin. Either way a wait that hangs ends after ten
minutes or so, however busy the machine is. Time that a test asserts something about (a timeout that must expire, a
pause that must be kept) is not a deadline and stays as it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

_LOOPS = 100_000
_QUIET_S = 0.01
"""Seconds that the loop takes on the machine for which the deadlines were written."""
_MOST = 12.0
_WAIT_AT_MOST_S, _TEST_AT_MOST_S = 600.0, 1200.0
"""A wait that hangs ends after so long, or four times its own limit if that is longer; a test after twice its own."""
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
    """How many seconds to wait for what takes at most ``seconds`` on a quiet machine, if it stays as busy as it is."""
    return min(seconds * slowness(), max(_WAIT_AT_MOST_S, 4 * seconds))


def time_limit(seconds: float) -> float:
    """The same for a whole test, whose waits have limits of their own."""
    return min(seconds * slowness(), max(_TEST_AT_MOST_S, 2 * seconds))


def deadline(seconds: float) -> Callable[[], bool]:
    """Begins a wait for what takes at most ``seconds`` on a quiet machine; what is returned says whether it is over.

    It is asked again and again while the wait lasts.
    """
    begun = last = time.monotonic()
    left = seconds

    def is_over() -> bool:
        nonlocal last, left
        now = time.monotonic()
        left -= (now - last) / slowness()
        last = now
        return left < 0 or now - begun > max(_WAIT_AT_MOST_S, 4 * seconds)

    return is_over
