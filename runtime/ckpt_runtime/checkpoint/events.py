"""Everything that can happen to a checkpoint coordinator: its only input type. Values only.

Requests and messages come from outside; the other events answer an effect (see ``effects``). An answer about a write
may be "unknown" (a timeout, a lost connection): the write may have happened. The coordinator then asks for a re-read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason, CheckpointProperties
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.graph.job_graph import JobGraph


class TimerKind(StrEnum):
    """The coordinator's timers."""

    PERIODIC = "periodic"
    CANCELLER = "canceller"
    FINAL_CHECKPOINT = "final-checkpoint"


@dataclass(frozen=True, slots=True)
class TimerId:
    """``checkpoint_id`` is 0 unless the timer is a canceller."""

    kind: TimerKind
    checkpoint_id: int = 0


# --- the job's life


@dataclass(frozen=True, slots=True)
class JobRunning:
    """All subtasks of a deployment are running or already finished.

    ``executions`` has one entry per subtask. ``finished_on_restore`` names vertices that run without their operators
    because these had finished in the restored checkpoint.
    """

    executions: tuple[ExecutionId, ...]
    finished: frozenset[ExecutionId] = frozenset()
    finished_on_restore: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TasksLeftRunning:
    """A task failed or the job is being cancelled: no further checkpoint of this deployment can complete."""


@dataclass(frozen=True, slots=True)
class SubtaskFinished:
    """A subtask ended in state FINISHED."""

    execution: ExecutionId


@dataclass(frozen=True, slots=True)
class EndOfDataReached:
    """A subtask has no more input and ends after its predecessors (FLIP-147).

    ``waits``: it does not end before a checkpoint that covers this has completed.
    """

    execution: ExecutionId
    waits: bool = True


@dataclass(frozen=True, slots=True)
class RestoreRequested:
    """All tasks have ended; requests the checkpoint that the next deployment starts from. Answered by RestoreFrom or
    RestoreFailed.

    A later request replaces one that is still unanswered. ``savepoint`` is the one that the job was submitted with; it
    is used only while the store has no checkpoint.
    """

    request_id: str
    savepoint: CompletedCheckpoint | None = None
    mode: RecoveryClaimMode = RecoveryClaimMode.NO_CLAIM


@dataclass(frozen=True, slots=True)
class PeriodicTriggerStopped:
    """Stop with savepoint begins: pending and queued checkpoints are aborted, ticks stop."""


@dataclass(frozen=True, slots=True)
class PeriodicTriggerStarted:
    """Stop with savepoint was abandoned and the tasks still run: ticks resume."""


@dataclass(frozen=True, slots=True)
class Shutdown:
    """The job ended as ``job_status`` (a terminal name), or ``SUSPENDED``: this driver releases it.

    ``fenced``: leadership is lost, so nothing more may be written or deleted, not even for clean-up.
    """

    job_status: str
    fenced: bool = False


@dataclass(frozen=True, slots=True)
class ConfigurationPatched:
    """New effective settings, already persisted (FLIP-571)."""

    configuration: CheckpointConfiguration


@dataclass(frozen=True, slots=True)
class RetentionAsked:
    """Requests that the checkpoints are retained if the job is cancelled, regardless of the settings."""


@dataclass(frozen=True, slots=True)
class GraphReplaced:
    """The next deployment runs another job graph. Only allowed while no deployment runs.

    Checkpoints that are being written were triggered on the previous graph and are completed with it.
    """

    graph: JobGraph


@dataclass(frozen=True, slots=True)
class BacklogChanged:
    """Whether any source is processing a backlog."""

    processing_backlog: bool


# --- triggers


@dataclass(frozen=True, slots=True)
class CheckpointWanted:
    """A source waits for a checkpoint that covers the rows it has sent; it repeats the event while it waits."""


@dataclass(frozen=True, slots=True)
class TriggerRequested:
    """A checkpoint or savepoint was requested. ``target_directory`` is the savepoint's parent directory."""

    request_id: str
    properties: CheckpointProperties
    target_directory: str | None = None


