"""The messages between the driver and its workers: one union of types and one :class:`MessageDecoder` per direction."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ckpt_runtime.checkpoint.completed_checkpoint import SubtaskState, check_state
from ckpt_runtime.checkpoint.executions import SubtaskKey, TaskState
from ckpt_runtime.checkpoint.measures import Intervals
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason, CheckpointOptions
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.graph.schema import DocumentError, NonNegative
from ckpt_runtime.network.agent_messages import ProcessIdentity
from ckpt_runtime.network.connections import Message, MessageDecoder
from ckpt_runtime.process_figures import ProcessFigures
from ckpt_runtime.processes.thread_dump import ThreadInfo
from ckpt_runtime.scheduler.deployment import Deployment, JobDescriptor
from ckpt_runtime.scheduler.job_events import FailureInfo

Duration = Annotated[float, Meta(ge=0, le=1e18)]
"""Milliseconds; neither infinite nor NaN, which cannot be converted to an integer."""

EventTime = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""Milliseconds since the epoch."""

Rate = Annotated[float, Meta(ge=0, le=1e18)]

Share = Annotated[float, Meta(ge=0, le=1)]

StateMetrics = Annotated[dict[str, NonNegative], Meta(max_length=1000)]
"""Metrics that state backends report, by operator and name."""


# --- driver to worker


class DeploySubtasks(Message, frozen=True):
    """Deploys subtasks. ``job`` is sent again when it has changed, the program's files in ``archive`` only once."""

    deployment: Deployment
    job: JobDescriptor | None = None
    archive: bytes | None = None


class CancelDeployment(Message, frozen=True):
    """Ends all subtasks of the deployment."""

    deployment: int


class TriggerCheckpoint(Message, frozen=True):
    """Makes the ``tasks`` send barriers and take snapshots."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative
    timestamp: int
    options: CheckpointOptions


class NotifyCheckpointComplete(Message, frozen=True):
    """The checkpoint is complete: the ``tasks`` may commit what belongs to it."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative


class NotifyCheckpointAborted(Message, frozen=True):
    """The checkpoint was aborted; ``latest_completed`` replaces a lost notification of its completion."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative
    latest_completed: NonNegative | None


class AlignSources(Message, frozen=True):
    """Sends the event time, in ms since the epoch, of the slowest source in the alignment group of the ``tasks``."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    minimum: EventTime


class LimitSources(Message, frozen=True):
    """Limits the rows per second of sources, by uid, over all of their subtasks. Other sources have no limit."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    rates: dict[str, Rate]


class FollowAgent(Message, frozen=True):
    """Another agent adopts the worker, which from now on ends when that agent ends."""

    agent: ProcessIdentity


class DumpThreads(Message, frozen=True):
    """Asks for the stacks of the worker's threads."""

    question: NonNegative


class ReadLog(Message, frozen=True):
    """Asks for the last lines of the worker's log."""

    question: NonNegative


class SampleStacks(Message, frozen=True):
    """Requests ``samples`` stack samples, one every ``interval_ms``, of each subtask of a vertex."""

    question: NonNegative
    job_id: str
    vertex_id: str
    samples: Annotated[int, Meta(ge=1, le=1000)] = 100
    interval_ms: Annotated[int, Meta(ge=1, le=1000)] = 50


class SparkAddress(Message, frozen=True):
    """Answers :class:`SparkWanted`: the URL of the session's Spark with its token, or the reason why there is none."""

    url: str
    error: str = ""


WorkerQuestion = DumpThreads | ReadLog | SampleStacks
"""Questions about the process. No task thread is needed for the answers, so a stuck task does not prevent them."""

WorkerCommand = (
    DeploySubtasks
    | CancelDeployment
    | TriggerCheckpoint
    | NotifyCheckpointComplete
    | NotifyCheckpointAborted
    | AlignSources
    | LimitSources
    | FollowAgent
    | SparkAddress
    | WorkerQuestion
)


# --- worker to driver


class TaskFailure(Struct, frozen=True):
    """``recoverable`` is false if a retry would meet the same error; a ``consequence`` was most probably caused by
    the end of another worker."""

    cause: FailureInfo
    recoverable: bool = True
    consequence: bool = False


class SubtaskMeasures(Struct, frozen=True):
    """The totals of a subtask since its deployment.

    ``measured_ms`` is the time of the measurement, by a monotonic clock of the worker. ``work_waits`` is true while the
    subtask has something to process or send, ``backpressured`` while it cannot send; ``slices`` grows with each
    processed piece of a buffer. ``operator_rows`` counts the rows that each operator of the chain has emitted.
    ``alignment_ms`` and ``start_delay_ms`` are those of the last checkpoint. The usages are shares of the input buffers
    and of the output channels; ``queued_elements`` is the number of elements in the input queues, ``pending_rows`` the
    number of unread rows of a source, if known. ``alignment_drift_ms`` is how far a source is ahead of its alignment
    group.
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
    bad_rows_dropped: NonNegative = 0
    slices: NonNegative = 0
    work_waits: bool = False
    backpressured: bool = False
    debloated_buffer_size: NonNegative | None = None
    state: StateMetrics = {}
    operator_rows: Annotated[tuple[NonNegative, ...], Meta(max_length=1000)] = ()
    input_watermark: int | None = None
    output_watermark: int | None = None
    queued_elements: NonNegative = 0
    input_usage: Share = 0.0
    output_usage: Share = 0.0
    alignment_ms: NonNegative | None = None
    start_delay_ms: NonNegative | None = None
    pending_rows: NonNegative | None = None
    alignment_drift_ms: NonNegative | None = None


class SnapshotProgress(Struct, frozen=True):
    """The part of a subtask's snapshot that is in storage so far, written and duplicated."""

    vertex_id: str
    subtask: NonNegative
    checkpoint_id: NonNegative
    written_size: NonNegative
    duplicated_size: NonNegative


