"""The events of a session, for event streams: a ring of the newest ones, numbered from 1; and each job's publisher.

Each reader keeps its own position, so a slow reader delays no other reader. If the ring has dropped
events that a reader has not read yet, it gets EventsMissedError. All methods run on the driver's loop.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ckpt_runtime.checkpoint.statistics import CheckpointStats, CheckpointStatsStatus
from ckpt_runtime.failure_report import log_failure, name_of, printable
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import OperationKind, OperationStatus
from ckpt_runtime.scheduler.core_events import DeployTasks, JobOutput, RecordFailure
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_effects import StatusChanged
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.structured_log import fields

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
        self.newest = 0
        """The number of the last event, 0 before the first."""
        self._wakes: set[Callable[[], None]] = set()

    def publish(self, kind: EventType, job_id: str | None, data: Mapping[str, Any]) -> None:
        self.newest += 1
        self._ring.append(SessionEvent(self.newest, kind, job_id, data))
        for wake in tuple(self._wakes):
            wake()

    def after(self, number: int) -> list[SessionEvent]:
        """The events after number ``number``, at most one batch. Raises EventsMissedError."""
        first = number + len(self._ring) - self.newest
        if not 0 <= first <= len(self._ring):
            raise EventsMissedError(f"event {number + 1} is no longer kept")
        return [self._ring[place] for place in range(first, min(first + BATCH, len(self._ring)))]

    def event_id(self, number: int) -> str:
        """The id of an event in a stream."""
        return f"{self.session_id}-{number}"

    def number_of(self, event_id: str) -> int:
        """The number in the last id that a client saw. Raises EventsMissedError for an id of another session."""
        session, _, number = event_id.rpartition("-")
        if session != self.session_id or not number.isascii() or not number.isdigit() or len(number) > 18:
            raise EventsMissedError("the id belongs to another session")
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
    """One reader's position in the log. It gets the events of ``jobs``, or all events if None."""

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


logger = logging.getLogger(__name__)

Publish = Callable[[EventType, str | None, Mapping[str, Any]], None]
_MAX_MESSAGE_CHARS = 1_024

_CHECKPOINT = {
    CheckpointStatsStatus.IN_PROGRESS: EventType.CHECKPOINT_TRIGGERED,
    CheckpointStatsStatus.COMPLETED: EventType.CHECKPOINT_COMPLETED,
    CheckpointStatsStatus.FAILED: EventType.CHECKPOINT_FAILED,
}
_SAVEPOINT = {
    CheckpointStatsStatus.IN_PROGRESS: EventType.SAVEPOINT_TRIGGERED,
    CheckpointStatsStatus.COMPLETED: EventType.SAVEPOINT_COMPLETED,
    CheckpointStatsStatus.FAILED: EventType.SAVEPOINT_FAILED,
}


