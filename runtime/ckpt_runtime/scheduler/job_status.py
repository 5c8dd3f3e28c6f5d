"""States of a job: those that users see (Flink's JobStatus) and the finer ones of the job machine. Values only."""

from __future__ import annotations

from enum import Enum, StrEnum


class JobStatus(StrEnum):
    """The statuses that users see. Spelled as in Flink, because its client parses them."""

    INITIALIZING = "INITIALIZING"
    CREATED = "CREATED"
    RUNNING = "RUNNING"
    FAILING = "FAILING"
    FAILED = "FAILED"
    CANCELLING = "CANCELLING"
    CANCELED = "CANCELED"
    FINISHED = "FINISHED"
    RESTARTING = "RESTARTING"
    SUSPENDED = "SUSPENDED"
    RECONCILING = "RECONCILING"

    def __init__(self, text: str) -> None:
        self.is_globally_terminal = text in ("FAILED", "CANCELED", "FINISHED")
        """Whether the status is final on every driver."""

    @property
    def is_terminal(self) -> bool:
        """Whether this driver is done with the job."""
        return self.is_globally_terminal or self is JobStatus.SUSPENDED


class JobState(Enum):
    """States of the job machine.

    ACQUIRING waits for slots and RESTORING for the state to start from; users see both as CREATED the first time and as
    RESTARTING later. DEPLOYING waits until all tasks run. STOPPING waits for the savepoint of a stop, ENDING for the
    tasks after it. CLEARING cancels the rest of a deployment before a restart, BACKING_OFF waits for the restart
    time.
    """

    INITIALIZING = "initializing"
    ACQUIRING = "acquiring"
    RESTORING = "restoring"
    DEPLOYING = "deploying"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDING = "ending"
    CLEARING = "clearing"
    BACKING_OFF = "backing off"
    FAILING = "failing"
    CANCELLING = "cancelling"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELED = "canceled"
    SUSPENDED = "suspended"

    @property
    def is_terminal(self) -> bool:
        return self in (JobState.FINISHED, JobState.FAILED, JobState.CANCELED, JobState.SUSPENDED)

    @property
    def has_tasks(self) -> bool:
        """Whether tasks of a deployment may exist."""
        return self in _WITH_TASKS

    def status(self, first_deployment: bool) -> JobStatus:
        """The status that users see."""
        if self in (JobState.ACQUIRING, JobState.RESTORING):
            return JobStatus.CREATED if first_deployment else JobStatus.RESTARTING
        return _STATUS[self]


_WITH_TASKS = frozenset(
    {
        JobState.DEPLOYING,
        JobState.RUNNING,
        JobState.STOPPING,
        JobState.ENDING,
        JobState.CLEARING,
        JobState.FAILING,
        JobState.CANCELLING,
    }
)
_STATUS = {
    JobState.INITIALIZING: JobStatus.INITIALIZING,
    JobState.DEPLOYING: JobStatus.RUNNING,
    JobState.RUNNING: JobStatus.RUNNING,
    JobState.STOPPING: JobStatus.RUNNING,
    JobState.ENDING: JobStatus.RUNNING,
    JobState.CLEARING: JobStatus.RESTARTING,
    JobState.BACKING_OFF: JobStatus.RESTARTING,
    JobState.FAILING: JobStatus.FAILING,
    JobState.CANCELLING: JobStatus.CANCELLING,
    JobState.FINISHED: JobStatus.FINISHED,
    JobState.FAILED: JobStatus.FAILED,
    JobState.CANCELED: JobStatus.CANCELED,
    JobState.SUSPENDED: JobStatus.SUSPENDED,
}