class Following(Message, frozen=True):
    """Answers :class:`FollowAgent`."""


class WorkerHeartbeat(Message, frozen=True):
    """Reports that a worker is alive. ``deployment`` is -1 while there is none."""

    deployment: int
    tasks: tuple[SubtaskMeasures, ...] = ()
    snapshots: tuple[SnapshotProgress, ...] = ()
    process: ProcessFigures | None = None


class ThreadDump(Message, frozen=True):
    """Answers :class:`DumpThreads`."""

    question: NonNegative
    threads: tuple[ThreadInfo, ...]


class RecentLog(Message, frozen=True):
    """Answers :class:`ReadLog`."""

    question: NonNegative
    text: str


class SampledStack(Struct, frozen=True):
    """A stack of frames, outermost first, and how often a subtask was in it: on a processor, or waiting."""

    subtask: NonNegative
    frames: tuple[str, ...]
    on_cpu: NonNegative
    off_cpu: NonNegative


class SampledStacks(Message, frozen=True):
    """Answers :class:`SampleStacks`; without stacks if the worker does not run the job."""

    question: NonNegative
    stacks: tuple[SampledStack, ...]


WorkerAnswer = ThreadDump | RecentLog | SampledStacks


class DeploymentFailed(Message, frozen=True):
    """The deployment failed before any of its subtasks started."""

    deployment: int
    failure: TaskFailure


class SparkWanted(Message, frozen=True):
    """A sink of the deployment calls a function with frames of the session's Spark, which is started on first use."""

    deployment: int


class Canceled(Message, frozen=True):
    """Answers :class:`CancelDeployment`. If threads have not ``ended`` in time, the process has to be replaced."""

    deployment: int
    ended: bool


class TaskStateChanged(Message, frozen=True):
    """The state of a subtask has changed; ``failure`` is the cause if it FAILED.

    ``intervals`` are the measures of one that is FINISHED which no completed checkpoint has reported.
    """

    deployment: int
    vertex_id: str
    subtask: NonNegative
    state: TaskState
    failure: TaskFailure | None = None
    intervals: Intervals = ()

    def __post_init__(self) -> None:
        """Checks that a failed task has a cause."""
        if self.state is TaskState.FAILED and self.failure is None:
            raise DocumentError("a failed task does not name its failure")


class EndOfDataReport(Message, frozen=True):
    """The subtask has no more data. It ends after its inputs and, if it ``waits``, after its final checkpoint."""

    deployment: int
    vertex_id: str
    subtask: NonNegative
    waits: bool = True


class AcknowledgeCheckpoint(Message, frozen=True):
    """``directory`` is the one that the trigger named, since the same number may have been used twice.

    ``intervals`` are the measures that this checkpoint may have to report: see ``checkpoint/measures.py``.
    """

    deployment: int
    vertex_id: str
    subtask: NonNegative
    checkpoint_id: NonNegative
    directory: str
    state: SubtaskState
    metrics: CheckpointMetrics
    intervals: Intervals = ()

    def __post_init__(self) -> None:
        """Validates at the sender: an error here fails one checkpoint, while one at the receiver costs the worker."""
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
        """Checks the reason, because unknown ones cannot be counted."""
        if self.reason not in CheckpointFailureReason.__members__:
            raise DocumentError(f"{self.reason!r} is not a reason to decline a checkpoint")


class SourceProgress(Message, frozen=True):
    """The progress of the rows of an aligned source. The others of its group do not wait for an ``idle`` one.

    ``wants_checkpoint``: it waits for a checkpoint that covers what it has sent.
    """

    deployment: int
    vertex_id: str
    subtask: NonNegative
    event_time: EventTime | None
    idle: bool
    wants_checkpoint: bool = False


TaskMessage = TaskStateChanged | EndOfDataReport | SourceProgress | AcknowledgeCheckpoint | DeclineCheckpoint
"""Messages about one subtask."""

DeploymentMessage = WorkerHeartbeat | DeploymentFailed | Canceled | SparkWanted | TaskMessage
"""Messages about one deployment, which go to the job that holds the worker."""

WorkerMessage = Following | WorkerAnswer | DeploymentMessage

FROM_WORKER: MessageDecoder[WorkerMessage] = MessageDecoder("a worker", WorkerMessage)
TO_WORKER: MessageDecoder[WorkerCommand] = MessageDecoder("the driver", WorkerCommand)