class JobAnnouncer:
    """Publishes the events of one job under one driver, and logs its failed checkpoints. It only observes.

    The job's shell passes it every output and, after each event, its core. With ``publish`` None it publishes nothing.
    ``failed_reports`` counts the events and other reports that could not be made.
    """

    def __init__(self, job_id: str, publish: Publish | None = None) -> None:
        self.failed_reports = 0
        self._job_id = job_id
        self._publish = publish
        self._state: JobState | None = None
        self._known_failures: set[str] = set()

    def report(self, call: Callable[..., object], *arguments: Any) -> None:
        """Makes a report for users. A failure is counted, and logged once for each kind; the job continues."""
        try:
            call(*arguments)
        except Exception as error:
            self.failed_reports += 1
            name = f"{name_of(call)}, {type(error).__name__}"
            if name not in self._known_failures:
                self._known_failures.add(name)
                log_failure(logger, logging.ERROR, f"job {self._job_id}: the report {name} failed", error)

    def _tell(self, kind: EventType, **data: Any) -> None:
        if self._publish is not None:
            self._publish(kind, self._job_id, {"jobid": self._job_id, "timestamp": wall_clock_ms(), **data})

    # --- what the core decides

    def announce(self, output: JobOutput) -> None:
        """Publishes an output that is already executed, so that REST shows its effect."""
        self.report(self._announce, output)

    def _announce(self, output: JobOutput) -> None:
        match output:
            case StatusChanged():
                self._tell(EventType.JOB_STATUS, status=output.status.value, cause=_cause(output.cause))
            case DeployTasks():
                restored = None if output.restored is None else output.restored.checkpoint_id
                self._tell(EventType.DEPLOYMENT, attempt=output.attempt, restored_checkpoint=restored)
            case RecordFailure():
                execution = output.execution
                task = None if execution is None else {"vertex": execution.vertex_id, "subtask": execution.subtask}
                self._tell(EventType.FAILURE, cause=_cause(output.cause), task=task, concurrent=output.concurrent)

    # --- what has changed in the core

    def begin(self, core: JobCore) -> None:
        """Treats the core's present values as already announced."""
        self._state = core.machine.state
        self._plan, self._overrides = core.accepted_plan, core.overrides

    def looked(self, core: JobCore) -> None:
        """Publishes the changes of the core after an event."""
        self.report(self._looked, core)

    def _looked(self, core: JobCore) -> None:
        state, self._state = self._state, core.machine.state
        if state is JobState.DEPLOYING and self._state is JobState.RUNNING:
            self._tell(EventType.TASKS_RUNNING, attempt=core.machine.attempt)
        if core.accepted_plan is not self._plan:
            before, self._plan = self._plan, core.accepted_plan
            self._plan_changed(before, self._plan)
        if core.overrides is not self._overrides:
            overrides, self._overrides = self._overrides, core.overrides
            if overrides != self._overrides:
                self._tell(EventType.CHECKPOINT_CONFIGURATION, overrides=self._overrides.request_fields)

    def _plan_changed(self, before: JobPlan, after: JobPlan) -> None:
        if after.own.version != before.own.version:
            note = after.own.notes[-1] if after.own.notes else None
            changed = () if note is None or note.version != after.own.version else note.options
            self._tell(EventType.CONFIGURATION, version=after.own.version, options=list(changed))
        parallelism = _parallelism(after)
        if parallelism != _parallelism(before):
            self._tell(EventType.RESCALE, parallelism=parallelism)

    # --- checkpoints

    def checkpoint(self, stats: CheckpointStats) -> None:
        """Publishes a checkpoint that was triggered or has ended; called by the job's statistics."""
        self.report(self._checkpoint, stats)

    def _checkpoint(self, stats: CheckpointStats) -> None:
        data: dict[str, Any] = {"id": stats.id, "checkpoint_type": stats.checkpoint_type.value}
        data["trigger_timestamp"] = stats.trigger_timestamp
        if stats.status is CheckpointStatsStatus.COMPLETED:
            data |= {
                "external_path": stats.external_path,
                "end_to_end_duration": stats.end_to_end_duration,
                "state_size": stats.state_size,
                "checkpointed_size": stats.checkpointed_size,
            }
        elif stats.status is CheckpointStatsStatus.FAILED:
            data["failure_message"] = _short(stats.failure_message or "")
            logger.warning(
                "%s %d of job %s failed: %s",
                "savepoint" if stats.is_savepoint else "checkpoint",
                stats.id,
                self._job_id,
                data["failure_message"],
                extra=fields(job_id=self._job_id, checkpoint_id=stats.id),
            )
        self._tell((_SAVEPOINT if stats.is_savepoint else _CHECKPOINT)[stats.status], **data)


def operation_ended(
    publish: Publish, kind: OperationKind, job_id: str | None, trigger_id: str, status: OperationStatus
) -> None:
    """Publishes that a triggered operation has ended and can be polled for its outcome."""
    data: dict[str, Any] = {"jobid": job_id, "timestamp": wall_clock_ms(), "operation": kind.value}
    data |= {"request-id": trigger_id, "status": "COMPLETED" if status.failure is None else "FAILED"}
    if status.failure is not None:
        data["failure_message"] = _short(status.failure.message)
    elif status.location is not None:
        data["location"] = status.location
    elif status.checkpoint_id is not None:
        data["id"] = status.checkpoint_id
    publish(EventType.OPERATION, job_id, data)


def _parallelism(plan: JobPlan) -> dict[str, int]:
    return {vertex.id: vertex.parallelism for vertex in plan.graph.vertices}


def _short(text: str) -> str:
    return printable(text, _MAX_MESSAGE_CHARS)


def _cause(cause: FailureInfo | None) -> dict[str, str] | None:
    return None if cause is None else {"exception": cause.exception, "message": _short(cause.message)}
