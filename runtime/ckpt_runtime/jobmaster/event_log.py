"""What has happened in a session, for streams of events: a ring of the newest ones, numbered from 1. Pure.

Whoever reads keeps a position of its own, so that a reader that is slow costs nothing and holds nobody back: what the
ring has dropped meanwhile it has missed, and is told so. All methods belong to the driver's loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

DEFAULT_CAPACITY = 4_096
BATCH = 256
"""Events that a reader is given at a time."""


class EventType(StrEnum):
    """What can happen, as streams spell it."""

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
    """``data`` are JSON values. ``job_id`` is None for what belongs to no job."""

    number: int
    type: EventType
    job_id: str | None
    data: Mapping[str, Any]


class EventsMissedError(Exception):
    """Events that a reader should have had are not kept any more, or are another session's."""


class EventLog:
    """Of one driver; ``session_id`` tells it from every other one."""

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
        """The events behind that one, as many as fit into a batch. Raises EventsMissedError."""
        first = number + len(self._ring) - self._newest
        if not 0 <= first <= len(self._ring):
            raise EventsMissedError(f"event {number + 1} is not kept any more")
        return [self._ring[place] for place in range(first, min(first + BATCH, len(self._ring)))]

    def event_id(self, number: int) -> str:
        """The id of an event in a stream."""
        return f"{self.session_id}-{number}"

    def number_of(self, event_id: str) -> int:
        """The number in an id that a client has seen last. Raises EventsMissedError for one of another session."""
        session, _, number = event_id.rpartition("-")
        if session != self.session_id or not number.isascii() or not number.isdigit() or len(number) > 18:
            raise EventsMissedError("that was another session")
        return int(number)

    def listen(self, wake: Callable[[], None]) -> Callable[[], None]:
        """``wake`` is called after each event, until what is returned is called. It must be quick and never raise."""
        self._wakes.add(wake)
        return lambda: self._wakes.discard(wake)

    @property
    def listeners(self) -> int:
        """How many listen."""
        return len(self._wakes)


class EventReader:
    """One reader's place in the log. ``jobs`` are those it wants to hear of, None for everything."""

    def __init__(self, log: EventLog, jobs: frozenset[str] | None, last_event_id: str | None = None) -> None:
        """Behind ``last_event_id``, or behind the newest. Raises EventsMissedError."""
        self._log = log
        self._jobs = jobs
        self._position = log.newest if last_event_id is None else log.number_of(last_event_id)
        log.after(self._position)

    @property
    def last_event_id(self) -> str:
        """Of the last event that was taken or passed over."""
        return self._log.event_id(self._position)

    def take(self) -> list[SessionEvent]:
        """The next events; none when all have been taken. Raises EventsMissedError."""
        while events := self._log.after(self._position):
            self._position = events[-1].number
            wanted = [event for event in events if self._jobs is None or event.job_id in self._jobs]
            if wanted:
                return wanted
        return []