@dataclass(frozen=True, slots=True)
class TimerFired:
    """Answers ScheduleTimer at its time. Stale generations are ignored."""

    timer: TimerId
    generation: int


@dataclass(frozen=True, slots=True)
class LocationReady:
    """Answers InitializeLocation: the directory exists, for this checkpoint only. Savepoints share no directory."""

    checkpoint_id: int
    directory: str
    shared_directory: str = ""


@dataclass(frozen=True, slots=True)
class LocationFailed:
    """Answers InitializeLocation for a failed or unknown outcome. If the directory was created, it is empty."""

    checkpoint_id: int
    message: str


@dataclass(frozen=True, slots=True)
class TriggerFailed:
    """A trigger message could not be delivered."""

    checkpoint_id: int
    message: str


# --- messages of tasks


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """A subtask took its snapshot. ``directory`` repeats the one in the checkpoint's options."""

    checkpoint_id: int
    execution: ExecutionId
    directory: str
    state: SubtaskState
    metrics: CheckpointMetrics = CheckpointMetrics()


@dataclass(frozen=True, slots=True)
class Declined:
    """A subtask cannot take part."""

    checkpoint_id: int
    execution: ExecutionId
    reason: CheckpointFailureReason
    message: str = ""


@dataclass(frozen=True, slots=True)
class ProgressReported:
    """The progress of a subtask that has not acknowledged (or was aborted)."""

    checkpoint_id: int
    execution: ExecutionId
    metrics: CheckpointMetrics


# --- answers of the storage


@dataclass(frozen=True, slots=True)
class MetadataWritten:
    """Answers WriteMetadata or ResolveMetadata: the metadata is durable and complete."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class MetadataFailed:
    """Answers WriteMetadata or ResolveMetadata: the metadata certainly does not exist and never will."""

    checkpoint_id: int
    message: str


@dataclass(frozen=True, slots=True)
class MetadataUnknown:
    """Answers WriteMetadata or ResolveMetadata: the metadata may exist."""

    checkpoint_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class StoreAdded:
    """Answers AddToStore or ResolveStore: the pointer is durable."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """Answers AddToStore or ResolveStore: the pointer certainly does not exist and never will."""

    checkpoint_id: int
    message: str


@dataclass(frozen=True, slots=True)
class StoreUnknown:
    """Answers AddToStore or ResolveStore: the pointer may exist."""

    checkpoint_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class StoreRemoved:
    """Answers RemoveFromStore: the pointer is certainly removed."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class StoreRemoveFailed:
    """Answers RemoveFromStore: the pointer may still exist. The removal is tried again."""

    checkpoint_id: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class CleanupDone:
    """Answers DiscardCheckpoint or DiscardLocation, whether every file could be deleted or not."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class LeftoversFound:
    """Answers FindLeftovers: ids and directories of checkpoints, and paths of shared files, in use or not.

    None of the shared files was written for a checkpoint that was triggered after the request.
    """

    checkpoints: tuple[tuple[int, str], ...]
    shared: tuple[str, ...] = ()


CoordinatorEvent = (
    JobRunning
    | TasksLeftRunning
    | SubtaskFinished
    | EndOfDataReached
    | RestoreRequested
    | PeriodicTriggerStopped
    | PeriodicTriggerStarted
    | Shutdown
    | ConfigurationPatched
    | RetentionAsked
    | GraphReplaced
    | BacklogChanged
    | CheckpointWanted
    | TriggerRequested
    | TimerFired
    | LocationReady
    | LocationFailed
    | TriggerFailed
    | Acknowledged
    | Declined
    | ProgressReported
    | MetadataWritten
    | MetadataFailed
    | MetadataUnknown
    | StoreAdded
    | StoreFailed
    | StoreUnknown
    | StoreRemoved
    | StoreRemoveFailed
    | CleanupDone
    | LeftoversFound
)
