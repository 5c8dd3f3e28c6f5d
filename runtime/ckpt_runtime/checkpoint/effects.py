"""The effects that a checkpoint coordinator requests from its shell: its only output type. Values only.

The shell starts effects in the order given. An effect with an answer names the event; it gets exactly one answer, at
any later time and in any order. The others have no answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState
from ckpt_runtime.checkpoint.events import TimerId
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason, CheckpointOptions, CheckpointProperties


@dataclass(frozen=True, slots=True)
class InitializeLocation:
    """Create the snapshot's own directory: ``chk-<id>``, or a new one in ``target_directory`` for a savepoint.

    Answer: LocationReady or LocationFailed. A directory that exists already is a failure.
    """

    checkpoint_id: int
    properties: CheckpointProperties
    target_directory: str | None


@dataclass(frozen=True, slots=True)
class TriggerSources:
    """Send the trigger to ``tasks``; a delivery that fails is reported as TriggerFailed."""

    checkpoint_id: int
    timestamp: int
    options: CheckpointOptions
    tasks: tuple[ExecutionId, ...]


@dataclass(frozen=True, slots=True)
class WriteMetadata:
    """Publish the metadata atomically; it must not exist yet. Answer: MetadataWritten, -Failed or -Unknown."""

    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class ResolveMetadata:
    """Find out whether an earlier write of this metadata happened. The wait grows with ``attempt`` (from 1).

    Answer: MetadataWritten, MetadataFailed (only if the metadata can no longer appear) or MetadataUnknown.
    """

    checkpoint: CompletedCheckpoint
    attempt: int


@dataclass(frozen=True, slots=True)
class AddToStore:
    """Make the HA pointer durable, including ``owned``. Answer: StoreAdded, StoreFailed or StoreUnknown."""

    checkpoint: CompletedCheckpoint
    owned: bool = True


@dataclass(frozen=True, slots=True)
class ResolveStore:
    """Re-read the HA pointer after an unknown outcome. Answer as AddToStore; the wait grows with ``attempt``."""

    checkpoint: CompletedCheckpoint
    attempt: int
    owned: bool = True


@dataclass(frozen=True, slots=True)
class RemoveFromStore:
    """Remove the HA pointer; an absent pointer counts as removed. Answer: StoreRemoved or StoreRemoveFailed.

    ``discards`` is the directory of a checkpoint that is deleted afterwards, so that a later driver can continue the
    deletion.
    """

    checkpoint_id: int
    attempt: int = 0
    discards: str | None = None


@dataclass(frozen=True, slots=True)
class DiscardCheckpoint:
    """Delete a completed checkpoint: metadata first, private files, then the empty directory. Answer: CleanupDone."""

    checkpoint: CompletedCheckpoint


@dataclass(frozen=True, slots=True)
class DiscardLocation:
    """Delete an aborted checkpoint's directory and everything in it. Answer: CleanupDone."""

    checkpoint_id: int
    directory: str


@dataclass(frozen=True, slots=True)
class DiscardState:
    """Delete the private files (relative paths) of a subtask state that no checkpoint will use. No answer."""

    checkpoint_id: int
    directory: str
    state: SubtaskState


@dataclass(frozen=True, slots=True)
class DeleteSharedFiles:
    """Delete shared state files that no retained checkpoint refers to. No answer."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FindLeftovers:
    """List the job's checkpoint directories, complete or not, and its shared files. Answer: LeftoversFound.

    Without ``below``, finds leftovers of earlier drivers; sent once, before this driver's first deployment. With it,
    finds only shared files that were written for checkpoints below this id: a killed worker may have left some.
    """

    below: int | None = None


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """Tell tasks that a checkpoint is complete."""

    checkpoint_id: int
    timestamp: int
    tasks: tuple[ExecutionId, ...]


@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """Tell tasks that a checkpoint is aborted; ``latest_completed`` (-1: none) makes up for a lost NotifyComplete."""

    checkpoint_id: int
    timestamp: int
    latest_completed: int
    tasks: tuple[ExecutionId, ...]


@dataclass(frozen=True, slots=True)
class ScheduleTimer:
    """Answer with TimerFired(timer, generation) at ``at_rel_ms``; replaces an earlier timer of the same id."""

    timer: TimerId
    generation: int
    at_rel_ms: int


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """Cancel a timer. A timer that has already fired is harmless."""

    timer: TimerId


@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """A requested checkpoint is complete; ``external_path`` is its directory."""

    request_id: str
    checkpoint_id: int
    external_path: str


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A requested checkpoint failed. ``checkpoint_id`` is None if it never got an id.

    ``reached_tasks``: the trigger was sent, so for a synchronous savepoint, sources may have stopped already.
    """

    request_id: str
    reason: CheckpointFailureReason
    message: str
    checkpoint_id: int | None = None
    reached_tasks: bool = False


@dataclass(frozen=True, slots=True)
class RestoreFrom:
    """Answers RestoreRequested with the newest checkpoint, None for a fresh start. No write is in progress."""

    request_id: str
    checkpoint: CompletedCheckpoint | None


@dataclass(frozen=True, slots=True)
class RestoreFailed:
    """Answers RestoreRequested: the savepoint could not be recorded."""

    request_id: str
    message: str


@dataclass(frozen=True, slots=True)
class FailJob:
    """More checkpoints failed than are tolerated, or a synchronous savepoint failed.

    ``times`` is how often the limit was exceeded since a checkpoint completed; 0 for a savepoint.
    """

    reason: CheckpointFailureReason
    message: str
    times: int


@dataclass(frozen=True, slots=True)
class ShutdownComplete:
    """The shutdown is complete: nothing is in progress, and the coordinator can be dropped.

    ``keeps_nothing``: no checkpoint outlives the job, so everything left in its directory can be deleted, including the
    leftovers of a driver that crashed during this clean-up.
    """

    keeps_nothing: bool = False


Effect = (
    InitializeLocation
    | TriggerSources
    | WriteMetadata
    | ResolveMetadata
    | AddToStore
    | ResolveStore
    | RemoveFromStore
    | DiscardCheckpoint
    | DiscardLocation
    | DiscardState
    | DeleteSharedFiles
    | FindLeftovers
    | NotifyComplete
    | NotifyAborted
    | ScheduleTimer
    | CancelTimer
    | RequestCompleted
    | RequestFailed
    | RestoreFrom
    | RestoreFailed
    | FailJob
    | ShutdownComplete
)
