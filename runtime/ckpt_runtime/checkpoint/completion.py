"""The pending checkpoints, from the trigger to their end: published, or failed. Pure.

States of a pending checkpoint: LOCATING (its directory is being created) -> PENDING (waits for acknowledgements, then
for finalisation) -> WRITING (metadata) -> STORING (the HA pointer; checkpoints only) -> gone. From WRITING on, only a
write that certainly failed aborts the checkpoint.

Order of a completion: metadata, pointer, statistics and result, pointers of subsumed checkpoints, notifications; files
are deleted last. A failure answers the request, cleans up and, after too many, fails the job.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    EdgeDescriptor,
    FileGivenUpError,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.configuration import SettingsInForce
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.executions import CheckpointPlan, ExecutionId, ExecutionView, SubtaskKey
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint, Retention, UnexpectedAnswerError
from ckpt_runtime.checkpoint.schedule import CheckpointSchedule
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics, CheckpointStatsTracker, SubtaskStats

# Limits memory. A late acknowledgement of a forgotten id deletes nothing: the checkpoint may have completed.
ABORTED_REMEMBERED = 1_024


@dataclass(frozen=True, slots=True)
class TriggerRequest:
    """One request. ``request_id`` is None if the result is not awaited; ``sequence`` breaks ties in the order.

    ``final`` marks the request at the end of a bounded job's data.
    """

    request_id: str | None
    properties: CheckpointProperties
    requested_at: int
    sequence: int = 0
    periodic: bool = False
    final: bool = False
    target_directory: str | None = None

    @property
    def priority(self) -> tuple[bool, bool, int, int]:
        """The sort key: savepoints first, then requests that a user waits for, then older ones."""
        return (not self.properties.is_savepoint, self.periodic, self.requested_at, self.sequence)


class PendingState(Enum):
    """The states are described in the module docstring."""

    LOCATING = "locating"
    PENDING = "pending"
    WRITING = "writing"
    STORING = "storing"


class AckResult(Enum):
    """How an acknowledgement is classified."""

    SUCCESS = "success"
    DUPLICATE = "duplicate"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class PendingCheckpoint:
    """``timestamp`` is the wall clock of the trigger; ``started_at`` the monotonic time its timeout was armed.

    ``persisted`` are the bytes that subtasks have reported to be in storage. ``extension_ms`` is the time that the
    rescue policy has added to the timeout so far, ``progress_at_extension`` the progress at the last extension.
    """

    id: int
    request: TriggerRequest
    plan: CheckpointPlan
    timestamp: int
    started_at: int
    deadline: int
    generation: int = 0
    state: PendingState = PendingState.LOCATING
    directory: str | None = None
    acknowledged: dict[ExecutionId, SubtaskState] = field(default_factory=dict)
    awaited: set[ExecutionId] = field(init=False)
    completed: CompletedCheckpoint | None = None
    resolve_attempts: int = 0
    persisted: dict[ExecutionId, int] = field(default_factory=dict)
    extension_ms: int = 0
    progress_at_extension: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.awaited = set(self.plan.to_wait_for)

    @property
    def can_abort(self) -> bool:
        """Whether the checkpoint can be aborted. While it is being finalised, only an answer of the storage ends it."""
        return self.state not in (PendingState.WRITING, PendingState.STORING)

    @property
    def progress(self) -> tuple[int, int]:
        """The number of acknowledged subtasks, and the persisted bytes of all subtasks."""
        return len(self.acknowledged), sum(self.persisted.values())

    @property
    def deadline_timestamp(self) -> int:
        """The deadline by the wall clock, for display only."""
        return self.timestamp + self.deadline - self.started_at

    @property
    def metadata(self) -> CompletedCheckpoint:
        """The metadata that :meth:`complete` created."""
        assert self.completed is not None
        return self.completed

    def classify(self, execution: ExecutionId) -> AckResult:
        if execution in self.awaited:
            return AckResult.SUCCESS
        return AckResult.DUPLICATE if execution in self.acknowledged else AckResult.UNKNOWN

    def acknowledge(self, execution: ExecutionId, state: SubtaskState) -> None:
        """Records an acknowledgement; the attempt must be an awaited one."""
        self.awaited.remove(execution)
        self.acknowledged[execution] = state

    def complete(self, job_id: str, lineage: str | None, now_abs: int) -> CompletedCheckpoint:
        """Creates the metadata. Finished subtasks only have a marker there, and their in-flight data if any."""
        assert self.directory is not None
        graph = self.plan.graph
        on_restore = self.plan.finished_on_restore
        finished: set[SubtaskKey] = set(self.plan.finished)
        finished.update(
            (vertex.id, index)
            for vertex in graph.vertices
            if vertex.id in on_restore
            for index in range(vertex.parallelism)
        )
        self.completed = CompletedCheckpoint(
            id=self.id,
            job_id=job_id,
            timestamp=self.timestamp,
            completion_timestamp=now_abs,
            directory=self.directory,
            properties=self.request.properties,
            vertices=tuple(VertexDescriptor.of(vertex) for vertex in graph.vertices),
            states={
                execution.key: SubtaskState(bytes=state.in_flight_bytes, inputs=state.inputs, outputs=state.outputs)
                if execution.key in finished
                else state
                # Sorted, so that the document does not depend on the order of acknowledgements.
                for execution, state in sorted(self.acknowledged.items())
                if execution.key not in finished or state.has_channel_state
            },
            finished=frozenset(finished),
            edges=tuple(EdgeDescriptor.of(edge) for edge in graph.edges),
            lineage=lineage,
        )
        return self.completed


class PendingCheckpoints(dict[int, PendingCheckpoint]):
    """The pending checkpoints of a job by id, oldest first. The latest aborted ids are kept to recognise late messages.

    ``first_id`` and ``last_id`` are the ids that this driver has triggered so far. The outcome of each checkpoint is
    reported to ``statistics``.
    """

    def __init__(self, statistics: CheckpointStatsTracker) -> None:
        super().__init__()
        self._stats = statistics
        self._aborted: OrderedDict[int, None] = OrderedDict()
        self.first_id: int | None = None
        self.last_id = 0

    @property
    def is_triggering(self) -> bool:
        """Whether the directory of a checkpoint is being created."""
        return any(pending.state is PendingState.LOCATING for pending in self.values())

    @property
    def is_finalizing(self) -> bool:
        """Whether a checkpoint that will enter the store, or a synchronous savepoint, is being written."""
        return any(not each.can_abort and each.request.properties.notifies_and_subsumes for each in self.values())

    def abortable(self) -> list[PendingCheckpoint]:
        """The checkpoints that can be aborted, oldest first."""
        return [pending for pending in self.values() if pending.can_abort]

    def was_aborted(self, checkpoint_id: int) -> bool:
        """Whether the id was aborted; False for a forgotten or completed id."""
        return checkpoint_id in self._aborted

    def add(self, pending: PendingCheckpoint) -> None:
        """Adds a checkpoint that has been triggered."""
        self[pending.id] = pending
        if self.first_id is None:
            self.first_id = pending.id
        self.last_id = pending.id
        properties = pending.request.properties
        self._stats.report_pending(
            pending.id,
            pending.timestamp,
            properties.type,
            properties.savepoint_format,
            {vertex.id: vertex.parallelism for vertex in pending.plan.graph.vertices},
            pending.deadline_timestamp,
        )
        # Finished subtasks never report, so they count as done from the beginning.
        for vertex_id, subtask in sorted(pending.plan.finished):
            nothing = SubtaskStats(subtask, pending.timestamp, 0, CheckpointMetrics())
            self._stats.report_subtask(pending.id, vertex_id, nothing)

    def move_deadline(self, pending: PendingCheckpoint, deadline: int) -> None:
        """Sets a new deadline; the timer for the old one no longer has an effect."""
        pending.deadline = deadline
        pending.generation += 1
        self._stats.report_deadline(pending.id, pending.deadline_timestamp)

    def extend(self, pending: PendingCheckpoint, deadline: int) -> None:
        """Extends the deadline on behalf of the rescue policy."""
        pending.extension_ms += deadline - pending.deadline
        pending.progress_at_extension = pending.progress
        self.move_deadline(pending, deadline)
        self._stats.report_extension(pending.id, pending.extension_ms)

    def completed(self, pending: PendingCheckpoint) -> None:
        del self[pending.id]
        self._stats.report_completed(pending.id, pending.metadata.directory)

    def aborted(self, pending: PendingCheckpoint, at_abs_ms: int, message: str, *, is_failure: bool = True) -> None:
        """Removes an aborted checkpoint; with ``is_failure``, it stays in the statistics with its message."""
        del self[pending.id]
        if is_failure:
            self._stats.report_failed(pending.id, at_abs_ms, message)
        else:
            self._stats.report_withdrawn(pending.id)
        self._aborted[pending.id] = None
        if len(self._aborted) > ABORTED_REMEMBERED:
            self._aborted.popitem(last=False)


class CheckpointFailureManager:
    """Counts failed checkpoints: an id at most once, a failure without an id always; a success resets the count.

    Ids up to the last success never count. ``failed_jobs`` is how often the limit was exceeded since the last success,
    over all deployments; the pause before the next deployment grows with it.
    """

    def __init__(self, in_force: SettingsInForce) -> None:
        self._in_force = in_force
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
        # A savepoint that expires or cannot be written concerns only its user and does not fail the job.
        if not task_level and properties.is_savepoint:
            return False
        if not reason.is_counted or not self._is_new(checkpoint_id):
            return False
        self._continuous += 1
        if self._continuous <= self._in_force.settings.tolerable_failed_checkpoints:
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
    """Handles the consequences of failures and owns their count; ``emit`` takes the effects."""

    def __init__(
        self,
        in_force: SettingsInForce,
        pending: PendingCheckpoints,
        executions: ExecutionView,
        schedule: CheckpointSchedule,
        retention: Retention,
        statistics: CheckpointStatsTracker,
        emit: Callable[[Effect], None],
    ) -> None:
        self._count = CheckpointFailureManager(in_force)
        self._pending = pending
        self._executions = executions
        self._schedule = schedule
        self._retention = retention
        self._stats = statistics
        self._emit = emit

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
        # so a checkpoint that came too late for them does not count as failed, unless a user has requested it.
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


class Completion:
    """Completes checkpoints. Its only state is that of ``pending``; ``emit`` takes the effects.

    The handlers of storage answers raise :class:`UnexpectedAnswerError` if no such request is in progress.
    """

    def __init__(
        self,
        job_id: str,
        lineage: str | None,
        pending: PendingCheckpoints,
        schedule: CheckpointSchedule,
        retention: Retention,
        failures: CheckpointFailures,
        statistics: CheckpointStatsTracker,
        emit: Callable[[Effect], None],
    ) -> None:
        self._job_id = job_id
        self._lineage = lineage
        self._pending = pending
        self._schedule = schedule
        self._retention = retention
        self._failures = failures
        self._stats = statistics
        self._emit = emit

    # --- messages of tasks

    def on_acknowledged(self, event: on.Acknowledged, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is None:
            self._on_late_acknowledgement(event)
            return
        result = pending.classify(event.execution) if event.directory == pending.directory else AckResult.UNKNOWN
        # Nothing is discarded: its files are those of the first acknowledgement, and in use.
        if result is AckResult.DUPLICATE:
            return
        if result is AckResult.UNKNOWN:
            if event.directory == pending.directory and not pending.request.properties.is_savepoint:
                self._retention.register(event)  # so that its shared files are deleted with the checkpoint's
            self._retention.discard_state(event)
            return
        conflict = None if pending.request.properties.is_savepoint else self._retention.register(event)
        if conflict is not None:
            self._retention.discard_state(event)
            # Not counted, because it is not the task's fault: it did not know yet that a full checkpoint had replaced
            # the one it built upon.
            replaced = isinstance(conflict, FileGivenUpError)
            reason = Reason.CHECKPOINT_BASE_REPLACED if replaced else Reason.CHECKPOINT_ASYNC_EXCEPTION
            self._failures.abort(pending, reason, now, str(conflict))
            return
        pending.acknowledge(event.execution, event.state)
        self._report_subtask(event, now)

    def _on_late_acknowledgement(self, event: on.Acknowledged) -> None:
        """Discards the state if the checkpoint was aborted. If it completed, this is a repetition: files are in use."""
        if self._pending.was_aborted(event.checkpoint_id):
            self._retention.register(event)
            self._retention.discard_state(event)

    def on_declined(self, event: on.Declined, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        # Attempts of an earlier deployment are not in the plan, so their declines do not concern this checkpoint.
        if pending is not None and pending.can_abort and event.execution in pending.plan.to_wait_for:
            self._failures.abort(pending, event.reason, now, event.message, event.execution)

    def subtask_finished(self, execution: ExecutionId, now: Instant) -> None:
        """Aborts the checkpoints that still wait for this subtask, because it will not acknowledge."""
        for pending in self._pending.abortable():
            if execution in pending.awaited:
                detail = "a subtask ended without acknowledging"
                self._failures.abort(pending, Reason.CHECKPOINT_DECLINED_TASK_CLOSING, now, detail)

    def on_progress(self, event: on.ProgressReported, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is not None and event.execution in pending.awaited:
            pending.persisted[event.execution] = event.metrics.checkpointed_size + event.metrics.reused_size
            self._report_subtask(event, now)

    def _report_subtask(self, event: on.Acknowledged | on.ProgressReported, now: Instant) -> None:
        subtask = SubtaskStats(
            index=event.execution.subtask,
            ack_timestamp=now.abs_ms,
            state_size=event.state.bytes if isinstance(event, on.Acknowledged) else 0,
            metrics=event.metrics,
            completed=isinstance(event, on.Acknowledged),
        )
        self._stats.report_subtask(event.checkpoint_id, event.execution.vertex_id, subtask)

    # --- finalising

    def finalize_what_is_ready(self, now: Instant) -> None:
        """Starts finalising: plain savepoints at once, all other checkpoints one at a time, oldest first.

        One at a time, because completed ids would decrease if a later checkpoint got its pointer first, and because
        nothing may be added to the store while the outcome of an earlier pointer is unknown.
        """
        for pending in self._pending.abortable():
            properties = pending.request.properties
            if pending.state is not PendingState.PENDING or pending.awaited:
                continue
            if properties.notifies_and_subsumes and self._pending.is_finalizing:
                continue
            pending.state = PendingState.WRITING
            self._emit(out.CancelTimer(TimerId(TimerKind.CANCELLER, pending.id)))
            self._emit(out.WriteMetadata(pending.complete(self._job_id, self._lineage, now.abs_ms)))

    def _finalizing(self, checkpoint_id: int, state: PendingState) -> PendingCheckpoint:
        pending = self._pending.get(checkpoint_id)
        if pending is None or pending.state is not state:
            raise UnexpectedAnswerError(checkpoint_id)
        return pending

    def on_metadata_written(self, event: on.MetadataWritten, now: Instant) -> None:
        pending = self._finalizing(event.checkpoint_id, PendingState.WRITING)
        if not pending.request.properties.notifies_and_subsumes:
            self._complete(pending, now)
            return
        pending.state = PendingState.STORING
        # The pauses between attempts grow; for the pointer they start again from the first.
        pending.resolve_attempts = 0
        self._emit(out.AddToStore(pending.metadata, _owned(pending)))

    def on_metadata_failed(self, event: on.MetadataFailed, now: Instant) -> None:
        pending = self._finalizing(event.checkpoint_id, PendingState.WRITING)
        self._failures.abort(pending, Reason.FINALIZE_CHECKPOINT_FAILURE, now, event.message)

    def on_metadata_unknown(self, event: on.MetadataUnknown, now: Instant) -> None:
        pending = self._finalizing(event.checkpoint_id, PendingState.WRITING)
        # The timeout no longer applies: only a re-read can tell whether the checkpoint exists.
        pending.resolve_attempts += 1
        self._emit(out.ResolveMetadata(pending.metadata, pending.resolve_attempts))

    def on_store_added(self, event: on.StoreAdded, now: Instant) -> None:
        self._complete(self._finalizing(event.checkpoint_id, PendingState.STORING), now)

    def on_store_failed(self, event: on.StoreFailed, now: Instant) -> None:
        pending = self._finalizing(event.checkpoint_id, PendingState.STORING)
        self._failures.abort(pending, Reason.FINALIZE_CHECKPOINT_FAILURE, now, event.message)

    def on_store_unknown(self, event: on.StoreUnknown, now: Instant) -> None:
        pending = self._finalizing(event.checkpoint_id, PendingState.STORING)
        pending.resolve_attempts += 1
        self._emit(out.ResolveStore(pending.metadata, pending.resolve_attempts, _owned(pending)))

    def _complete(self, pending: PendingCheckpoint, now: Instant) -> None:
        checkpoint = pending.metadata
        self._pending.completed(pending)
        self._failures.completed(pending.id)
        self._schedule.completed(now)
        if pending.request.request_id is not None:
            self._emit(out.RequestCompleted(pending.request.request_id, pending.id, checkpoint.directory))
        if checkpoint.properties.notifies_and_subsumes:
            # Before the aborts, which notify tasks of the latest checkpoint.
            self._retention.add(RetainedCheckpoint(checkpoint, _owned(pending)))
            for older in self._pending.abortable():
                # An older savepoint continues: the user waits for its files, not for the newest state.
                if older.id < pending.id and not older.request.properties.is_savepoint:
                    self._failures.abort(older, Reason.CHECKPOINT_SUBSUMED, now)
            # Only now may sinks commit: a failure from here on restores this checkpoint or a later one.
            self._emit(out.NotifyComplete(pending.id, pending.timestamp, pending.plan.to_wait_for))
        # Last: the files it duplicated may belong to a checkpoint that has been subsumed in the meantime.
        self._retention.unpin(pending.id)


def _owned(pending: PendingCheckpoint) -> bool:
    """Whether the job owns the snapshot. The savepoint of a stop belongs to the user; its pointer prevents its commits
    from being undone."""
    return not pending.request.properties.is_savepoint
