"""Notices of lost workers and slots, held back briefly until the cause is known; descriptions of exit codes.

The end of a connection is noticed first and does not show the cause. The agent reports the exit code a moment later,
and Spark reports the loss of an executor within seconds. Users read the first notice that a job gets as the cause.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field

_BY_SHELLS = 128
"""A shell, a container or a JVM that reports a signal adds this to its number."""
_HINTS = {
    signal.SIGKILL: "killed from outside, most often by the kernel because memory ran out",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a mapped file on a full disk",
    signal.SIGABRT: "native code gave up",
}

Tell = Callable[[str], None]
"""Notifies an owner of a loss; its argument is the reason."""


@dataclass(slots=True)
class _Held:
    timer: asyncio.TimerHandle
    notices: list[tuple[Tell, str]] = field(default_factory=list)


class SlotLossNotifier:
    """Keys name what is lost: a worker, or a stage. Runs on the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._held: dict[str, _Held] = {}

    def open(self, key: str, grace_s: float) -> None:
        """From now on holds notices of ``key`` back, for at most ``grace_s`` seconds."""
        if key not in self._held:
            self._held[key] = _Held(self._loop.call_later(grace_s, self.explain, key))

    def tell(self, key: str, tell: Tell, reason: str) -> None:
        """Calls ``tell`` at once, or when the key is explained if its notices are held back."""
        held = self._held.get(key)
        if held is None:
            tell(reason)
        else:
            held.notices.append((tell, reason))

    def explain(self, key: str, reason: str | None = None) -> bool:
        """Releases held notices in order of the losses, the first with this reason; False when none is held."""
        held = self._held.pop(key, None)
        if held is None:
            return False
        held.timer.cancel()
        for tell, own in held.notices:
            tell(own if reason is None else reason)
            # The first loss caused the others: only its notice gets the cause, the others keep their own reasons.
            reason = None
        return True

    def close(self) -> None:
        """Drops the held notices."""
        for held in self._held.values():
            held.timer.cancel()
        self._held.clear()


def describe_exit(code: int | None) -> str:
    """Describes a child's exit code: negative for a signal, as Python gives it; None when it is unknown."""
    if code is None:
        return "its process ended"
    hint = hint_of(code)
    return f"its process ended with exit code {code}" + (f" ({hint})" if hint else "")


def hint_of(code: int) -> str:
    """The signal behind an exit code, in Python's form or a shell's, and what it usually means; empty for others."""
    number = -code if code < 0 else code - _BY_SHELLS
    try:
        known = signal.Signals(number)
    except ValueError:
        return ""
    hint = _HINTS.get(known)
    return known.name if hint is None else f"{known.name}: {hint}"
