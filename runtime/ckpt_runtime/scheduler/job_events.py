"""Everything that can happen to a job: the only input type of the job machine. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.scheduler.restart_strategies import RestartStrategy


@dataclass(frozen=True, slots=True)
class FailureInfo:
    """Describes a failure: ``exception`` is a class name, ``message`` one line, ``stack_trace`` the full text."""

    exception: str
    message: str
    stack_trace: str = ""


# --- requests of users and of the dispatcher


@dataclass(frozen=True, slots=True)
class Start:
    """The plan is stored; run the job."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A user requested to cancel the job."""


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """This driver stops or lost its lease; another one will continue the job."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Stop with savepoint. With ``drain``, end-of-data passes through the job before the savepoint."""

    request_id: str
    drain: bool = False
    target_directory: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.NATIVE


@dataclass(frozen=True, slots=True)
class RedeployRequested:
    """Restart with another plan (FLIP-530), without ``at_once`` at the next deployment, whatever its reason."""

    subtasks: tuple[SubtaskKey, ...]
    at_once: bool = True


@dataclass(frozen=True, slots=True)
class RestartStrategyReplaced:
    """From the next failure on, another strategy decides, with the history of the current one (FLIP-530)."""

    strategy: RestartStrategy


# --- answers


@dataclass(frozen=True, slots=True)
class SlotsAcquired:
    """Answers AcquireSlots: the slots are available."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SlotsFailed:
    """Answers AcquireSlots: not enough slots became available."""

    attempt: int
    cause: FailureInfo


@dataclass(frozen=True, slots=True)
class StateRestored:
    """Answers RestoreState: it is known what each subtask starts from."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StateRestoreFailed:
    """Answers RestoreState. ``recoverable`` is false if a retry cannot help (the state does not fit)."""

    attempt: int
    cause: FailureInfo
    recoverable: bool = True


@dataclass(frozen=True, slots=True)
class SavepointCompleted:
    """Answers TriggerSavepoint."""

    request_id: str
    location: str


@dataclass(frozen=True, slots=True)
class SavepointFailed:
    """Answers TriggerSavepoint. ``reached_tasks``: sources may have stopped already."""

    request_id: str
    message: str
    reached_tasks: bool = False


@dataclass(frozen=True, slots=True)
class RestartTimerFired:
    """Answers ScheduleRestart. Stale generations are ignored."""

    generation: int


# --- messages of tasks


@dataclass(frozen=True, slots=True)
class TaskRunning:
    """The subtask has restored its state and processes data."""

    execution: ExecutionId


@dataclass(frozen=True, slots=True)
class TaskFinished:
    """The subtask ended by itself after completing its work."""

    execution: ExecutionId


@dataclass(frozen=True, slots=True)
class TaskCanceled:
    """The subtask ended because it was cancelled."""

    execution: ExecutionId


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The subtask failed, could not be deployed, or its slot is lost."""

    execution: ExecutionId
    cause: FailureInfo


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Something other than a task failed. ``failed_checkpoints``: how often their limit was exceeded, else 0."""

    cause: FailureInfo
    recoverable: bool = True
    failed_checkpoints: int = 0


JobEvent = (
    Start
    | CancelRequested
    | SuspendRequested
    | StopRequested
    | RedeployRequested
    | RestartStrategyReplaced
    | SlotsAcquired
    | SlotsFailed
    | StateRestored
    | StateRestoreFailed
    | SavepointCompleted
    | SavepointFailed
    | RestartTimerFired
    | TaskRunning
    | TaskFinished
    | TaskCanceled
    | TaskFailed
    | JobFailed
)
