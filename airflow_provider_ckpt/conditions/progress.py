"""What a waiting task says in its log: where the wait stands, at once when that changes and else twice a minute.

Twice, since a request to a session that hangs takes up to half a minute by default, during which nothing is said. Less
often where many wait in one process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ckpt_runtime.client.errors import Unreachable

INTERVAL_SECONDS = 30.0


class Log(Protocol):
    """The part of a task's or trigger's logger that is needed here."""

    def info(self, text: Any, /, *args: Any) -> Any:
        """Writes one line; ``args`` fill in ``text`` by ``%``."""


class Progress:
    """The lines of one wait. ``standing`` is what makes a line a new one, ``detail`` what is worth adding to it."""

    def __init__(self, log: Log, subject: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._subject = subject
        self._clock = clock
        self.interval: Callable[[], float] = lambda: INTERVAL_SECONDS
        self._standing: str | None = None
        self._line = ""
        self._looked_at = self._said_at = clock()

    def is_due(self, standing: str) -> bool:
        """Whether a line is to be said about what was just seen."""
        self._looked_at = self._clock()
        return standing != self._standing or self._looked_at - self._said_at >= self.interval()

    def say(self, standing: str, detail: str = "") -> None:
        """Writes a line now."""
        self._standing = standing
        self._line = f"{standing}; {detail}" if detail else standing
        self._said_at = self._looked_at = self._clock()
        self._log.info("Waiting for %s: %s", self._subject, self._line)

    def away(self, error: Exception) -> None:
        """A request was not answered, or not served; a line if one is due. The error's words make it no new one."""
        standing = "the session is away" if isinstance(error, Unreachable) else "the session does not serve now"
        if self.is_due(standing):
            self.say(standing, str(error))

    def pauses(self, seconds: float) -> Iterator[float]:
        """The pause between two looks in parts, each to be slept; what was seen last is said again between them."""
        end = self._clock() + seconds
        while (left := end - self._clock()) > 0:
            yield min(left, max(self._said_at + self.interval() - self._clock(), 0.0))
            if self._clock() - self._said_at >= self.interval():
                self._said_at = self._clock()
                age = self._said_at - self._looked_at
                self._log.info("Waiting for %s: %s (seen %.0f s ago)", self._subject, self._line, age)
