"""Turns ticks and requests into trigger messages and keeps the deadlines of pending checkpoints. Pure.

Owns the request queue, the ids, and the directories being created. Ids increase and are never reused; the shell makes
their counter durable.

States of a pending checkpoint: LOCATING (its directory is being created) -> PENDING (waits for acknowledgements, then
for finalisation) -> WRITING (metadata) -> STORING (the HA pointer; checkpoints only) -> gone. From WRITING on, only a
write that certainly failed aborts the checkpoint.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, EdgeDescriptor, VertexDescriptor
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, SettingsInForce
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.executions import CheckpointPlan, ExecutionId, ExecutionView, SubtaskKey
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.checkpoint.retention import Retention
from ckpt_runtime.checkpoint.schedule import CheckpointSchedule
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics, CheckpointStatsTracker, SubtaskStats

if TYPE_CHECKING:
    from ckpt_runtime.checkpoint.completion import CheckpointFailures

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
        """Whether it can be aborted. While it is being finalised, only the storage's answer can end it."""
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
                execution.key: _in_flight_only(state) if execution.key in finished else state
                # Sorted, so that the document does not depend on the order of acknowledgements.
                for execution, state in sorted(self.acknowledged.items())
                if execution.key not in finished or state.has_channel_state
            },
            finished=frozenset(finished),
            edges=tuple(EdgeDescriptor.of(edge) for edge in graph.edges),
            lineage=lineage,
        )
        return self.completed


class PendingCheckpoints:
    """The pending checkpoints of a job and the most recently aborted ids, to recognise late messages.

    ``first_id`` and ``last_id`` are the ids that this driver has triggered so far. The outcome of each checkpoint is
    reported to ``statistics``.
    """

    def __init__(self, statistics: CheckpointStatsTracker) -> None:
        self._stats = statistics
        self._pending: dict[int, PendingCheckpoint] = {}
        self._aborted: OrderedDict[int, None] = OrderedDict()
        self.first_id: int | None = None
        self.last_id = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingCheckpoint]:
        return iter(self._pending.values())

    @property
    def ids(self) -> tuple[int, ...]:
        """The ids in ascending order."""
        return tuple(sorted(self._pending))

    @property
    def is_triggering(self) -> bool:
        """Whether the directory of a checkpoint is being created."""
        return any(pending.state is PendingState.LOCATING for pending in self)

    @property
    def is_finalizing(self) -> bool:
        """Whether a checkpoint that will enter the store, or a synchronous savepoint, is being written."""
        return any(not pending.can_abort and pending.request.properties.notifies_and_subsumes for pending in self)

    def get(self, checkpoint_id: int) -> PendingCheckpoint | None:
        return self._pending.get(checkpoint_id)

    def abortable(self) -> list[PendingCheckpoint]:
        """The checkpoints that can be aborted, oldest first."""
        return [self._pending[number] for number in self.ids if self._pending[number].can_abort]

    def was_aborted(self, checkpoint_id: int) -> bool:
        """Whether the id was aborted; False for a forgotten or completed id."""
        return checkpoint_id in self._aborted

    def add(self, pending: PendingCheckpoint) -> None:
        """Adds a checkpoint that has been triggered."""
        self._pending[pending.id] = pending
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
        del self._pending[pending.id]
        self._stats.report_completed(pending.id, pending.metadata.directory)

    def aborted(self, pending: PendingCheckpoint, at_abs_ms: int, message: str, *, is_failure: bool = True) -> None:
        """Forgets an aborted checkpoint; one that ``is_failure`` stays in the statistics with its message."""
        del self._pending[pending.id]
        if is_failure:
            self._stats.report_failed(pending.id, at_abs_ms, message)
        else:
            self._stats.report_withdrawn(pending.id)
        self._aborted[pending.id] = None
        if len(self._aborted) > ABORTED_REMEMBERED:
            self._aborted.popitem(last=False)

    def clear(self) -> None:
        """Forgets all pending checkpoints; another driver now decides their outcome."""
        self._pending.clear()


