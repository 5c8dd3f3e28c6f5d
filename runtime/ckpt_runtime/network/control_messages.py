"""What the driver and its workers say to each other: one union of types for each direction, and its door."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ckpt_runtime.checkpoint.executions import SubtaskKey, TaskState
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason
from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.checkpoint.state_handles import SubtaskState, check_state
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.graph.schema import DocumentError, NonNegative
from ckpt_runtime.network.agent_messages import ProcessIdentity
from ckpt_runtime.network.listeners import Door, Message
from ckpt_runtime.scheduler.deployment import Deployment, JobDescriptor
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.thread_dump import ThreadInfo

Duration = Annotated[float, Meta(ge=0, le=1e18)]
"""Milliseconds; neither infinite nor NaN, which no integer could be made of."""

StateMetrics = Annotated[dict[str, NonNegative], Meta(max_length=1000)]
"""What state backends say of themselves, by operator and name."""


# --- driver to worker


class DeploySubtasks(Message, frozen=True):
    """A worker gets ``job`` again when it has changed, and the program's files in ``archive`` once."""

    deployment: Deployment
    job: JobDescriptor | None = None
    archive: bytes | None = None


class CancelDeployment(Message, frozen=True):
    """End what runs of the deployment."""

    deployment: int


class TriggerCheckpoint(Message, frozen=True):
    """The ``tasks`` send a barrier, and take their snapshots."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative
    timestamp: int
    options: CheckpointOptions


class NotifyCheckpointComplete(Message, frozen=True):
    """The ``tasks`` may commit what belongs to it."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative


class NotifyCheckpointAborted(Message, frozen=True):
    """``latest_completed`` makes up for a lost notification of that one."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative
    latest_completed: NonNegative | None


class FollowAgent(Message, frozen=True):
    """Another agent adopts the worker: end with that one from now on."""

    agent: ProcessIdentity


class DumpThreads(Message, frozen=True):
    """What do the threads of the worker do?"""

    question: NonNegative


class ReadLog(Message, frozen=True):
    """What are the last lines of the worker's log?"""

    question: NonNegative


class SampleStacks(Message, frozen=True):
    """In which code is the thread of each subtask of a vertex? Looks ``samples`` times, every ``interval_ms``."""

    question: NonNegative
    job_id: str
    vertex_id: str
    samples: Annotated[int, Meta(ge=1, le=1000)] = 100
    interval_ms: Annotated[int, Meta(ge=1, le=1000)] = 50


WorkerQuestion = DumpThreads | ReadLog | SampleStacks
"""About the process. The thread that receives them sees to the answers: a stuck task does not keep it from that."""

WorkerCommand = (
    DeploySubtasks
    | CancelDeployment
    | TriggerCheckpoint
    | NotifyCheckpointComplete
    | NotifyCheckpointAborted
    | FollowAgent
    | WorkerQuestion
)


# --- worker to driver


class TaskFailure(Struct, frozen=True):
    """``recoverable`` is false where trying again meets the same error; a ``consequence`` is most probably one of
    another worker's end."""

    cause: FailureInfo
    recoverable: bool = True
    consequence: bool = False


class SubtaskMeasures(Struct, frozen=True):
    """What a subtask has done since it was deployed.

    ``measured_ms`` is when that was, by a monotonic clock of the worker. ``work_waits`` while there is something to
    do or to send, and ``backpressured`` if it cannot send; ``slices`` grows with each piece of a buffer that it has
    worked off.
    """

    vertex_id: str
    subtask: NonNegative
    rows_in: NonNegative
    bytes_in: NonNegative
    rows_out: NonNegative
    bytes_out: NonNegative
    late_rows_dropped: NonNegative
    busy_ms: Duration
    idle_ms: Duration
    backpressured_ms: Duration
    measured_ms: Duration = 0.0
    slices: NonNegative = 0
    work_waits: bool = False
    backpressured: bool = False
    debloated_buffer_size: NonNegative | None = None
    state: StateMetrics = {}


