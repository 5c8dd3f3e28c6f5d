"""Turns ticks and requests into trigger messages and keeps the deadlines of pending checkpoints. Pure.

Owns the request queue, the ids, and the directories being created. Ids increase and are never reused; the shell makes
their counter durable.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completion import (
    CheckpointFailures,
    PendingCheckpoint,
    PendingCheckpoints,
    PendingState,
    TriggerRequest,
)
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, SettingsInForce
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.executions import ExecutionView
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.checkpoint.retention import Retention
from ckpt_runtime.checkpoint.schedule import CheckpointSchedule


class CheckpointIdUnavailableError(RuntimeError):
    """No id is available: high availability does not answer, or this driver is no longer the leader."""


class CheckpointIdSource(Protocol):
    """The source of a coordinator's checkpoint ids."""

    def next_id(self) -> int:
        """A new id, greater than all before. Raises :class:`CheckpointIdUnavailableError`."""
        ...

    def advance_to(self, at_least: int) -> None:
        """Later ids are ``at_least`` or greater."""
        ...


class CheckpointIdCounter:
    """The in-memory source; starts at 1, as in Flink."""

    def __init__(self, first: int = 1) -> None:
        self._next = first

    def next_id(self) -> int:
        self._next += 1
        return self._next - 1

    def advance_to(self, at_least: int) -> None:
        self._next = max(self._next, at_least)


CAPACITY = 1_000


class RequestVerdict(Enum):
    """What to do with the head of the queue."""

    WAIT = "wait"
    GO = "go"
    TOO_EARLY = "too early"


@dataclass(frozen=True, slots=True)
class Load:
    """The load at the time of the decision. ``pause_ends_at`` is monotonic time.

    ``savepoints_wait``: ``max_concurrent`` applies to savepoints too. This holds while unaligned checkpoints are on: a
    savepoint is aligned and no barrier overtakes a barrier, so until it is taken no later checkpoint turns unaligned.
    """

    triggering: bool
    cleaning: int
    pending: int
    max_concurrent: int
    pause_ends_at: int
    savepoints_wait: bool = False


class CheckpointRequestDecider:
    """Decides which queued request is triggered next, and whether it may be now (Flink's CheckpointRequestDecider).

    The queue is at most ``CAPACITY`` long, and holds at most one periodic request. It is asked after every change.
    """

    def __init__(self) -> None:
        self.queue: list[TriggerRequest] = []

    def offer(self, request: TriggerRequest) -> TriggerRequest | None:
        """Queues a request. Returns the dropped one, if any (the new one, or a periodic one it displaced)."""
        # One queued tick is enough: two in a row would snapshot the same state twice.
        if request.periodic and any(queued.periodic for queued in self.queue):
            return request
        if len(self.queue) >= CAPACITY:
            if not self.queue[-1].periodic:
                return request
            # A tick recurs by itself; a user's request does not.
            dropped = self.queue.pop()
            insort(self.queue, request, key=lambda queued: queued.priority)
            return dropped
        insort(self.queue, request, key=lambda queued: queued.priority)
        return None

    def next(self, load: Load, now: int) -> tuple[RequestVerdict, TriggerRequest | None]:
        """Removes the head of the queue if it may run now, or if it is periodic and within the minimum pause."""
        # If deleting is slower than taking checkpoints, triggering waits; otherwise files to delete would pile up.
        if not self.queue or load.triggering or load.cleaning > load.max_concurrent:
            return RequestVerdict.WAIT, None
        head = self.queue[0]
        unbounded = head.properties.is_savepoint and not load.savepoints_wait
        if not unbounded and load.pending >= load.max_concurrent:
            return RequestVerdict.WAIT, None
        del self.queue[0]
        # Only periodic requests observe the pause; a user's request ignores it, as in Flink.
        if head.periodic and load.pause_ends_at > now:
            return RequestVerdict.TOO_EARLY, head
        return RequestVerdict.GO, head

    def drain(self) -> list[TriggerRequest]:
        """Empties the queue."""
        drained, self.queue = self.queue, []
        return drained

    def drop_periodic(self) -> None:
        """Forgets a queued tick (its timer was stopped)."""
        self.queue = [queued for queued in self.queue if not queued.periodic]


