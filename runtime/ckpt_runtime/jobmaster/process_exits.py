"""What the end of a process tells. Pure."""

from __future__ import annotations

import signal

_BY_SHELLS = 128
"""A shell, a container or a JVM that reports a signal adds this to its number."""
_HINTS = {
    signal.SIGKILL: "killed from outside, most often by the kernel because memory ran out",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGBUS: "a crash in native code, or a mapped file on a full disk",
    signal.SIGABRT: "native code gave up",
}


def describe_exit(code: int | None) -> str:
    """Of a child's exit code: negative for a signal, as Python gives it; None when nobody knows it."""
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
