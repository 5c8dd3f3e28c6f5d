"""How a sleeping task thread is woken: cheap for the many wake-ups that find it awake."""

from __future__ import annotations

import threading


class Wakeup:
    """One sleeper, many wakers. A wake-up between :meth:`prepare` and :meth:`wait` is not lost."""

    __slots__ = ("_event", "_sleeping")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._sleeping = False

    def wake(self) -> None:
        """Any thread."""
        if self._sleeping:
            self._event.set()

    def prepare(self) -> None:
        """The sleeper is about to sleep; it must look for work once more after this call."""
        self._event.clear()
        self._sleeping = True

    def cancel(self) -> None:
        """The sleeper found work after all."""
        self._sleeping = False

    def wait(self, timeout_s: float | None) -> None:
        self._event.wait(timeout_s)
        self._sleeping = False
