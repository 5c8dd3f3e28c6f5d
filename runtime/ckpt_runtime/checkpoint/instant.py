"""A point in time, as the shells pass it to the pure machines. This module never reads a clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Instant:
    """``rel_ms`` is monotonic and decides every deadline; ``abs_ms`` is wall clock, only transmitted and shown."""

    rel_ms: int
    abs_ms: int
