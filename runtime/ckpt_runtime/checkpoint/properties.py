"""The kind of a snapshot, the options that its barriers carry to the tasks, and why it failed. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum


class CheckpointType(StrEnum):
    """The REST ``checkpoint_type``. A checkpoint is unaligned if it turned unaligned in at least one subtask."""

    CHECKPOINT = "CHECKPOINT"
    UNALIGNED_CHECKPOINT = "UNALIGNED_CHECKPOINT"
    SAVEPOINT = "SAVEPOINT"
    SYNC_SAVEPOINT = "SYNC_SAVEPOINT"


class SavepointFormat(StrEnum):
    """The backend's own files, or the format that every backend reads (FLIP-203)."""

    NATIVE = "NATIVE"
    CANONICAL = "CANONICAL"


@dataclass(frozen=True, slots=True)
class CheckpointProperties:
    """``full`` requests a snapshot that shares no file with an earlier one; ``drain`` is for sync savepoints.

    ``incremental`` is the job's option for keyed state; it does not affect in-flight data.
    """

    type: CheckpointType = CheckpointType.CHECKPOINT
    savepoint_format: SavepointFormat | None = None
    full: bool = False
    drain: bool = False
    incremental: bool = True

    @property
    def is_savepoint(self) -> bool:
        return self.type in (CheckpointType.SAVEPOINT, CheckpointType.SYNC_SAVEPOINT)

    @property
    def is_synchronous(self) -> bool:
        return self.type is CheckpointType.SYNC_SAVEPOINT

    @property
    def is_incremental(self) -> bool:
        """Whether keyed state may reuse files of completed checkpoints (FLIP-203).

        A checkpoint refers to them; a native savepoint, which shares nothing, duplicates them.
        """
        return self.incremental and not self.full and self.savepoint_format is not SavepointFormat.CANONICAL

    @property
    def notifies_and_subsumes(self) -> bool:
        """Whether completion is notified to tasks and subsumes checkpoints; False for a plain savepoint."""
        return self.type is not CheckpointType.SAVEPOINT


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """The options that trigger messages and barriers carry.

    ``directory`` is where the tasks write; a task repeats it in its acknowledgement. ``shared_directory`` takes the
    files that later checkpoints may refer to (empty for savepoints, which share nothing). ``unaligned`` and
    ``aligned_timeout_ms`` are the alignment policy of this one checkpoint (savepoints are always aligned). ``final``:
    when it was triggered, every subtask had ended or had reached the end of its data. Without ``exactly_once`` the
    barriers are counted and block no channel (savepoints are always exactly once).
    """

    properties: CheckpointProperties
    directory: str
    unaligned: bool = False
    aligned_timeout_ms: int = 0
    max_inflight_data_bytes: int | None = None
    shared_directory: str = ""
    final: bool = False
    exactly_once: bool = True


class CheckpointFailureReason(Enum):
    """Flink's reasons by name; the value is the message."""

    TOO_MANY_CHECKPOINT_REQUESTS = "Too many checkpoint requests are queued."
    NOT_ALL_REQUIRED_TASKS_RUNNING = "Not all required tasks are currently running."
    IO_EXCEPTION = "An Exception occurred while triggering the checkpoint. IO-problem detected."
    CHECKPOINT_ASYNC_EXCEPTION = "Asynchronous task checkpoint failed."
    CHECKPOINT_EXPIRED = "Checkpoint expired before completing."
    CHECKPOINT_SUBSUMED = "Checkpoint has been subsumed."
    CHECKPOINT_BASE_REPLACED = "A full checkpoint has replaced the one that this increment builds upon."
    CHECKPOINT_DECLINED = "Checkpoint was declined."
    CHECKPOINT_DECLINED_TASK_NOT_READY = "Checkpoint was declined (tasks not ready)"
    CHECKPOINT_DECLINED_TASK_CLOSING = "Checkpoint was declined (task is closing)"
    CHECKPOINT_DECLINED_SUBSUMED = "A barrier of a newer checkpoint arrived first."
    CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER = "An input cancelled the checkpoint."
    CHECKPOINT_COORDINATOR_SHUTDOWN = "CheckpointCoordinator shutdown."
    CHECKPOINT_COORDINATOR_SUSPEND = "Checkpoint Coordinator is suspending."
    FINALIZE_CHECKPOINT_FAILURE = "Failure to finalize checkpoint."
    TRIGGER_CHECKPOINT_FAILURE = "Trigger checkpoint failure."

    @property
    def message(self) -> str:
        return self.value

    @property
    def is_counted(self) -> bool:
        """Whether the failure counts against the tolerable number of failures."""
        return self in _COUNTED


_COUNTED = frozenset(
    {
        CheckpointFailureReason.IO_EXCEPTION,
        CheckpointFailureReason.CHECKPOINT_ASYNC_EXCEPTION,
        CheckpointFailureReason.CHECKPOINT_DECLINED,
        CheckpointFailureReason.CHECKPOINT_EXPIRED,
        CheckpointFailureReason.FINALIZE_CHECKPOINT_FAILURE,
    }
)