class SnapshotProgress(Struct, frozen=True):
    """How much of a subtask's snapshot is in storage by now, written and duplicated."""

    vertex_id: str
    subtask: NonNegative
    checkpoint_id: NonNegative
    written_size: NonNegative
    duplicated_size: NonNegative


class Following(Message, frozen=True):
    """Answers :class:`FollowAgent`."""


class WorkerHeartbeat(Message, frozen=True):
    """``deployment`` is -1 while there is none."""

    deployment: int
    tasks: tuple[SubtaskMeasures, ...] = ()
    snapshots: tuple[SnapshotProgress, ...] = ()


class ThreadDump(Message, frozen=True):
    """Answers :class:`DumpThreads`."""

    question: NonNegative
    threads: tuple[ThreadInfo, ...]


class RecentLog(Message, frozen=True):
    """Answers :class:`ReadLog`."""

    question: NonNegative
    text: str


class SampledStack(Struct, frozen=True):
    """A stack of frames, outermost first, and how often a subtask was seen in it: on a processor, or waiting."""

    subtask: NonNegative
    frames: tuple[str, ...]
    on_cpu: NonNegative
    off_cpu: NonNegative


class SampledStacks(Message, frozen=True):
    """Answers :class:`SampleStacks`; without any if the worker does not run the job."""

    question: NonNegative
    stacks: tuple[SampledStack, ...]


WorkerAnswer = ThreadDump | RecentLog | SampledStacks


class DeploymentFailed(Message, frozen=True):
    """None of its subtasks has begun."""

    deployment: int
    failure: TaskFailure


class Canceled(Message, frozen=True):
    """Answers :class:`CancelDeployment`. Threads that have not ``ended`` in time need another process."""

    deployment: int
    ended: bool


class TaskStateChanged(Message, frozen=True):
    """``failure`` says why, of one that FAILED."""

    deployment: int
    vertex_id: str
    subtask: NonNegative
    state: TaskState
    failure: TaskFailure | None = None

    def __post_init__(self) -> None:
        """A failed task has a cause."""
        if self.state is TaskState.FAILED and self.failure is None:
            raise DocumentError("a task that failed names no failure")


class EndOfDataReport(Message, frozen=True):
    """The subtask has no more data. It ends behind its inputs, if it ``waits`` not before its final checkpoint."""

    deployment: int
    vertex_id: str
    subtask: NonNegative
    waits: bool = True


class AcknowledgeCheckpoint(Message, frozen=True):
    """``directory`` is the one that the trigger named: the same number may have been given twice."""

    deployment: int
    vertex_id: str
    subtask: NonNegative
    checkpoint_id: NonNegative
    directory: str
    state: SubtaskState
    metrics: CheckpointMetrics

    def __post_init__(self) -> None:
        """Here already at the sender, where it costs one checkpoint instead of the worker."""
        check_state(self.state, "the state")


class DeclineCheckpoint(Message, frozen=True):
    """``reason`` is the name of a ``CheckpointFailureReason``."""

    deployment: int
    vertex_id: str
    subtask: NonNegative
    checkpoint_id: NonNegative
    reason: str
    message: str

    def __post_init__(self) -> None:
        """Others cannot be counted."""
        if self.reason not in CheckpointFailureReason.__members__:
            raise DocumentError(f"there is no reason {self.reason!r} to decline a checkpoint")


TaskMessage = TaskStateChanged | EndOfDataReport | AcknowledgeCheckpoint | DeclineCheckpoint
"""Of one subtask."""

DeploymentMessage = WorkerHeartbeat | DeploymentFailed | Canceled | TaskMessage
"""Of one deployment: what the job that holds the worker gets."""

WorkerMessage = Following | WorkerAnswer | DeploymentMessage

FROM_WORKER: Door[WorkerMessage] = Door("a worker", WorkerMessage)
TO_WORKER: Door[WorkerCommand] = Door("the driver", WorkerCommand)
