"""Wall-clock time for durations shown to clients; no decision depends on it."""

from __future__ import annotations

import time


def now_ms() -> int:
    """The wall-clock time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
