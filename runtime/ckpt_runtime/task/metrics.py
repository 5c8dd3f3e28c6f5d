"""Counters of one subtask, written by its thread and read by the worker's heartbeat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SubtaskMetrics:
    """Rows, bytes, and how the subtask's time was spent (ns since it started).

    ``debloated_buffer_size`` is None unless buffers adapt and a sample has been taken.
    """

    rows_in: int = 0
    bytes_in: int = 0
    busy_ns: int = 0
    idle_ns: int = 0
    backpressured_ns: int = 0
    debloated_buffer_size: int | None = None
