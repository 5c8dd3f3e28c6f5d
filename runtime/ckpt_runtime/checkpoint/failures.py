"""Handles failed checkpoints and requests: answers them, cleans up and, after too many, fails the job. Pure."""

from __future__ import annotations

from collections.abc import Callable

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.execution_view import ExecutionView
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.pending_checkpoint import PendingCheckpoint, PendingCheckpoints, PendingState
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.request_decider import TriggerRequest
from ckpt_runtime.checkpoint.retention import Retention
from ckpt_runtime.checkpoint.schedule import CheckpointSchedule
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker


class CheckpointFailureManager:
    """Counts failed checkpoints: an id at most once, a failure without an id always; a success resets the count.

    Ids up to the last success never count. ``failed_jobs`` is how often the limit was exceeded since the last success,
    over all deployments; the pause before the next deployment grows with it.
    """

    def __init__(self, tolerable_failed_checkpoints: int) -> None:
        self.tolerable_failed_checkpoints = tolerable_failed_checkpoints
        self._counted: set[int] = set()
        self._continuous = 0
        self._last_success = 0
        self.failed_jobs = 0

    def on_success(self, checkpoint_id: int) -> None:
        self._last_success = max(self._last_success, checkpoint_id)
        self._continuous = 0
        self.failed_jobs = 0
        self._counted.clear()

    def on_restart(self) -> None:
        """A new deployment starts with a clean count."""
        self._continuous = 0
        self._counted.clear()

    def on_failure(
        self,
        reason: Reason,
        properties: CheckpointProperties,
        checkpoint_id: int | None = None,
        task_level: bool = False,
        attempt_is_running: bool = True,
    ) -> bool:
        """Counts one failure; returns whether the job must fail.

        ``task_level``: a task reported the failure. Savepoints are then counted too, and a synchronous one fails the
        job at once; a task's report fails the job only while that attempt runs.
        """
        # Tasks that have acknowledged it are stopped until it completes: only a restart frees them.
        if task_level and properties.is_synchronous:
            return attempt_is_running
        # A savepoint that expires or cannot be written is its user's concern; the job is not failed for it.
        if not task_level and properties.is_savepoint:
            return False
        if not reason.is_counted or not self._is_new(checkpoint_id):
            return False
        self._continuous += 1
        if self._continuous <= self.tolerable_failed_checkpoints:
            return False
        if task_level and not attempt_is_running:
            return False
        # The count is reset here; otherwise each further failure while the job stops would fail it again.
        self.on_restart()
        self.failed_jobs += 1
        return True

    def _is_new(self, checkpoint_id: int | None) -> bool:
        if checkpoint_id is None:
            return True
        # Several tasks may decline the same checkpoint, and late reports about ids up to the last success are ignored.
        if checkpoint_id <= self._last_success or checkpoint_id in self._counted:
            return False
        self._counted.add(checkpoint_id)
        return True


class CheckpointFailures:
    """Carries out the consequences of failures and owns their count; ``emit`` takes the effects."""

    def __init__(
        self,
        tolerable_failed_checkpoints: int,
        pending: PendingCheckpoints,
        executions: ExecutionView,
        schedule: CheckpointSchedule,
        retention: Retention,
        statistics: CheckpointStatsTracker,
        emit: Callable[[Effect], None],
    ) -> None:
        self._count = CheckpointFailureManager(tolerable_failed_checkpoints)
        self._pending = pending
        self._executions = executions
        self._schedule = schedule
        self._retention = retention
        self._stats = statistics
        self._emit = emit

    def configure(self, tolerable_failed_checkpoints: int) -> None:
        self._count.tolerable_failed_checkpoints = tolerable_failed_checkpoints

    def deployed(self) -> None:
        """A new deployment starts with a clean count."""
        self._count.on_restart()

    def completed(self, checkpoint_id: int) -> None:
        """A checkpoint completed: the count is reset."""
        self._count.on_success(checkpoint_id)

    def refuse(self, request: TriggerRequest, reason: Reason, now: Instant) -> None:
        """Fails a request that leaves the queue without a checkpoint."""
        self.fail_request(request.request_id, reason)
        if request.final:
            self._schedule.retry_final(now)

    def fail_request(
        self, request_id: str | None, reason: Reason, message: str = "", pending: PendingCheckpoint | None = None
    ) -> None:
        """Answers a failed request; ``pending`` is the checkpoint that was triggered for it."""
        if request_id is None:
            return
        checkpoint_id = None if pending is None else pending.id
        reached_tasks = pending is not None and pending.state is not PendingState.LOCATING
        self._emit(out.RequestFailed(request_id, reason, message or reason.message, checkpoint_id, reached_tasks))

    def tasks_not_running(self, request_id: str | None) -> None:
        """Fails a request because no deployment is running."""
        self._stats.report_failed_without_id()
        self.fail_request(request_id, Reason.NOT_ALL_REQUIRED_TASKS_RUNNING)

    def fail_without_id(self, request: TriggerRequest, detail: str, now: Instant) -> None:
        """Storage failed before the checkpoint got an id; such a failure always counts."""
        message = f"{Reason.IO_EXCEPTION.message} {detail}".rstrip()
        self._stats.report_failed_without_id()
        self.fail_request(request.request_id, Reason.IO_EXCEPTION, message)
        if self._count.on_failure(Reason.IO_EXCEPTION, request.properties):
            self._emit(out.FailJob(Reason.IO_EXCEPTION, message, self._count.failed_jobs))
        if request.final:
            self._schedule.retry_final(now)

    def abort(
        self,
        pending: PendingCheckpoint,
        reason: Reason,
        now: Instant,
        detail: str = "",
        reporter: ExecutionId | None = None,
    ) -> None:
        """Ends a checkpoint without completing it. ``reporter`` is the task that declined, if one did."""
        message = f"{reason.message} {detail}".rstrip()
        # Subtasks of a bounded job end while checkpoints are taken. The next checkpoint contains their end (FLIP-147),
        # so one that was too late for them is no failure, except for a user who has requested it.
        asked_for = pending.request.request_id is not None
        is_failure = reason is not Reason.CHECKPOINT_DECLINED_TASK_CLOSING or asked_for
        self._pending.aborted(pending, now.abs_ms, message, is_failure=is_failure)
        self._retention.unpin(pending.id)
        self.fail_request(pending.request.request_id, reason, message, pending)
        self._emit(out.CancelTimer(TimerId(TimerKind.CANCELLER, pending.id)))
        if pending.directory is not None:
            self._retention.discard_location(pending.id, pending.directory)
        fails_job = self._count.on_failure(
            reason,
            pending.request.properties,
            pending.id,
            task_level=reporter is not None,
            attempt_is_running=reporter is not None and self._executions.is_running(reporter),
        )
        # A deployment that is being stopped has already failed for another reason.
        if fails_job and self._executions.is_deployed:
            # The pause before a restart grows with failed checkpoints. A failed stop does not indicate that the storage
            # is unavailable.
            times = 0 if pending.request.properties.is_synchronous else self._count.failed_jobs
            self._emit(out.FailJob(reason, message, times))
        if pending.state is not PendingState.LOCATING:
            tasks = pending.plan.to_wait_for
            self._emit(out.NotifyAborted(pending.id, pending.timestamp, self._retention.latest_id, tasks))
        if pending.request.final:
            self._schedule.retry_final(now)
