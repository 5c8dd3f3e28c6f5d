"""Why a checkpoint or a trigger failed; which of these count against the tolerable number. Values only."""

from __future__ import annotations

from enum import Enum


class CheckpointFailureReason(Enum):
    """Flink's reasons by name. The value is ``(pre-flight, message)``; pre-flight failures concern no running task."""

    PERIODIC_SCHEDULER_SHUTDOWN = (True, "Periodic checkpoint scheduler is shut down.")
    TOO_MANY_CHECKPOINT_REQUESTS = (True, "Too many checkpoint requests are queued.")
    MINIMUM_TIME_BETWEEN_CHECKPOINTS = (True, "The minimum pause since the last checkpoint is not over yet.")
    NOT_ALL_REQUIRED_TASKS_RUNNING = (True, "Not all required tasks are currently running.")
    IO_EXCEPTION = (True, "An Exception occurred while triggering the checkpoint. IO-problem detected.")
    CHECKPOINT_ASYNC_EXCEPTION = (False, "Asynchronous task checkpoint failed.")
    CHANNEL_STATE_SHARED_STREAM_EXCEPTION = (False, "Another subtask failed the shared file of in-flight data.")
    CHECKPOINT_EXPIRED = (False, "Checkpoint expired before completing.")
    CHECKPOINT_SUBSUMED = (False, "Checkpoint has been subsumed.")
    CHECKPOINT_DECLINED = (False, "Checkpoint was declined.")
    CHECKPOINT_DECLINED_TASK_NOT_READY = (False, "Checkpoint was declined (tasks not ready)")
    CHECKPOINT_DECLINED_TASK_CLOSING = (False, "Checkpoint was declined (task is closing)")
    CHECKPOINT_DECLINED_SUBSUMED = (False, "A barrier of a newer checkpoint arrived first.")
    CHECKPOINT_DECLINED_ON_CANCELLATION_BARRIER = (False, "An input cancelled the checkpoint.")
    CHECKPOINT_DECLINED_INPUT_END_OF_STREAM = (False, "An input ended during the alignment.")
    CHECKPOINT_COORDINATOR_SHUTDOWN = (False, "CheckpointCoordinator shutdown.")
    CHECKPOINT_COORDINATOR_SUSPEND = (False, "Checkpoint Coordinator is suspending.")
    JOB_FAILOVER_REGION = (False, "The job is restarting.")
    TASK_FAILURE = (False, "Task has failed.")
    TASK_CHECKPOINT_FAILURE = (False, "Task local checkpoint failure.")
    FINALIZE_CHECKPOINT_FAILURE = (False, "Failure to finalize checkpoint.")
    TRIGGER_CHECKPOINT_FAILURE = (False, "Trigger checkpoint failure.")

    @property
    def pre_flight(self) -> bool:
        return self.value[0]

    @property
    def message(self) -> str:
        return self.value[1]

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