def _in_flight_only(state: SubtaskState) -> SubtaskState:
    return SubtaskState(bytes=state.in_flight_bytes, inputs=state.inputs, outputs=state.outputs)


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
        self._queue: list[TriggerRequest] = []

    def offer(self, request: TriggerRequest) -> TriggerRequest | None:
        """Queues a request. Returns the dropped one, if any (the new one, or a periodic one it displaced)."""
        # One queued tick is enough: two in a row would snapshot the same state twice.
        if request.periodic and any(queued.periodic for queued in self._queue):
            return request
        if len(self._queue) >= CAPACITY:
            if not self._queue[-1].periodic:
                return request
            # A tick recurs by itself; a user's request does not.
            dropped = self._queue.pop()
            insort(self._queue, request, key=lambda queued: queued.priority)
            return dropped
        insort(self._queue, request, key=lambda queued: queued.priority)
        return None

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._queue

    def next(self, load: Load, now: int) -> tuple[RequestVerdict, TriggerRequest | None]:
        """Removes the head of the queue if it may run now, or if it is periodic and within the minimum pause."""
        # If deleting is slower than taking checkpoints, triggering waits; otherwise files to delete would pile up.
        if not self._queue or load.triggering or load.cleaning > load.max_concurrent:
            return RequestVerdict.WAIT, None
        head = self._queue[0]
        unbounded = head.properties.is_savepoint and not load.savepoints_wait
        if not unbounded and load.pending >= load.max_concurrent:
            return RequestVerdict.WAIT, None
        del self._queue[0]
        # Only periodic requests observe the pause; a user's request ignores it, as in Flink.
        if head.periodic and load.pause_ends_at > now:
            return RequestVerdict.TOO_EARLY, head
        return RequestVerdict.GO, head

    def drain(self) -> list[TriggerRequest]:
        """Empties the queue."""
        drained, self._queue = self._queue, []
        return drained

    def drop_periodic(self) -> None:
        """Forgets a queued tick (its timer was stopped)."""
        self._queue = [queued for queued in self._queue if not queued.periodic]


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
        self._decider = CheckpointRequestDecider()
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
        dropped = self._decider.offer(
            TriggerRequest(request_id, properties, now.rel_ms, self._sequence, periodic, final, target_directory)
        )
        if dropped is not None:
            self._failures.refuse(dropped, Reason.TOO_MANY_CHECKPOINT_REQUESTS, now)

    # --- settings, start and stop

    def settings_replaced(self, before: CheckpointConfiguration, now: Instant) -> None:
        """Applies the settings in force to what is scheduled and pending. ``before`` are those that they replace."""
        settings = self._in_force.settings
        if before.schedule != settings.schedule:
            self._schedule.configure(settings, now)
            self._forget_tick()
        if before.timeout_ms != settings.timeout_ms:
            for pending in self._pending.abortable():
                self._move_deadline(pending, now)

    def on_backlog_changed(self, event: on.BacklogChanged, now: Instant) -> None:
        self._schedule.set_backlog(event.processing_backlog, now)
        self._forget_tick()

    def _forget_tick(self) -> None:
        # A tick may be queued until there is capacity; it must not run once periodic checkpoints are off.
        if not self._schedule.has_tick:
            self._decider.drop_periodic()

    def stop(self, reason: Reason, now: Instant) -> None:
        """Stops the ticks and aborts all pending and queued checkpoints."""
        self._schedule.stop()
        # The queue is drained first: the aborts below free capacity, which queued requests would get after this event.
        for request in self._decider.drain():
            self._failures.refuse(request, reason, now)
        for pending in self._pending.abortable():
            self._failures.abort(pending, reason, now)

    # --- deadlines

    def _move_deadline(self, pending: PendingCheckpoint, now: Instant) -> None:
        """Applies a new timeout: it counts from when the timeout was armed, so elapsed time is deducted (FLIP-571)."""
        self._pending.move_deadline(pending, pending.started_at + self._in_force.settings.timeout_ms)
        if pending.deadline <= now.rel_ms:
            self._failures.abort(pending, Reason.CHECKPOINT_EXPIRED, now)
        else:
            self._schedule_canceller(pending)

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
        while not self._decider.is_empty:
            load = Load(
                triggering=self._pending.is_triggering,
                cleaning=self._retention.cleaning,
                pending=len(self._pending),
                max_concurrent=self._in_force.settings.max_concurrent,
                pause_ends_at=self._schedule.pause_ends_at,
                savepoints_wait=self._in_force.settings.unaligned_enabled,
            )
            verdict, request = self._decider.next(load, now.rel_ms)
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