class Triggering:
    """Triggers checkpoints and adds them to ``pending``; ``emit`` takes the effects."""

    def __init__(
        self,
        in_force: SettingsInForce,
        ids: CheckpointIdSource,
        pending: PendingCheckpoints,
        executions: ExecutionView,
        schedule: CheckpointSchedule,
        retention: Retention,
        failures: CheckpointFailures,
        emit: Callable[[Effect], None],
    ) -> None:
        self._in_force = in_force
        self._ids = ids
        self._pending = pending
        self._executions = executions
        self._schedule = schedule
        self._retention = retention
        self._failures = failures
        self._emit = emit
        self.requests = CheckpointRequestDecider()
        self._sequence = 0
        self._locating: set[int] = set()

    @property
    def is_locating(self) -> bool:
        """Whether a directory is being created, even for a checkpoint that is already aborted."""
        return bool(self._locating)

    # --- sources of requests

    def request(self, event: on.TriggerRequested, now: Instant) -> None:
        """Queues a requested checkpoint; a deployment is running."""
        self._offer(event.request_id, event.properties, now, target_directory=event.target_directory)

    def request_final(self, now: Instant) -> None:
        """Requests the final checkpoint of a bounded job when all tasks wait for it."""
        if self._schedule.claim_final():
            self._offer(None, CheckpointProperties(), now, final=True)

    def on_wanted(self, event: on.CheckpointWanted, now: Instant) -> None:
        """Requests a checkpoint for a source unless one is in progress; the source repeats its request after that
        one."""
        if self._schedule.is_running and not self.requests.queue and not self._pending:
            self._offer(None, CheckpointProperties(), now)

    def on_timer_fired(self, event: on.TimerFired, now: Instant) -> None:
        match event.timer.kind:
            case TimerKind.PERIODIC:
                if self._schedule.tick(event.generation, now):
                    self._offer(None, CheckpointProperties(), now, periodic=True)
            case TimerKind.CANCELLER:
                self._expire(event.timer.checkpoint_id, event.generation, now)
            case TimerKind.FINAL_CHECKPOINT:
                if self._schedule.final_timer_fired(event.generation, now):
                    self._offer(None, CheckpointProperties(), now, final=True)

    def _offer(
        self,
        request_id: str | None,
        properties: CheckpointProperties,
        now: Instant,
        *,
        periodic: bool = False,
        final: bool = False,
        target_directory: str | None = None,
    ) -> None:
        self._sequence += 1
        properties = replace(properties, incremental=self._in_force.settings.incremental)
        dropped = self.requests.offer(
            TriggerRequest(request_id, properties, now.rel_ms, self._sequence, periodic, final, target_directory)
        )
        if dropped is not None:
            self._failures.refuse(dropped, Reason.TOO_MANY_CHECKPOINT_REQUESTS, now)

    # --- settings, start and stop

    def reschedule(self, now: Instant) -> None:
        """Applies the settings in force to periodic checkpoints."""
        self._schedule.configure(self._in_force.settings, now)
        self._forget_tick()

    def move_deadlines(self, now: Instant) -> None:
        """Applies a new timeout: it counts from when the timeout was armed, so elapsed time is deducted (FLIP-571)."""
        for pending in self._pending.abortable():
            self._pending.move_deadline(pending, pending.started_at + self._in_force.settings.timeout_ms)
            if pending.deadline <= now.rel_ms:
                self._failures.abort(pending, Reason.CHECKPOINT_EXPIRED, now)
            else:
                self._schedule_canceller(pending)

    def on_backlog_changed(self, event: on.BacklogChanged, now: Instant) -> None:
        self._schedule.set_backlog(event.processing_backlog, now)
        self._forget_tick()

    def _forget_tick(self) -> None:
        # A tick may be queued until there is capacity; it must not run once periodic checkpoints are off.
        if not self._schedule.has_tick:
            self.requests.drop_periodic()

    def stop(self, reason: Reason, now: Instant) -> None:
        """Stops the ticks and aborts all pending and queued checkpoints."""
        self._schedule.stop()
        # The queue is drained first: the aborts below free capacity, which queued requests would get after this event.
        for request in self.requests.drain():
            self._failures.refuse(request, reason, now)
        for pending in self._pending.abortable():
            self._failures.abort(pending, reason, now)

    # --- deadlines

    def _schedule_canceller(self, pending: PendingCheckpoint) -> None:
        timer = TimerId(TimerKind.CANCELLER, pending.id)
        self._emit(out.ScheduleTimer(timer, pending.generation, pending.deadline))

    def _expire(self, checkpoint_id: int, generation: int, now: Instant) -> None:
        pending = self._pending.get(checkpoint_id)
        if pending is None or not pending.can_abort or pending.generation != generation:
            return
        # A timer may fire early, so the deadline decides and not the timer.
        if now.rel_ms < pending.deadline:
            self._schedule_canceller(pending)
        elif (until := rescued_until(pending, self._in_force.settings, now.rel_ms)) is not None:
            self._pending.extend(pending, until)
            self._schedule_canceller(pending)
        else:
            self._failures.abort(pending, Reason.CHECKPOINT_EXPIRED, now)

    # --- triggering

    def trigger_queued(self, now: Instant) -> None:
        """Triggers queued requests as capacity allows; called after every event that can free capacity."""
        while self.requests.queue:
            load = Load(
                triggering=self._pending.is_triggering,
                cleaning=self._retention.cleaning,
                pending=len(self._pending),
                max_concurrent=self._in_force.settings.max_concurrent,
                pause_ends_at=self._schedule.pause_ends_at,
                savepoints_wait=self._in_force.settings.unaligned_enabled,
            )
            verdict, request = self.requests.next(load, now.rel_ms)
            if request is None:
                return
            if verdict is RequestVerdict.GO:
                self._trigger(request, now)
            else:
                self._schedule.postpone_to_pause_end()

    def _trigger(self, request: TriggerRequest, now: Instant) -> None:
        plan = self._executions.plan()
        allowed = self._in_force.settings.checkpoints_after_tasks_finish or not self._executions.any_finished
        if not plan.to_wait_for or not allowed:
            self._failures.tasks_not_running(request.request_id)
            return
        try:
            number = self._ids.next_id()
        except CheckpointIdUnavailableError as error:
            self._failures.fail_without_id(request, str(error), now)
            return
        deadline = now.rel_ms + self._in_force.settings.timeout_ms
        pending = PendingCheckpoint(number, request, plan, now.abs_ms, now.rel_ms, deadline)
        self._pending.add(pending)
        if request.properties.is_savepoint and request.properties.is_incremental:
            # Pinned before any task is triggered: files that it will copy must not be deleted until then.
            self._retention.pin(pending.id)
        # Kept apart from `pending`, which drops an aborted checkpoint although its directory is still created.
        self._locating.add(pending.id)
        # Armed before the directory exists: storage that hangs while creating it must not outlast the timeout.
        self._schedule_canceller(pending)
        self._emit(out.InitializeLocation(pending.id, request.properties, request.target_directory))

    def on_location_ready(self, event: on.LocationReady, now: Instant) -> None:
        self._locating.discard(event.checkpoint_id)
        pending = self._pending.get(event.checkpoint_id)
        # Aborted in the meantime. The abort had no directory to delete yet.
        if pending is None or pending.state is not PendingState.LOCATING:
            self._retention.discard_location(event.checkpoint_id, event.directory)
            return
        pending.directory = event.directory
        pending.state = PendingState.PENDING
        options = self._options(pending.request.properties, event)
        self._emit(out.TriggerSources(pending.id, pending.timestamp, options, pending.plan.to_trigger))

    def _options(self, properties: CheckpointProperties, location: on.LocationReady) -> CheckpointOptions:
        if properties.is_savepoint:
            return CheckpointOptions(properties, location.directory)
        if not self._retention.latest_is_owned:
            # No checkpoint may refer to files of a snapshot that the user still owns.
            properties = replace(properties, full=True)
        return CheckpointOptions(
            properties,
            location.directory,
            self._in_force.settings.unaligned_enabled,
            self._in_force.settings.aligned_timeout_ms,
            self._in_force.settings.max_inflight_data_bytes,
            location.shared_directory,
            self._executions.all_wait_for_final_checkpoint,
            self._in_force.settings.exactly_once,
        )

    def on_location_failed(self, event: on.LocationFailed, now: Instant) -> None:
        self._locating.discard(event.checkpoint_id)
        self._abort(event, Reason.IO_EXCEPTION, now)

    def on_trigger_failed(self, event: on.TriggerFailed, now: Instant) -> None:
        self._abort(event, Reason.TRIGGER_CHECKPOINT_FAILURE, now)

    def _abort(self, event: on.LocationFailed | on.TriggerFailed, reason: Reason, now: Instant) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is not None and pending.can_abort:
            self._failures.abort(pending, reason, now, event.message)


def rescued_until(pending: PendingCheckpoint, configuration: CheckpointConfiguration, now_ms: int) -> int | None:
    """The new deadline in monotonic milliseconds of a checkpoint whose timeout has passed; None if it has to expire.
    This automates a change that a user would make with FLIP-571. Called only when a timeout passes, so none expires
    earlier.

    A checkpoint is nearly done if at least ``rescue_min_progress`` percent of its subtasks have acknowledged. It gets
    ``rescue_extension_ms`` more, repeatedly as long as data is persisted in each extension, but never more than
    ``rescue_max_extension_ms`` beyond its timeout.
    """
    if not configuration.rescue_enabled:
        return None
    done, whole = len(pending.acknowledged), len(pending.plan.to_wait_for)
    if done * 100 < configuration.rescue_min_progress * whole or pending.progress == pending.progress_at_extension:
        return None
    end = pending.started_at + configuration.timeout_ms + configuration.rescue_max_extension_ms
    until = min(now_ms + configuration.rescue_extension_ms, end)
    return until if until > now_ms else None
