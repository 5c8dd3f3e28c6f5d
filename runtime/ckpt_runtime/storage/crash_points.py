"""Named places at which a test kills the driver, to prove that it always leaves consistent data behind.

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
    """The crash point of a process that is not armed: does nothing."""


def crasher(file: Path) -> Callable[[str], None]:
    """The :func:`crash_point` of an armed process. It deletes the file first, so that a successor survives."""

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
"""``crash_point(point)`` marks a place; a point is named after the step that just happened or is about to."""
