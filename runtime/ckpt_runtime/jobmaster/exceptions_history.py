"""The failures of a job, newest first, each with its concurrent failures; also their stored form.

Bounded in number and in size, whatever a worker sends: a history that cannot be stored would keep a job from ending.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from ckpt_runtime.failure_report import MAX_MESSAGE_CHARS, MAX_TRACE_CHARS, FailureCause, printable
from ckpt_runtime.jobmaster.gateway_values import ExceptionEntry, ExceptionHistory
from ckpt_runtime.scheduler.job_events import FailureInfo

MAX_CONCURRENT = 16
MAX_STORED = 16
MAX_STORED_CHARS = 1 << 20
"""Limit of all texts together; the oldest failures are dropped first, then those concurrent with the newest."""
_MAX_TRACE_CHARS = MAX_TRACE_CHARS + 2 * MAX_MESSAGE_CHARS
"""In addition to its frames, a worker's trace has a first line that repeats the message."""


class FailureLog:
    """Keeps the last ``size`` failures; ``earlier`` are those of earlier drivers, newest first."""

    def __init__(self, size: int, earlier: Iterable[ExceptionEntry] = ()) -> None:
        self._entries: deque[ExceptionEntry] = deque(tuple(earlier)[:size], maxlen=size)
        self._total = len(self._entries)

    def add(self, entry: ExceptionEntry, *, concurrent: bool) -> None:
        """Adds a failure; one that comes while the job already handles another is attached to that one."""
        entry = replace(entry, failure=_bounded(entry.failure))
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

    def to_stored(self) -> list[dict[str, Any]]:
        """The newest ones as JSON values."""
        left = MAX_STORED_CHARS
        stored: list[dict[str, Any]] = []
        for entry in tuple(self._entries)[:MAX_STORED]:
            left -= _size(entry)
            if left < 0:
                return stored or [asdict(replace(entry, concurrent=()))]
            stored.append(asdict(entry))
        return stored


def cause_of(failure: FailureInfo) -> FailureCause:
    """The job machine's failure as users see it; without a trace, the first line of a trace stands in."""
    trace = failure.stack_trace or f"{failure.exception}: {failure.message}"
    return _bounded(FailureCause(failure.exception, failure.message, trace))


def _bounded(failure: FailureCause) -> FailureCause:
    return FailureCause(
        printable(failure.exception, MAX_MESSAGE_CHARS),
        printable(failure.message, 2 * MAX_MESSAGE_CHARS),
        printable(failure.stack_trace, _MAX_TRACE_CHARS),
    )


def _size(entry: ExceptionEntry) -> int:
    failure = entry.failure
    own = len(failure.exception) + len(failure.message) + len(failure.stack_trace)
    return own + sum(_size(other) for other in entry.concurrent)
