"""The stacks of this process's threads as bounded text, for thread dumps and flame graphs.

Only the names of functions, files and threads are read; source lines and local variables are not, as they may hold
secrets.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from msgspec import Struct

from ckpt_runtime.failure_report import printable

MAX_FRAMES = 200
"""Frames shown of one stack; of a deeper stack, half of them are its outermost and half its innermost frames."""
MAX_THREADS = 500
_MAX_NAME_CHARS = 200


class ThreadInfo(Struct, frozen=True):
    """A thread. ``text`` has its name, its number and its frames, innermost first."""

    name: str
    text: str


def dump_threads() -> tuple[ThreadInfo, ...]:
    """All threads of this process that run Python code, sorted by name; :data:`MAX_THREADS` at most."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    found = []
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 -- there is no public way
        thread = threads.get(ident)
        name = printable("(started outside of Python)" if thread is None else thread.name, _MAX_NAME_CHARS)
        daemon = " daemon" if thread is not None and thread.daemon else ""
        number = ident if thread is None else thread.native_id
        lines = [f'"{name}"{daemon} Id={number}', *(f"\tat {shown}" for shown in reversed(frames_of(frame)))]
        found.append(ThreadInfo(name, "\n".join(lines) + "\n\n"))
    return tuple(sorted(found, key=lambda info: info.name)[:MAX_THREADS])


def frames_of(frame: FrameType | None) -> list[str]:
    """The frames of a stack, outermost first, as ``module.function(file:line)``."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    frames.reverse()
    if len(frames) <= MAX_FRAMES:
        return [_shown(frame) for frame in frames]
    half = MAX_FRAMES // 2
    left_out = f"({len(frames) - 2 * half} frames left out)"
    return [*map(_shown, frames[:half]), left_out, *map(_shown, frames[-half:])]


def _shown(frame: FrameType) -> str:
    code = frame.f_code
    module = frame.f_globals.get("__name__")
    where = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
    function = f"{module}.{code.co_qualname}" if isinstance(module, str) else code.co_qualname
    return printable(f"{function}({where})", _MAX_NAME_CHARS)
