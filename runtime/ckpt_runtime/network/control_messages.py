"""What the driver, its slot agents and its workers say to each other: one union of types for each direction.

Whoever receives goes through the door of its direction (:class:`Door`): what is no message of that direction, or has
another shape, is a :class:`MalformedMessageError`, which names the message and says where it is wrong. Nothing behind a
door looks at a document.

The wire form is MessagePack. It carries the archive of a program and the inline state of an acknowledgement as bytes,
which JSON would have in base64: 20 MB are encoded in 2 ms instead of 29. An acknowledgement with 3000 files takes the
same library as long in either form (2 ms to encode, 7 to decode), and a quarter less bytes in this one.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar, get_args

import msgspec
from msgspec import Meta, Struct

from ckpt_runtime.checkpoint.executions import SubtaskKey, TaskState
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason
from ckpt_runtime.checkpoint.properties import CheckpointOptions
from ckpt_runtime.checkpoint.state_handles import SubtaskState, check_state
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.failure_report import printable
from ckpt_runtime.graph.schema import DocumentError, NonNegative, malformed
from ckpt_runtime.scheduler.deployment import Deployment
from ckpt_runtime.scheduler.job_events import FailureInfo

M = TypeVar("M")

_MAX_FAULT_CHARS = 400

Port = Annotated[int, Meta(ge=1, le=65_535)]
Pid = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Duration = Annotated[float, Meta(ge=0, le=1e18)]
"""Milliseconds; neither infinite nor NaN, which no integer could be made of."""


class _Message(Struct, frozen=True, tag=True, tag_field="type"):
    """Each message names its type on the wire. Fields that a receiver does not know are left out."""


# --- registration: the first message of a connection, and never another one


class ProcessIdentity(Struct, frozen=True):
    """What another process needs to hold on to this one. ``machine`` is empty where none can."""

    machine: str
    pid: Pid
    started: NonNegative


class RegisterAgent(_Message, frozen=True):
    """A slot agent offers its slot."""

    slot: str
    stage: NonNegative
    host: str
    cpus: tuple[NonNegative, ...]
    process: ProcessIdentity


class RegisterWorker(_Message, frozen=True):
    """A worker is ready. Its temporary files are in ``directory``."""

    slot: str
    worker: str
    data_address: tuple[str, Port]
    process: ProcessIdentity
    directory: str


Registration = RegisterAgent | RegisterWorker


# --- driver to slot agent


class SpawnWorker(_Message, frozen=True):
    """Start a process, which registers under this id."""

    worker: str


class AdoptWorker(_Message, frozen=True):
    """Hold a worker that was another agent's."""

    worker: str
    process: ProcessIdentity
    directory: str


class KillWorker(_Message, frozen=True):
    """End a process at once; its exit is reported as always."""

    worker: str


class Ping(_Message, frozen=True):
    """Answered by a heartbeat."""


class Shutdown(_Message, frozen=True):
    """End, with all workers but those in ``keep``, which wait for another agent."""

    keep: tuple[str, ...] = ()


AgentCommand = SpawnWorker | AdoptWorker | KillWorker | Ping | Shutdown


# --- slot agent to driver


class AgentHeartbeat(_Message, frozen=True):
    """Answers :class:`Ping`."""


class WorkerExited(_Message, frozen=True):
    """``code`` is as Python gives it, negative for a signal; None when it is unknown, or there never was a process."""

    worker: str
    code: int | None


AgentMessage = AgentHeartbeat | WorkerExited


# --- driver to worker


class Deploy(_Message, frozen=True):
    """``archive`` has the program's files, once for each worker."""

    deployment: Deployment
    archive: bytes | None = None


class Cancel(_Message, frozen=True):
    """End what runs of the deployment."""

    deployment: int


class TriggerCheckpoint(_Message, frozen=True):
    """The ``tasks`` send a barrier, and take their snapshots."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative
    timestamp: int
    options: CheckpointOptions


class NotifyCheckpointComplete(_Message, frozen=True):
    """The ``tasks`` may commit what belongs to it."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative


class NotifyCheckpointAborted(_Message, frozen=True):
    """``latest_completed`` makes up for a lost notification of that one."""

    deployment: int
    tasks: tuple[SubtaskKey, ...]
    checkpoint_id: NonNegative
    latest_completed: NonNegative | None


class FollowAgent(_Message, frozen=True):
    """Another agent adopts the worker: end with that one from now on."""

    agent: ProcessIdentity


