"""The checkpoint coordinator of one job: triggers, collects, completes and aborts checkpoints. A pure machine.

One door, :meth:`CheckpointCoordinator.handle`: an event and the present moment in, effects out. It has no clock, no
thread and no I/O, and holds no lock because nothing runs beside it. The order of effects is the order in which the
shell must start them. Sources: Flink's CheckpointCoordinator, FLIP-147, FLIP-203, FLIP-571.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.cleaner import CheckpointCleaner
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, VertexDescriptor
from ckpt_runtime.checkpoint.completed_checkpoint_store import CompletedCheckpointStore, RetainedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.ended_checkpoints import EndedCheckpoints
from ckpt_runtime.checkpoint.events import CoordinatorEvent, TimerId, TimerKind
from ckpt_runtime.checkpoint.execution_view import ExecutionView
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.failure_manager import CheckpointFailureManager
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.id_counter import CheckpointIdCounter, CheckpointIdSource
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.pending_checkpoint import AckResult, PendingCheckpoint, PendingState
from ckpt_runtime.checkpoint.periodic_trigger import PeriodicTrigger
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, RestoreMode
from ckpt_runtime.checkpoint.request_decider import CheckpointRequestDecider, Load, TriggerRequest, Verdict
from ckpt_runtime.checkpoint.shared_state_registry import SharedStateConflictError, SharedStateRegistry
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.checkpoint.statistics import CheckpointStatsSnapshot, CheckpointType, SubtaskStats
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker
from ckpt_runtime.graph.job_graph import JobGraph

FINAL_CHECKPOINT_RETRY_MS = 1_000
"""Without periodic checkpoints a failed last checkpoint is tried again after this pause."""

_PERIODIC = TimerId(TimerKind.PERIODIC)
_FINAL = TimerId(TimerKind.FINAL_CHECKPOINT)


class CoordinatorState(Enum):
    """CREATED: no deployment runs. RESTORING: waits for writes in flight. CLOSING: waits for clean-up."""

    CREATED = "created"
    RUNNING = "running"
    RESTORING = "restoring"
    CLOSING = "closing"
    CLOSED = "closed"


_OPEN = frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING, CoordinatorState.RESTORING})
_ANY = frozenset(CoordinatorState)
_ACCEPTED_IN: dict[type[Any], frozenset[CoordinatorState]] = {
    on.JobRunning: frozenset({CoordinatorState.CREATED}),
    on.TasksLeftRunning: frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING}),
    on.RestoreRequested: frozenset({CoordinatorState.CREATED}),
    on.PeriodicTriggerStopped: frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING}),
    on.PeriodicTriggerStarted: frozenset({CoordinatorState.RUNNING}),
    on.Shutdown: _OPEN,
    on.ConfigurationPatched: _OPEN,
    on.BacklogChanged: _OPEN,
}


class UnexpectedEventError(RuntimeError):
    """An event that the coordinator cannot take in its state: a bug of its shell. Nothing has changed."""

    def __init__(self, state: CoordinatorState, event: object) -> None:
        super().__init__(f"{event!r} is not possible in state {state.value}")


@dataclass(slots=True)
class _Restore:
    """A restore that waits. ``adding`` is a savepoint whose pointer is being written."""

    request_id: str
    savepoint: CompletedCheckpoint | None
    owned: bool
    adding: bool = False
    attempts: int = 0


class CheckpointCoordinator:
    """``recovered`` are the checkpoints whose pointers HA held at the start, in any order.

    ``first_delay_ms`` is how long after the first start of a deployment the first periodic checkpoint is due; it is
    kept within [minimum pause, interval], and is the interval when not given.
    """

    def __init__(
        self,
        job_id: str,
        graph: JobGraph,
        configuration: CheckpointConfiguration,
        ids: CheckpointIdSource | None = None,
        recovered: Iterable[RetainedCheckpoint] = (),
        first_delay_ms: int | None = None,
        statistics: CheckpointStatsTracker | None = None,
    ) -> None:
        self._job_id = job_id
        self._vertices = tuple(VertexDescriptor.of(vertex) for vertex in graph.vertices)
        self._configuration = configuration.effective()
        self._ids = CheckpointIdCounter() if ids is None else ids
        self._stats = CheckpointStatsTracker() if statistics is None else statistics
        self._state = CoordinatorState.CREATED
        self._fenced = False
        self._effects: list[Effect] = []
        self._executions = ExecutionView(graph)
        self._periodic = PeriodicTrigger(self._configuration, first_delay_ms)
        self._decider = CheckpointRequestDecider()
        self._failures = CheckpointFailureManager(self._configuration.tolerable_failures)
        self._store = CompletedCheckpointStore(self._configuration.retained, recovered)
        self._registry = SharedStateRegistry()
        self._cleaner = CheckpointCleaner(self._emit)
        self._pending: dict[int, PendingCheckpoint] = {}
        self._ended = EndedCheckpoints()
        self._triggering: int | None = None
        self._restore: _Restore | None = None
        self._final_generation = 0
        self._sequence = 0
        self._job_status = ""
        for entry in self._store.entries:
            self._adopt(entry)
        self._handlers: dict[type[Any], Callable[[Any, Instant], None]] = {
            on.JobRunning: self._on_job_running,
            on.TasksLeftRunning: self._on_tasks_left_running,
            on.SubtaskFinished: self._on_subtask_finished,
            on.EndOfDataReached: self._on_end_of_data,
            on.RestoreRequested: self._on_restore_requested,
            on.PeriodicTriggerStopped: self._on_periodic_stopped,
            on.PeriodicTriggerStarted: self._on_periodic_started,
            on.Shutdown: self._on_shutdown,
            on.ConfigurationPatched: self._on_configuration_patched,
            on.BacklogChanged: self._on_backlog_changed,
            on.TriggerRequested: self._on_trigger_requested,
            on.TimerFired: self._on_timer_fired,
            on.LocationReady: self._on_location_ready,
            on.LocationFailed: self._on_location_failed,
            on.TriggerFailed: self._on_trigger_failed,
            on.Acknowledged: self._on_acknowledged,
            on.Declined: self._on_declined,
            on.ProgressReported: self._on_progress,
            on.MetadataWritten: self._on_metadata_written,
            on.MetadataFailed: self._on_metadata_failed,
            on.MetadataUnknown: self._on_metadata_unknown,
            on.StoreAdded: self._on_store_added,
            on.StoreFailed: self._on_store_failed,
            on.StoreUnknown: self._on_store_unknown,
            on.StoreRemoved: self._on_store_removed,
            on.StoreRemoveFailed: self._on_store_remove_failed,
            on.CleanupDone: self._on_cleanup_done,
        }

    @property
    def state(self) -> CoordinatorState:
        return self._state

    @property
    def configuration(self) -> CheckpointConfiguration:
        """The effective settings."""
        return self._configuration

    @property
    def latest_checkpoint(self) -> CompletedCheckpoint | None:
        """What a restore would use now, writes in flight aside."""
        return self._store.latest

    @property
    def retained(self) -> tuple[RetainedCheckpoint, ...]:
        """Oldest first."""
        return self._store.entries

    @property
    def pending_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._pending))

    def statistics(self) -> CheckpointStatsSnapshot:
        """A frozen view for REST."""
        return self._stats.snapshot()

    def handle(self, event: CoordinatorEvent, now: Instant) -> list[Effect]:
        """Takes one event and returns what is to be done, in order.

        Raises :class:`UnexpectedEventError` when the state does not allow the event; nothing has changed then.
        """
        handler = self._handlers.get(type(event))
        if handler is None or self._state not in _ACCEPTED_IN.get(type(event), _ANY):
            raise UnexpectedEventError(self._state, event)
        if self._state is CoordinatorState.CLOSED and self._fenced:
            self._refuse_when_fenced(event)
        else:
            handler(event, now)
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _refuse_when_fenced(self, event: CoordinatorEvent) -> None:
        """Another driver leads now: late messages change nothing here, and no file is touched."""
        if isinstance(event, on.TriggerRequested):
            self._fail_request(event.request_id, Reason.CHECKPOINT_COORDINATOR_SHUTDOWN)

    # --- the job's life

    def _on_job_running(self, event: on.JobRunning, now: Instant) -> None:
        self._executions.deployed(event)
        self._state = CoordinatorState.RUNNING
        self._failures.on_restart()
        self._start_periodic(now)

    def _on_tasks_left_running(self, event: on.TasksLeftRunning, now: Instant) -> None:
        self._state = CoordinatorState.CREATED
        self._executions.gone()
        self._emit(out.CancelTimer(_FINAL))
        self._final_generation += 1
        self._stop_periodic(Reason.CHECKPOINT_COORDINATOR_SUSPEND, now)

    def _on_subtask_finished(self, event: on.SubtaskFinished, now: Instant) -> None:
        if not self._executions.finished(event.execution):
            return
        for pending in self._abortable():
            if event.execution in pending.awaited:
                self._abort(
                    pending, Reason.CHECKPOINT_DECLINED_TASK_CLOSING, now, "a subtask ended without acknowledging"
                )
        if self._executions.all_wait_for_final_checkpoint:
            self._request_final_checkpoint(now)
        self._decide(now)

    def _on_end_of_data(self, event: on.EndOfDataReached, now: Instant) -> None:
        if self._executions.end_of_data(event.execution) and self._executions.all_wait_for_final_checkpoint:
            self._request_final_checkpoint(now)
            self._decide(now)

    def _request_final_checkpoint(self, now: Instant) -> None:
        self._offer(None, CheckpointProperties(), now)

    def _on_periodic_stopped(self, event: on.PeriodicTriggerStopped, now: Instant) -> None:
        self._stop_periodic(Reason.CHECKPOINT_COORDINATOR_SUSPEND, now)

    def _on_periodic_started(self, event: on.PeriodicTriggerStarted, now: Instant) -> None:
        if not self._periodic.running:
            self._start_periodic(now)

    def _start_periodic(self, now: Instant) -> None:
        if self._periodic.start(now.rel_ms):
            self._schedule_tick()

    def _schedule_tick(self) -> None:
        if self._periodic.next_at is None:
            self._emit(out.CancelTimer(_PERIODIC))
            self._decider.drop_periodic()
        else:
            self._emit(out.ScheduleTimer(_PERIODIC, self._periodic.generation, self._periodic.next_at))

    def _stop_periodic(self, reason: Reason, now: Instant) -> None:
        """Also aborts whatever is pending or queued."""
        self._periodic.stop()
        self._emit(out.CancelTimer(_PERIODIC))
        for request in self._decider.drain():
            self._fail_request(request.request_id, reason)
        for pending in self._abortable():
            self._abort(pending, reason, now)

    # --- restore

    def _on_restore_requested(self, event: on.RestoreRequested, now: Instant) -> None:
        self._state = CoordinatorState.RESTORING
        self._restore = _Restore(event.request_id, event.savepoint, event.mode is RestoreMode.CLAIM)
        self._continue_restore(now)

    def _continue_restore(self, now: Instant) -> None:
        """The latest checkpoint is only known once no checkpoint can complete any more."""
        restore = self._restore
        if restore is None or restore.adding or self._is_finalizing():
            return
        if restore.savepoint is not None and self._store.latest is None and self._state in _OPEN:
            restore.adding = True
            self._ids.advance_to(restore.savepoint.id + 1)
            self._emit(out.AddToStore(restore.savepoint, restore.owned))
            return
        self._restore = None
        if self._state is not CoordinatorState.RESTORING:
            return
        self._state = CoordinatorState.CREATED
        latest = self._store.latest
        if latest is not None:
            self._stats.report_restored(latest.id, now.abs_ms, latest.is_savepoint, latest.directory)
        self._emit(out.RestoreFrom(restore.request_id, latest))

    def _adopt(self, entry: RetainedCheckpoint) -> None:
        self._ids.advance_to(entry.checkpoint.id + 1)
        self._registry.register_all(entry.checkpoint.id, entry.checkpoint.states.values(), entry.owned)

    # --- settings

    def _on_configuration_patched(self, event: on.ConfigurationPatched, now: Instant) -> None:
        before, self._configuration = self._configuration, event.configuration.effective()
        self._failures.tolerable_failures = self._configuration.tolerable_failures
        self._store.retained = self._configuration.retained
        if self._periodic.configure(self._configuration, now.rel_ms):
            self._schedule_tick()
        if before.timeout_ms != self._configuration.timeout_ms:
            for pending in self._abortable():
                self._move_deadline(pending, now)
        self._decide(now)

    def _move_deadline(self, pending: PendingCheckpoint, now: Instant) -> None:
        """FLIP-571: the remainder is the new timeout less what has passed since the timeout was armed."""
        pending.deadline = pending.started_at + self._configuration.timeout_ms
        pending.generation += 1
        if pending.deadline <= now.rel_ms:
            self._abort(pending, Reason.CHECKPOINT_EXPIRED, now)
            return
        self._stats.report_deadline(pending.id, pending.timestamp + self._configuration.timeout_ms)
        self._schedule_canceller(pending)

    def _schedule_canceller(self, pending: PendingCheckpoint) -> None:
        timer = TimerId(TimerKind.CANCELLER, pending.id)
        self._emit(out.ScheduleTimer(timer, pending.generation, pending.deadline))

    def _on_backlog_changed(self, event: on.BacklogChanged, now: Instant) -> None:
        if self._periodic.set_backlog(event.processing_backlog, now.rel_ms):
            self._schedule_tick()

    # --- timers

    def _on_timer_fired(self, event: on.TimerFired, now: Instant) -> None:
        match event.timer.kind:
            case TimerKind.PERIODIC:
                self._on_tick(event.generation, now)
            case TimerKind.CANCELLER:
                self._on_canceller(event.timer.checkpoint_id, event.generation, now)
            case TimerKind.FINAL_CHECKPOINT:
                if event.generation == self._final_generation and self._executions.all_wait_for_final_checkpoint:
                    self._request_final_checkpoint(now)
                    self._decide(now)

    def _on_tick(self, generation: int, now: Instant) -> None:
        if not self._periodic.is_current(generation):
            return
        due = self._periodic.next_at
        if due is not None and now.rel_ms >= due:
            self._periodic.tick(now.rel_ms)
            self._offer(None, CheckpointProperties(), now, periodic=True)
        self._schedule_tick()
        self._decide(now)

    def _on_canceller(self, checkpoint_id: int, generation: int, now: Instant) -> None:
        pending = self._pending.get(checkpoint_id)
        if pending is None or not pending.can_abort or pending.generation != generation:
            return
        if now.rel_ms < pending.deadline:
            self._schedule_canceller(pending)
            return
        self._abort(pending, Reason.CHECKPOINT_EXPIRED, now)
        self._decide(now)

    # --- triggering

    def _on_trigger_requested(self, event: on.TriggerRequested, now: Instant) -> None:
        if self._state in (CoordinatorState.CLOSING, CoordinatorState.CLOSED):
            self._fail_request(event.request_id, Reason.CHECKPOINT_COORDINATOR_SHUTDOWN)
        elif self._state is not CoordinatorState.RUNNING:
            self._stats.report_failed_without_id()
            self._fail_request(event.request_id, Reason.NOT_ALL_REQUIRED_TASKS_RUNNING)
        else:
            self._offer(event.request_id, event.properties, now, target_directory=event.target_directory)
            self._decide(now)

    def _offer(
        self,
        request_id: str | None,
        properties: CheckpointProperties,
        now: Instant,
        periodic: bool = False,
        target_directory: str | None = None,
    ) -> None:
        self._sequence += 1
        # A savepoint is aligned; beside an unaligned checkpoint it would be overtaken, so it waits for its turn then.
        forced = properties.is_savepoint and not self._configuration.unaligned_enabled
        request = TriggerRequest(
            request_id, properties, self._sequence, now.rel_ms, periodic, forced, target_directory
        )
        dropped = self._decider.offer(request)
        if dropped is not None:
            self._fail_request(dropped.request_id, Reason.TOO_MANY_CHECKPOINT_REQUESTS)

    def _decide(self, now: Instant) -> None:
        """Triggers what may go. Called after everything that can make room."""
        while True:
            load = Load(
                triggering=self._triggering is not None,
                cleaning=self._cleaner.busy,
                pending=len(self._pending),
                max_concurrent=self._configuration.max_concurrent,
                pause_ends_at=self._periodic.pause_ends_at,
            )
            verdict, request = self._decider.next(load, now.rel_ms)
            if request is None:
                return
            if verdict is Verdict.GO:
                self._trigger(request, now)
            else:
                self._periodic.postpone_to_pause_end()
                self._schedule_tick()

    def _trigger(self, request: TriggerRequest, now: Instant) -> None:
        plan = self._executions.plan()
        allowed = self._configuration.checkpoints_after_tasks_finish or not self._executions.any_finished
        if not plan.to_wait_for or not allowed:
            self._stats.report_failed_without_id()
            self._fail_request(request.request_id, Reason.NOT_ALL_REQUIRED_TASKS_RUNNING)
            return
        deadline = now.rel_ms + self._configuration.timeout_ms
        pending = PendingCheckpoint(self._ids.next_id(), request, plan, now.abs_ms, now.rel_ms, deadline)
        self._pending[pending.id] = pending
        self._triggering = pending.id
        self._report_pending(pending)
        self._schedule_canceller(pending)
        self._emit(out.InitializeLocation(pending.id, request.properties, request.target_directory))

    def _report_pending(self, pending: PendingCheckpoint) -> None:
        properties = pending.request.properties
        unaligned = self._configuration.unaligned_enabled and properties.type is CheckpointType.CHECKPOINT
        self._stats.report_pending(
            pending.id,
            pending.timestamp,
            CheckpointType.UNALIGNED_CHECKPOINT if unaligned else properties.type,
            properties.savepoint_format,
            {vertex.id: vertex.parallelism for vertex in self._vertices},
            pending.timestamp + self._configuration.timeout_ms,
        )
        for vertex_id, subtask in sorted(pending.plan.finished):
            self._stats.report_subtask(pending.id, vertex_id, SubtaskStats(subtask, pending.timestamp, 0, 0, 0, 0))

    def _on_location_ready(self, event: on.LocationReady, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or pending.state is not PendingState.LOCATING:
            self._cleaner.discard_location(event.checkpoint_id, event.directory)
            return
        pending.directory = event.directory
        pending.state = PendingState.PENDING
        self._triggering = None
        self._emit(
            out.TriggerSources(pending.id, pending.timestamp, self._options(pending), pending.plan.to_trigger)
        )
        self._decide(now)

    def _options(self, pending: PendingCheckpoint) -> CheckpointOptions:
        properties = pending.request.properties
        configuration = self._configuration
        assert pending.directory is not None
        if properties.is_savepoint:
            return CheckpointOptions(properties, pending.directory)
        if not self._store.latest_is_owned:
            # Nothing may refer into a snapshot that stays the user's.
            properties = replace(properties, full=True)
        return CheckpointOptions(
            properties,
            pending.directory,
            configuration.unaligned_enabled,
            configuration.aligned_timeout_ms,
            configuration.max_inflight_data_bytes,
        )

    def _on_location_failed(self, event: on.LocationFailed, now: Instant) -> None:
        self._abort_by_message(event.checkpoint_id, Reason.IO_EXCEPTION, event.message, now)

    def _on_trigger_failed(self, event: on.TriggerFailed, now: Instant) -> None:
        self._abort_by_message(event.checkpoint_id, Reason.TRIGGER_CHECKPOINT_FAILURE, event.message, now)

    def _abort_by_message(self, checkpoint_id: int, reason: Reason, message: str, now: Instant) -> None:
        pending = self._pending.get(checkpoint_id)
        if pending is not None and pending.can_abort:
            self._abort(pending, reason, now, message)
            self._decide(now)

    # --- messages of tasks

    def _on_acknowledged(self, event: on.Acknowledged, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is None:
            self._on_late_acknowledgement(event)
            return
        result = pending.classify(event.execution) if event.directory == pending.directory else AckResult.UNKNOWN
        if result is AckResult.DUPLICATE:
            return
        if result is AckResult.UNKNOWN:
            self._discard_state(event)
            return
        if not pending.request.properties.is_savepoint and not self._register(event):
            self._discard_state(event)
            self._abort(pending, Reason.CHECKPOINT_ASYNC_EXCEPTION, now, "a shared state file changed its content")
            self._decide(now)
            return
        pending.acknowledge(event.execution, event.state, event.finished_operators)
        self._report_subtask(event, now, completed=True)
        self._finalize_ready(now)
        self._decide(now)

    def _on_late_acknowledgement(self, event: on.Acknowledged) -> None:
        """After an abort the state goes. An acknowledgement of a completed one is a repetition: its files are used."""
        if not self._ended.was_aborted(event.checkpoint_id):
            return
        self._register(event)
        self._discard_state(event)

    def _register(self, event: on.Acknowledged) -> bool:
        try:
            self._registry.register(event.checkpoint_id, event.state)
        except SharedStateConflictError:
            return False
        return True

    def _discard_state(self, event: on.Acknowledged) -> None:
        if event.state.files():
            self._emit(out.DiscardState(event.checkpoint_id, event.directory, event.state))

    def _on_declined(self, event: on.Declined, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or not pending.can_abort or event.execution not in pending.plan.to_wait_for:
            return
        self._abort(pending, event.reason, now, event.message, event.execution)
        self._decide(now)

    def _on_progress(self, event: on.ProgressReported, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is not None and event.execution in pending.awaited:
            self._report_subtask(event, now, completed=False)

    def _report_subtask(self, event: on.Acknowledged | on.ProgressReported, now: Instant, completed: bool) -> None:
        metrics = event.metrics
        state = event.state if isinstance(event, on.Acknowledged) else SubtaskState()
        self._stats.report_subtask(
            event.checkpoint_id,
            event.execution.vertex_id,
            SubtaskStats(
                index=event.execution.subtask,
                ack_timestamp=now.abs_ms,
                state_size=state.bytes,
                checkpointed_size=metrics.checkpointed_size,
                sync_duration=metrics.sync_duration,
                async_duration=metrics.async_duration,
                alignment_buffered=metrics.alignment_buffered,
                processed_data=metrics.processed_data,
                persisted_data=metrics.persisted_data,
                alignment_duration=metrics.alignment_duration,
                start_delay=metrics.start_delay,
                unaligned=metrics.unaligned,
                completed=completed,
            ),
        )
