"""When and what the checkpoint coordinator triggers: ticks, requests, deadlines, changed settings. Pure.

A layer of ``coordinator.CheckpointCoordinator``; see ``coordinator_base``.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.coordinator_base import CoordinatorBase, CoordinatorState
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.id_counter import CheckpointIdUnavailableError
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.pending_checkpoint import PendingCheckpoint, PendingState
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.checkpoint.request_decider import Load, TriggerRequest, Verdict
from ckpt_runtime.checkpoint.statistics import SubtaskStats

_PERIODIC = TimerId(TimerKind.PERIODIC)


class TriggeringLayer(CoordinatorBase):
    """From a tick or a request to the trigger messages."""

    # --- periodic trigger

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
            if request.final:
                self._retry_final_checkpoint(now)
        for pending in self._abortable():
            self._abort(pending, reason, now)

    # --- settings

    def _on_configuration_patched(self, event: on.ConfigurationPatched, now: Instant) -> None:
        if self._state in (CoordinatorState.CLOSING, CoordinatorState.CLOSED):
            return  # the job ended while the settings were being persisted
        before, self._configuration = self._configuration, event.configuration.effective()
        self._failures.tolerable_failures = self._configuration.tolerable_failures
        self._store.retained = self._configuration.retained
        if self._periodic.configure(self._configuration, now.rel_ms):
            self._schedule_tick()
            self._retry_final_checkpoint(now)
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
            self._retry_final_checkpoint(now)

    # --- timers

    def _on_timer_fired(self, event: on.TimerFired, now: Instant) -> None:
        match event.timer.kind:
            case TimerKind.PERIODIC:
                self._on_tick(event.generation, now)
            case TimerKind.CANCELLER:
                self._on_canceller(event.timer.checkpoint_id, event.generation, now)
            case TimerKind.FINAL_CHECKPOINT:
                if event.generation == self._final_generation and self._executions.all_wait_for_final_checkpoint:
                    self._on_final_timer(now)

    def _on_final_timer(self, now: Instant) -> None:
        if not self._periodic.running:
            self._retry_final_checkpoint(now)  # a stop is under way; it may come to nothing
            return
        self._request_final_checkpoint(now)
        self._decide(now)

    def _on_tick(self, generation: int, now: Instant) -> None:
        if not self._periodic.is_current(generation):
            return
        due = self._periodic.next_at
        if due is not None and now.rel_ms >= due:
            self._periodic.tick(now.rel_ms)
            self._offer(TriggerRequest(None, CheckpointProperties(), now.rel_ms, periodic=True), now)
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
            directory = event.target_directory
            self._offer(TriggerRequest(event.request_id, event.properties, now.rel_ms, target_directory=directory), now)
            self._decide(now)

    def _request_final_checkpoint(self, now: Instant) -> None:
        self._final_requested = True
        self._offer(TriggerRequest(None, CheckpointProperties(), now.rel_ms, final=True), now)

    def _offer(self, request: TriggerRequest, now: Instant) -> None:
        self._sequence += 1
        request = replace(request, sequence=self._sequence)
        dropped = self._decider.offer(request)
        if dropped is not None:
            self._fail_request(dropped.request_id, Reason.TOO_MANY_CHECKPOINT_REQUESTS)
            if dropped.final:
                self._retry_final_checkpoint(now)

    def _decide(self, now: Instant) -> None:
        """Triggers what may go. Called after everything that can make room."""
        while not self._decider.is_empty:
            load = Load(
                triggering=self._triggering is not None,
                cleaning=self._cleaner.busy,
                pending=len(self._pending),
                max_concurrent=self._configuration.max_concurrent,
                pause_ends_at=self._periodic.pause_ends_at,
                savepoints_wait=self._configuration.unaligned_enabled,
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
        try:
            number = self._ids.next_id()
        except CheckpointIdUnavailableError as error:
            self._fail_without_id(request, str(error), now)
            return
        deadline = now.rel_ms + self._configuration.timeout_ms
        pending = PendingCheckpoint(number, request, plan, now.abs_ms, now.rel_ms, deadline)
        self._pending[pending.id] = pending
        self._triggering = pending.id
        self._locating.add(pending.id)
        if self._first_own_id is None:
            self._first_own_id = pending.id
        self._last_own_id = pending.id
        self._report_pending(pending)
        self._schedule_canceller(pending)
        self._emit(out.InitializeLocation(pending.id, request.properties, request.target_directory))

    def _fail_without_id(self, request: TriggerRequest, detail: str, now: Instant) -> None:
        """Storage failed before the checkpoint had an id: counted each time."""
        message = f"{Reason.IO_EXCEPTION.message} {detail}".rstrip()
        self._stats.report_failed_without_id()
        self._fail_request(request.request_id, Reason.IO_EXCEPTION, message)
        if self._failures.on_failure(Reason.IO_EXCEPTION, request.properties):
            self._emit(out.FailJob(Reason.IO_EXCEPTION, message, self._failures.failed_jobs))
        if request.final:
            self._retry_final_checkpoint(now)

    def _report_pending(self, pending: PendingCheckpoint) -> None:
        properties = pending.request.properties
        self._stats.report_pending(
            pending.id,
            pending.timestamp,
            properties.type,
            properties.savepoint_format,
            {vertex.id: vertex.parallelism for vertex in self._vertices},
            pending.timestamp + self._configuration.timeout_ms,
        )
        for vertex_id, subtask in sorted(pending.plan.finished):
            self._stats.report_subtask(pending.id, vertex_id, SubtaskStats(subtask, pending.timestamp, 0, 0, 0, 0))

    def _on_location_ready(self, event: on.LocationReady, now: Instant) -> None:
        self._locating.discard(event.checkpoint_id)
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or pending.state is not PendingState.LOCATING:
            self._cleaner.discard_location(event.checkpoint_id, event.directory)
            return
        pending.directory = event.directory
        pending.shared_directory = event.shared_directory
        pending.state = PendingState.PENDING
        self._triggering = None
        self._emit(out.TriggerSources(pending.id, pending.timestamp, self._options(pending), pending.plan.to_trigger))
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
            pending.shared_directory,
        )

    def _on_location_failed(self, event: on.LocationFailed, now: Instant) -> None:
        self._locating.discard(event.checkpoint_id)
        self._abort_by_message(event.checkpoint_id, Reason.IO_EXCEPTION, event.message, now)
        self._continue_closing()

    def _continue_closing(self) -> None:
        """Of the next layer."""
        raise NotImplementedError

    def _on_trigger_failed(self, event: on.TriggerFailed, now: Instant) -> None:
        self._abort_by_message(event.checkpoint_id, Reason.TRIGGER_CHECKPOINT_FAILURE, event.message, now)

    def _abort_by_message(self, checkpoint_id: int, reason: Reason, message: str, now: Instant) -> None:
        pending = self._pending.get(checkpoint_id)
        if pending is not None and pending.can_abort:
            self._abort(pending, reason, now, message)
            self._decide(now)
