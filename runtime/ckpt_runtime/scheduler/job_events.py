"""Everything that can happen to a job: the one input type of the job machine. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.scheduler.restart_strategies import RestartStrategy


@dataclass(frozen=True, slots=True)
class FailureInfo:
    """``exception`` is a class name, ``message`` one line, ``stack_trace`` the whole text."""

    exception: str
    message: str
    stack_trace: str = ""


# --- wishes of users and of the dispatcher


@dataclass(frozen=True, slots=True)
class Start:
    """The plan is stored; run the job."""


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A user wants the job to end now."""


@dataclass(frozen=True, slots=True)
class SuspendRequested:
    """This driver stops or lost its lease; another one will go on with the job."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Stop with savepoint. With ``drain`` the end of data flows through before it."""

    request_id: str
    drain: bool = False
    target_directory: str | None = None
    savepoint_format: SavepointFormat = SavepointFormat.NATIVE


@dataclass(frozen=True, slots=True)
class RedeployRequested:
    """Restart with another plan or configuration (FLIP-530), the restart strategy not asked.

    Without ``at_once`` a present deployment goes on, and the next one, whatever it comes for, is of these subtasks.
    """

    subtasks: tuple[SubtaskKey, ...]
    at_once: bool = True


@dataclass(frozen=True, slots=True)
class RestartStrategyReplaced:
    """From the next failure on another strategy decides, on the history of the present one (FLIP-530)."""

    strategy: RestartStrategy


# --- answers


@dataclass(frozen=True, slots=True)
class SlotsAcquired:
    """Answers AcquireSlots: the slots are there."""

    attempt: int


@dataclass(frozen=True, slots=True)
class SlotsFailed:
    """Answers AcquireSlots: not enough of them came."""

    attempt: int
    cause: FailureInfo


@dataclass(frozen=True, slots=True)
class StateRestored:
    """Answers RestoreState: it is known what each subtask starts from."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StateRestoreFailed:
    """Answers RestoreState. ``recoverable`` is false when trying again cannot help (the state does not fit)."""

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
    """The subtask ended by itself, with everything done."""

    execution: ExecutionId


@dataclass(frozen=True, slots=True)
class TaskCanceled:
    """The subtask ended because it was told to."""

    execution: ExecutionId


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """The subtask failed, could not be deployed, or its slot is lost."""

    execution: ExecutionId
    cause: FailureInfo


@dataclass(frozen=True, slots=True)
class JobFailed:
    """Something failed that is no task, such as too many checkpoints.

    ``failed_checkpoints`` is how often these have been too many since one completed, 0 when it is something else.
    """

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
