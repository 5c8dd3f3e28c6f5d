"""Wakes a sleeping task thread; cheap for the many wake-ups that find it awake."""

from __future__ import annotations

import threading

# A lock wait is limited to threading.TIMEOUT_MAX, and a user's timer may be centuries away.
LONGEST_SLEEP_S = 3600.0


class Wakeup:
    """One sleeper, many wakers. A wake-up between :meth:`prepare` and :meth:`wait` is not lost."""

    __slots__ = ("_event", "_sleeping")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._sleeping = False

    def wake(self) -> None:
        """Wakes the sleeper. Called by any thread."""
        # A plain flag: nearly all wake-ups find the thread awake, and setting an event takes a lock.
        if self._sleeping:
            self._event.set()

    def prepare(self) -> None:
        """The sleeper is about to sleep; it must check for work again after this call."""
        # In this order: a wake-up between both lines sets the event of this sleep, not of the last one.
        self._event.clear()
        self._sleeping = True

    def cancel(self) -> None:
        """The sleeper found work after all."""
        self._sleeping = False

    def wait(self, timeout_s: float | None) -> None:
        """Sleeps until woken or until the timeout, which :data:`LONGEST_SLEEP_S` limits."""
        self._event.wait(None if timeout_s is None else min(timeout_s, LONGEST_SLEEP_S))
        self._sleeping = False
