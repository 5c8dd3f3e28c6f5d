"""Named places at which a test lets the driver die, to prove that what it leaves behind is always consistent.

Outside tests :func:`crash_point` is an empty function. The environment variable :data:`VARIABLE`, the path of a file,
arms a process from its start: the process dies at the point whose name the file holds at that time.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

VARIABLE = "CKPT_CRASH_POINT_FILE"


def _pass(point: str) -> None:
    """Nobody wants this process to die."""


def crasher(file: Path) -> Callable[[str], None]:
    """What :func:`crash_point` is in an armed process. The file goes first: a successor is not to die there as well."""

    def reach_armed(point: str) -> None:
        try:
            wanted = file.read_text().strip()
        except FileNotFoundError:
            return
        if wanted == point:
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    return reach_armed


_file = os.environ.get(VARIABLE)
crash_point = _pass if not _file else crasher(Path(_file))
"""``crash_point(point)`` marks a place; points are named after what has just happened or is about to."""
