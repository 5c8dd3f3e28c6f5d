"""Wall-clock time for durations shown to clients; decisions are never made on it."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Reads the clock: milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
