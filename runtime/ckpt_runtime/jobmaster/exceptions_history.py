"""The failures of a job, newest first, with the failures that came along with each. Bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from ckpt_runtime.jobmaster.gateway import ExceptionEntry, ExceptionHistory

MAX_CONCURRENT = 16


class FailureLog:
    """Keeps the last ``size`` failures."""

    def __init__(self, size: int) -> None:
        self._entries: deque[ExceptionEntry] = deque(maxlen=size)
        self._total = 0

    def add(self, entry: ExceptionEntry, *, concurrent: bool) -> None:
        """A failure that comes while the job already deals with one belongs to that one."""
        if concurrent and self._entries:
            first = self._entries[0]
            if len(first.concurrent) < MAX_CONCURRENT:
                self._entries[0] = replace(first, concurrent=(*first.concurrent, entry))
            return
        self._total += 1
        self._entries.appendleft(entry)

    def view(self, limit: int) -> ExceptionHistory:
        entries = tuple(self._entries)[:limit]
        return ExceptionHistory(entries, truncated=self._total > len(entries))
