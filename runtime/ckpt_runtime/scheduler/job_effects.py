"""The effects that a job machine requests from its shell: its only output type. Values only.

The shell starts effects in the order given; the docstring names the event that answers, if one does.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.job_status import JobStatus


@dataclass(frozen=True, slots=True)
class StatusChanged:
    """The job's status as users see it; ``cause`` is set after a failure. Precedes the effects of the change."""

    status: JobStatus
    timestamp: int
    cause: FailureInfo | None = None


@dataclass(frozen=True, slots=True)
class AcquireSlots:
    """Make sure that all slots are alive. Answer: SlotsAcquired or SlotsFailed."""

    attempt: int


@dataclass(frozen=True, slots=True)
class RestoreState:
    """Ask the coordinator for the snapshot and assign its state. Answer: StateRestored or StateRestoreFailed."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Deploy:
    """Start these subtasks. Each answers TaskRunning, and later one of TaskFinished, TaskCanceled, TaskFailed."""

    executions: tuple[ExecutionId, ...]


@dataclass(frozen=True, slots=True)
class CancelTasks:
    """Cancel these subtasks. Each answers TaskCanceled, or TaskFinished or TaskFailed if that happened first."""

    executions: tuple[ExecutionId, ...]


@dataclass(frozen=True, slots=True)
class AllTasksRunning:
    """For the checkpoint coordinator (JobRunning): all tasks run or have finished already."""

    executions: tuple[ExecutionId, ...]
    finished: frozenset[ExecutionId]


@dataclass(frozen=True, slots=True)
class TasksLeaveRunning:
    """For the checkpoint coordinator (TasksLeftRunning)."""


@dataclass(frozen=True, slots=True)
class StopPeriodicTrigger:
    """For the checkpoint coordinator (PeriodicTriggerStopped)."""


@dataclass(frozen=True, slots=True)
class StartPeriodicTrigger:
    """For the checkpoint coordinator (PeriodicTriggerStarted)."""


@dataclass(frozen=True, slots=True)
class TriggerSavepoint:
    """For the coordinator: a synchronous savepoint. Answer: SavepointCompleted or SavepointFailed."""

    request_id: str
    drain: bool
    target_directory: str | None
    savepoint_format: SavepointFormat


@dataclass(frozen=True, slots=True)
class StopCompleted:
    """Answer a stop with savepoint: all tasks have finished after it."""

    request_id: str
    location: str


@dataclass(frozen=True, slots=True)
class StopFailed:
    """Answer a stop with savepoint: it failed, or (with ``location``) the job did not finish after it."""

    request_id: str
    message: str
    location: str | None = None


@dataclass(frozen=True, slots=True)
class ScheduleRestart:
    """Answer with RestartTimerFired(generation) at ``at_rel_ms``."""

    generation: int
    at_rel_ms: int


@dataclass(frozen=True, slots=True)
class CancelRestart:
    """Cancel the restart timer."""


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The last effect: shut the checkpoint coordinator down (Shutdown), store the result, release the slots."""

    status: JobStatus
    timestamp: int
    cause: FailureInfo | None = None
    savepoint: str | None = None


JobEffect = (
    StatusChanged
    | AcquireSlots
    | RestoreState
    | Deploy
    | CancelTasks
    | AllTasksRunning
    | TasksLeaveRunning
    | StopPeriodicTrigger
    | StartPeriodicTrigger
    | TriggerSavepoint
    | StopCompleted
    | StopFailed
    | ScheduleRestart
    | CancelRestart
    | JobEnded
)