WorkerCommand = Deploy | Cancel | TriggerCheckpoint | NotifyCheckpointComplete | NotifyCheckpointAborted | FollowAgent


# --- worker to driver


class TaskFailure(Struct, frozen=True):
    """``recoverable`` is false where trying again meets the same error; a ``consequence`` is most probably one of
    another worker's end."""

    cause: FailureInfo
    recoverable: bool = True
    consequence: bool = False


class SubtaskMeasures(Struct, frozen=True):
    """What a subtask has done since it was deployed."""

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
    debloated_buffer_size: NonNegative | None = None


class Following(_Message, frozen=True):
    """Answers :class:`FollowAgent`."""


class WorkerHeartbeat(_Message, frozen=True):
    """``deployment`` is -1 while there is none."""

    deployment: int
    tasks: tuple[SubtaskMeasures, ...] = ()


class DeploymentFailed(_Message, frozen=True):
    """None of its subtasks has begun."""

    deployment: int
    failure: TaskFailure


class Canceled(_Message, frozen=True):
    """Answers :class:`Cancel`. Threads that have not ``ended`` in time need another process."""

    deployment: int
    ended: bool


class TaskStateChanged(_Message, frozen=True):
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


class EndOfDataReached(_Message, frozen=True):
    """The subtask has no more data and waits for its final checkpoint."""

    deployment: int
    vertex_id: str
    subtask: NonNegative


class AcknowledgeCheckpoint(_Message, frozen=True):
    """``directory`` is the one that the trigger named: the same number may have been given twice."""

    deployment: int
    vertex_id: str
    subtask: NonNegative
    checkpoint_id: NonNegative
    directory: str
    state: SubtaskState
    metrics: CheckpointMetrics
    finished_operators: bool

    def __post_init__(self) -> None:
        """Here already at the sender, where it costs one checkpoint instead of the worker."""
        check_state(self.state, "the state")


class DeclineCheckpoint(_Message, frozen=True):
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


TaskMessage = TaskStateChanged | EndOfDataReached | AcknowledgeCheckpoint | DeclineCheckpoint
"""Of one subtask."""

DeploymentMessage = WorkerHeartbeat | DeploymentFailed | Canceled | TaskMessage
"""Of one deployment: what the job that holds the worker gets."""

WorkerMessage = Following | DeploymentMessage

ControlMessage = Registration | AgentCommand | AgentMessage | WorkerCommand | WorkerMessage


# --- doors


class MalformedMessageError(ValueError):
    """A peer has sent what is no message of its direction, or not now. The text names it and says why."""


class Door(Generic[M]):
    """Decodes and checks what comes from one kind of ``sender``; ``messages`` is the union of what that one says."""

    def __init__(self, sender: str, messages: Any) -> None:
        self._sender = sender
        self._names = frozenset(kind.__name__ for kind in get_args(messages))
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages)

    def decode(self, body: bytes) -> M:
        """Raises MalformedMessageError."""
        try:
            with malformed():
                return self._decoder.decode(body)
        except DocumentError as error:
            raise MalformedMessageError(self._described(body, error)) from error

    def _described(self, body: bytes, error: DocumentError) -> str:
        fault = printable(str(error), _MAX_FAULT_CHARS)
        try:
            with malformed():
                name = _TAG.decode(body).type
        except DocumentError:
            return f"what {self._sender} sent is no message: {fault}"
        if name in self._names:
            return f"the message {name} of {self._sender} is malformed: {fault}"
        return f"{self._sender} sends no message {printable(name, 100)!r} here"


class _Tag(Struct):
    type: str


_TAG = msgspec.msgpack.Decoder(_Tag)
_ENCODER = msgspec.msgpack.Encoder()

FROM_STRANGER: Door[Registration] = Door("a process that has not registered", Registration)
FROM_AGENT: Door[AgentMessage] = Door("a slot agent", AgentMessage)
FROM_WORKER: Door[WorkerMessage] = Door("a worker", WorkerMessage)
TO_AGENT: Door[AgentCommand] = Door("the driver", AgentCommand)
TO_WORKER: Door[WorkerCommand] = Door("the driver", WorkerCommand)


def encode(message: ControlMessage) -> bytes:
    """Raises :class:`DocumentError` for what has no wire form: text that is no Unicode, a number beyond 64 bits."""
    with malformed():
        return _ENCODER.encode(message)
