"""A clock that a test moves by hand."""

from __future__ import annotations

from ckpt_runtime.checkpoint.instant import Instant


def later(now: Instant, millis: int) -> Instant:
    """Returns the point in time at which that many milliseconds have passed."""
    return Instant(now.rel_ms + millis, now.abs_ms + millis)
