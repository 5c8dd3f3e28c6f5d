"""Notices of lost workers and slots, held back until somebody knows why: for a short time at most.

The end of a connection is noticed first and says nothing. The exit code of the process comes from its agent a moment
later, the fate of an executor from Spark within seconds. What a job is told first is what its users read as the cause.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

Tell = Callable[[str], None]
"""Tells an owner; gets the reason."""


@dataclass(slots=True)
class _Held:
    timer: asyncio.TimerHandle
    notices: list[tuple[Tell, str]] = field(default_factory=list)


class LossNotices:
    """Keys name what is lost: a worker, or a stage. Runs on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held: dict[str, _Held] = {}

    def open(self, key: str, grace_s: float) -> None:
        """From now on notices of ``key`` are held, for ``grace_s`` at most."""
        if key not in self._held:
            self._held[key] = _Held(self._loop.call_later(grace_s, self.explain, key))

    def tell(self, key: str, tell: Tell, reason: str) -> None:
        """At once, or when the key is explained."""
        held = self._held.get(key)
        if held is None:
            tell(reason)
        else:
            held.notices.append((tell, reason))

    def explain(self, key: str, reason: str | None = None) -> bool:
        """Tells what is held, the first with this reason, in the order of the losses; False when nothing is held."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        held.timer.cancel()
        for tell, own in held.notices:
            tell(own if reason is None else reason)
            reason = None
        return True

    def close(self) -> None:
        """Nobody is told any more."""
        for held in self._held.values():
            held.timer.cancel()
        self._held.clear()
