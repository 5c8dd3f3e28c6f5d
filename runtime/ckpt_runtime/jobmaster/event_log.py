"""The events of a session, for event streams: a ring of the newest ones, numbered from 1. Pure.

Each reader keeps its own position, so that a slow reader costs nothing and delays no other one. If the ring has dropped
events that a reader has not read yet, it gets EventsMissedError. All methods run on the driver's loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

DEFAULT_CAPACITY = 4_096
BATCH = 256
"""Maximum number of events that a reader gets at a time."""


class EventType(StrEnum):
    """The types of events, as streams spell them."""

    JOB_STATUS = "job-status"
    DEPLOYMENT = "deployment"
    TASKS_RUNNING = "tasks-running"
    FAILURE = "failure"
    CHECKPOINT_TRIGGERED = "checkpoint-triggered"
    CHECKPOINT_COMPLETED = "checkpoint-completed"
    CHECKPOINT_FAILED = "checkpoint-failed"
    SAVEPOINT_TRIGGERED = "savepoint-triggered"
    SAVEPOINT_COMPLETED = "savepoint-completed"
    SAVEPOINT_FAILED = "savepoint-failed"
    CONFIGURATION = "configuration"
    CHECKPOINT_CONFIGURATION = "checkpoint-configuration"
    RESCALE = "rescale"
    OPERATION = "operation"


@dataclass(frozen=True, slots=True)
class SessionEvent:
    """``data`` has JSON values. ``job_id`` is None for an event that belongs to no job."""

    number: int
    type: EventType
    job_id: str | None
    data: Mapping[str, Any]


class EventsMissedError(Exception):
    """Events that a reader should have received were dropped, or belong to another session."""


class EventLog:
    """The events of one driver; ``session_id`` distinguishes it from every other driver."""

    def __init__(self, session_id: str, capacity: int = DEFAULT_CAPACITY) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be >= 1, is {capacity}")
        self.session_id = session_id
        self._ring: deque[SessionEvent] = deque(maxlen=capacity)
        self._newest = 0
        self._wakes: set[Callable[[], None]] = set()

    @property
    def newest(self) -> int:
        """The number of the last event, 0 before the first."""
        return self._newest

    def publish(self, kind: EventType, job_id: str | None, data: Mapping[str, Any]) -> None:
        self._newest += 1
        self._ring.append(SessionEvent(self._newest, kind, job_id, data))
        for wake in tuple(self._wakes):
            wake()

    def after(self, number: int) -> list[SessionEvent]:
        """The events after number ``number``, at most one batch. Raises EventsMissedError."""
        first = number + len(self._ring) - self._newest
        if not 0 <= first <= len(self._ring):
            raise EventsMissedError(f"event {number + 1} is not kept any more")
        return [self._ring[place] for place in range(first, min(first + BATCH, len(self._ring)))]

    def event_id(self, number: int) -> str:
        """The id of an event in a stream."""
        return f"{self.session_id}-{number}"

    def number_of(self, event_id: str) -> int:
        """The number in the last id that a client saw. Raises EventsMissedError for an id of another session."""
        session, _, number = event_id.rpartition("-")
        if session != self.session_id or not number.isascii() or not number.isdigit() or len(number) > 18:
            raise EventsMissedError("that was another session")
        return int(number)

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """Calls ``wake`` after each event until the returned function is called. It must be quick and never raise."""
        self._wakes.add(wake)
        return lambda: self._wakes.discard(wake)

    @property
    def listeners(self) -> int:
        """The number of listeners."""
        return len(self._wakes)


class EventReader:
    """One reader's position in the log. ``jobs`` are those whose events it gets, None for all events."""

    def __init__(self, log: EventLog, jobs: frozenset[str] | None, last_event_id: str | None = None) -> None:
        """Starts after ``last_event_id``, or after the newest event. Raises EventsMissedError."""
        self._log = log
        self._jobs = jobs
        self._position = log.newest if last_event_id is None else log.number_of(last_event_id)
        log.after(self._position)

    @property
    def last_event_id(self) -> str:
        """The id of the last event that was taken or skipped."""
        return self._log.event_id(self._position)

    def take(self) -> list[SessionEvent]:
        """The next events; none when all have been taken. Raises EventsMissedError."""
        while events := self._log.after(self._position):
            self._position = events[-1].number
            wanted = [event for event in events if self._jobs is None or event.job_id in self._jobs]
            if wanted:
                return wanted
        return []
