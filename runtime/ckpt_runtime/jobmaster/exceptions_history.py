"""The failures of a job, newest first, with the failures that came along with each. Bounded. Their stored form too."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from ckpt_runtime.graph.schema import checked
from ckpt_runtime.jobmaster.gateway import ExceptionEntry, ExceptionHistory

MAX_CONCURRENT = 16
MAX_STORED = 16
MAX_STORED_TRACE = 16_384
"""Characters of a stack trace that are stored; of a longer one its end goes."""


class FailureLog:
    """Keeps the last ``size`` failures; ``earlier`` are those of earlier drivers, newest first."""

    def __init__(self, size: int, earlier: Iterable[ExceptionEntry] = ()) -> None:
        self._entries: deque[ExceptionEntry] = deque(tuple(earlier)[:size], maxlen=size)
        self._total = len(self._entries)

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

    def to_stored(self) -> list[dict[str, Any]]:
        """The newest ones as JSON values; see :func:`entry_of`."""
        return [asdict(_shortened(entry)) for entry in tuple(self._entries)[:MAX_STORED]]


def entry_of(document: object) -> ExceptionEntry:
    """An entry of its stored form. Raises :class:`DocumentError` for another shape."""
    return checked(document, ExceptionEntry)


def _shortened(entry: ExceptionEntry) -> ExceptionEntry:
    failure = replace(entry.failure, stack_trace=entry.failure.stack_trace[:MAX_STORED_TRACE])
    return replace(entry, failure=failure, concurrent=tuple(_shortened(known) for known in entry.concurrent))
