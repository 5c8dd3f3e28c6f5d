"""The checkpoint coordinator of one job: triggers, collects, completes and aborts checkpoints. A pure machine.

The only entry point is :meth:`CheckpointCoordinator.handle`, which takes an event and the current time and returns
effects. It has no clock, no thread and no I/O, and needs no lock because nothing runs concurrently. The order of
effects is the order in which the shell must start them. Sources: Flink's CheckpointCoordinator, FLIP-147, FLIP-203,
FLIP-571.

The work is done by its parts, none of which knows the coordinator or a part further down:

* ``executions``: the graph and its current deployment
* ``schedule``: when a checkpoint is due
* ``retention``: which checkpoints are kept, and what is deleted when
* ``completion``: the pending checkpoints; from the tasks' messages to a published checkpoint, or to a failed one
* ``triggering``: from a request to the trigger messages
* :class:`Restoring`: the snapshot that the next deployment starts from
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.completion import CheckpointFailures, Completion, PendingCheckpoints, TriggerRequest
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointRetention, SettingsInForce
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import CoordinatorEvent
from ckpt_runtime.checkpoint.executions import ExecutionView
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint, Retention, UnexpectedAnswerError
from ckpt_runtime.checkpoint.schedule import CheckpointSchedule
from ckpt_runtime.checkpoint.statistics import CheckpointStatsSnapshot, CheckpointStatsTracker
from ckpt_runtime.checkpoint.triggering import CheckpointIdCounter, CheckpointIdSource, Triggering
from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.graph.job_graph import JobGraph


@dataclass(slots=True)
class _Restore:
    """A waiting restore request; ``savepoint`` is the one that the job was submitted with, until it is stored.

    ``adding``: the savepoint's pointer is being written. ``abandoned``: the answer is no longer awaited.
    """

    request_id: str
    savepoint: CompletedCheckpoint | None
    owned: bool
    adding: bool = False
    attempts: int = 0
    abandoned: bool = False


class Restoring:
    """Answers with the checkpoint that the next deployment starts from, once no further checkpoint can complete.

    Owns the waiting request; ``emit`` takes the effects. A savepoint that the job starts from gets its pointer before
    the request is answered.
    """

    def __init__(
        self,
        ids: CheckpointIdSource,
        pending: PendingCheckpoints,
        retention: Retention,
        statistics: CheckpointStatsTracker,
        emit: Callable[[Effect], None],
    ) -> None:
        self._ids = ids
        self._pending = pending
        self._retention = retention
        self._stats = statistics
        self._emit = emit
        self._restore: _Restore | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a request has not been answered yet."""
        return self._restore is not None

    @property
    def is_adding(self) -> bool:
        """Whether the pointer of a savepoint is being written."""
        return self._restore is not None and self._restore.adding

    def request(self, event: on.RestoreRequested) -> None:
        """A later request replaces one that has not been answered yet."""
        if self._restore is None:
            self._restore = _Restore(event.request_id, event.savepoint, event.mode is RecoveryClaimMode.CLAIM)
        self._restore.request_id = event.request_id

    def abandon(self) -> None:
        """The job ends: the answer is no longer awaited, but a pointer may still be being written."""
        if self._restore is not None and self._restore.adding:
            self._restore.abandoned = True
        else:
            self._restore = None

    def answer_when_known(self, now: Instant) -> None:
        """Answers the request; the latest checkpoint is only known once no further checkpoint can complete."""
        restore = self._restore
        if restore is None or restore.adding or self._pending.is_finalizing:
            return
        latest = self._retention.latest
        if restore.savepoint is not None and latest is None:
            # The pointer is written first: after a crash before the first checkpoint, the job must restore from this
            # savepoint only.
            restore.adding = True
            # Before the job takes a checkpoint: one with a smaller id would count as older than the savepoint.
            self._ids.advance_to(restore.savepoint.id + 1)
            self._emit(out.AddToStore(restore.savepoint, restore.owned))
            return
        self._restore = None
        if latest is not None:
            self._stats.report_restored(latest.id, now.abs_ms, latest.is_savepoint, latest.directory)
        self._emit(out.RestoreFrom(restore.request_id, latest))

    # --- answers about the savepoint's pointer; the methods return False if the answer is about something else

    def store_added(self, checkpoint_id: int) -> bool:
        if (adding := self._adding(checkpoint_id)) is None:
            return False
        restore, savepoint = adding
        self._retention.adopt(RetainedCheckpoint(savepoint, restore.owned))
        # Answered by `answer_when_known`, which now finds the savepoint as the latest checkpoint.
        restore.adding, restore.savepoint = False, None
        if restore.abandoned:
            self._restore = None
        return True

    def store_failed(self, checkpoint_id: int, message: str) -> bool:
        if (adding := self._adding(checkpoint_id)) is None:
            return False
        restore, _ = adding
        self._restore = None
        if not restore.abandoned:
            self._emit(out.RestoreFailed(restore.request_id, message))
        return True

    def store_unknown(self, checkpoint_id: int) -> bool:
        if (adding := self._adding(checkpoint_id)) is None:
            return False
        restore, savepoint = adding
        restore.attempts += 1
        self._emit(out.ResolveStore(savepoint, restore.attempts, restore.owned))
        return True

    def _adding(self, checkpoint_id: int) -> tuple[_Restore, CompletedCheckpoint] | None:
        """The restore and its savepoint, if the pointer being written has this id."""
        restore = self._restore
        if restore is None or not restore.adding or restore.savepoint is None or restore.savepoint.id != checkpoint_id:
            return None
        return restore, restore.savepoint


SUSPENDED = "SUSPENDED"


class CoordinatorState(Enum):
    """CREATED: no deployment runs. RESTORING: waits for writes in progress. CLOSING: waits for clean-up."""

    CREATED = "created"
    RUNNING = "running"
    RESTORING = "restoring"
    CLOSING = "closing"
    CLOSED = "closed"


class UnexpectedEventError(RuntimeError):
    """The coordinator cannot take the event in its current state: a bug in the shell. Nothing has changed."""

    def __init__(self, state: CoordinatorState, event: object) -> None:
        super().__init__(f"{event!r} is not possible in state {state.value}")


_OPEN = frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING, CoordinatorState.RESTORING})
_ENDING = frozenset({CoordinatorState.CLOSING, CoordinatorState.CLOSED})
_ANY = frozenset(CoordinatorState)
_ACCEPTED_IN: dict[type[Any], frozenset[CoordinatorState]] = {
    on.JobRunning: frozenset({CoordinatorState.CREATED}),
    on.TasksLeftRunning: frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING}),
    on.RestoreRequested: frozenset({CoordinatorState.CREATED, CoordinatorState.RESTORING}),
    on.GraphReplaced: frozenset({CoordinatorState.CREATED, CoordinatorState.RESTORING}),
    on.PeriodicTriggerStopped: frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING}),
    on.PeriodicTriggerStarted: frozenset({CoordinatorState.RUNNING}),
    on.Shutdown: _OPEN | {CoordinatorState.CLOSING},
}


class CheckpointCoordinator:
    """The coordinator of one job. ``recovered`` are the checkpoints with HA pointers at the start, in any order.

    ``first_delay_ms`` is how long after the first start of a deployment the first periodic checkpoint is due; it is
    limited to [minimum pause, interval] and defaults to the interval.
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
        lineage: str | None = None,
    ) -> None:
        configuration = configuration.effective()
        self._in_force = in_force = SettingsInForce(configuration)
        ids = CheckpointIdCounter() if ids is None else ids
        stats = CheckpointStatsTracker() if statistics is None else statistics
        self._stats = stats
        self.state = CoordinatorState.CREATED
        self._job_status = ""
        self._fenced = False
        self._stopping = False
        self._outlive_cancelling = False
        self._effects: list[Effect] = []
        emit = self._effects.append
        self._executions = view = ExecutionView(graph)
        self._pending = pending = PendingCheckpoints(stats)
        self._schedule = schedule = CheckpointSchedule(configuration, first_delay_ms, view, emit)
        self._retention = retention = Retention(job_id, in_force, recovered, stats, emit)
        self._failures = failures = CheckpointFailures(in_force, pending, view, schedule, retention, stats, emit)
        self._triggering = Triggering(in_force, ids, pending, view, schedule, retention, failures, emit)
        self._completion = Completion(job_id, lineage, pending, schedule, retention, failures, stats, emit)
        self._restoring = Restoring(ids, pending, retention, stats, emit)
        for entry in retention.entries:
            ids.advance_to(entry.checkpoint.id + 1)
        self._handlers = self._by_event()

    def _by_event(self) -> dict[type[Any], Callable[[Any, Instant], None]]:
        triggering = self._triggering
        return {
            on.JobRunning: self._on_job_running,
            on.TasksLeftRunning: self._on_tasks_left_running,
            on.SubtaskFinished: self._on_subtask_finished,
            on.EndOfDataReached: self._on_end_of_data,
            on.RestoreRequested: self._on_restore_requested,
            on.PeriodicTriggerStopped: lambda _, now: triggering.stop(Reason.CHECKPOINT_COORDINATOR_SUSPEND, now),
            on.PeriodicTriggerStarted: self._on_periodic_started,
            on.Shutdown: self._on_shutdown,
            on.ConfigurationPatched: self._on_configuration_patched,
            on.RetentionAsked: self._on_retention_asked,
            on.GraphReplaced: lambda event, _: self._executions.replace_graph(event.graph),
            on.BacklogChanged: triggering.on_backlog_changed,
            on.TriggerRequested: self._on_trigger_requested,
            on.CheckpointWanted: triggering.on_wanted,
            on.TimerFired: triggering.on_timer_fired,
            on.LocationReady: triggering.on_location_ready,
            on.LocationFailed: triggering.on_location_failed,
            on.TriggerFailed: triggering.on_trigger_failed,
            on.Acknowledged: self._completion.on_acknowledged,
            on.Declined: self._completion.on_declined,
            on.ProgressReported: self._completion.on_progress,
            on.MetadataWritten: self._completion.on_metadata_written,
            on.MetadataFailed: self._completion.on_metadata_failed,
            on.MetadataUnknown: self._completion.on_metadata_unknown,
            on.StoreAdded: self._on_store_added,
            on.StoreFailed: self._on_store_failed,
            on.StoreUnknown: self._on_store_unknown,
            on.StoreRemoved: self._retention.on_store_removed,
            on.StoreRemoveFailed: self._retention.on_store_remove_failed,
            on.CleanupDone: self._retention.on_cleanup_done,
            on.LeftoversFound: lambda event, _: self._retention.leftovers_found(event, self._pending.first_id),
        }

    @property
    def configuration(self) -> CheckpointConfiguration:
        """The effective settings."""
        return self._in_force.settings

    @property
    def latest_checkpoint(self) -> CompletedCheckpoint | None:
        """The checkpoint that a restore would use now, ignoring writes in progress."""
        return self._retention.latest

    @property
    def latest_is_owned(self) -> bool:
        """Whether the job owns the snapshot that a restore would use now; also true if there is none."""
        return self._retention.latest_is_owned

    @property
    def retained(self) -> tuple[RetainedCheckpoint, ...]:
        """The retained checkpoints, oldest first."""
        return self._retention.entries

    @property
    def referenced(self) -> tuple[str, ...]:
        """Directories of the snapshots that a restore by this driver or the next one may need.

        This includes pending checkpoints and checkpoints whose pointers may still exist.
        """
        pending = (each.directory for each in self._pending.values() if each.directory is not None)
        return (*self._retention.directories, *pending)

    @property
    def pending_ids(self) -> tuple[int, ...]:
        return tuple(self._pending)

    def pending_request(self, checkpoint_id: int) -> TriggerRequest | None:
        """The request that a pending checkpoint was triggered for."""
        pending = self._pending.get(checkpoint_id)
        return None if pending is None else pending.request

    def statistics(self) -> CheckpointStatsSnapshot:
        """A frozen view for REST."""
        return self._stats.snapshot()

    def handle(self, event: CoordinatorEvent, now: Instant) -> list[Effect]:
        """Takes one event and returns the effects to carry out, in order.

        Raises :class:`UnexpectedEventError` if the state does not allow the event; nothing has changed then.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise UnexpectedEventError(self.state, event)
        if self.state is CoordinatorState.CLOSED and self._fenced:
            # Another driver is the leader: late messages change nothing here, and no file is touched.
            if isinstance(event, on.TriggerRequested):
                self._failures.fail_request(event.request_id, Reason.CHECKPOINT_COORDINATOR_SHUTDOWN)
        elif self.state in _ACCEPTED_IN.get(type(event), _ANY):
            try:
                handler(event, now)
            except UnexpectedAnswerError:
                raise UnexpectedEventError(self.state, event) from None
            self._go_on(event, now)
        else:
            raise UnexpectedEventError(self.state, event)
        # Copied: the parts hold a reference to `append` of this list, so it is emptied and never replaced.
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def _go_on(self, event: CoordinatorEvent, now: Instant) -> None:
        """Continues everything that may have waited for the event; does nothing if the event changed nothing.

        This is done in one place, so that no part has to know which other parts wait for it.
        """
        # The order matters: a write started here makes a restore wait, and closing waits for both.
        if self._pending:
            self._completion.finalize_what_is_ready(now)
        if self.state is CoordinatorState.RESTORING:
            self._restoring.answer_when_known(now)
            if not self._restoring.is_waiting:
                self.state = CoordinatorState.CREATED
        if self.state is CoordinatorState.CLOSING and isinstance(event, _CLOSING_WAITS_FOR):
            self._continue_closing()
        # Last, when the numbers of pending checkpoints and of those being cleaned are final.
        if self._triggering.requests.queue:
            self._triggering.trigger_queued(now)

    # --- the job's life

    def _on_job_running(self, event: on.JobRunning, now: Instant) -> None:
        self._stopping = False
        self._executions.deployed(event.executions, event.finished, event.finished_on_restore)
        self.state = CoordinatorState.RUNNING
        self._failures.deployed()
        self._schedule.deployed()
        self._schedule.start(now)

    def _on_tasks_left_running(self, event: on.TasksLeftRunning, now: Instant) -> None:
        self.state = CoordinatorState.CREATED
        self._leave_deployment(Reason.CHECKPOINT_COORDINATOR_SUSPEND, now)

    def _leave_deployment(self, reason: Reason, now: Instant) -> None:
        # Cleared before the aborts below: an abort during a deployment could fail a job that is already failing.
        self._executions.gone()
        self._schedule.undeployed()
        self._triggering.stop(reason, now)

    def _on_subtask_finished(self, event: on.SubtaskFinished, now: Instant) -> None:
        if self._executions.finished(event.execution):
            self._completion.subtask_finished(event.execution, now)
            self._triggering.request_final(now)

    def _on_end_of_data(self, event: on.EndOfDataReached, now: Instant) -> None:
        if self._executions.end_of_data(event.execution, event.waits):
            self._triggering.request_final(now)

    def _on_periodic_started(self, event: on.PeriodicTriggerStarted, now: Instant) -> None:
        self._stopping = False
        if not self._schedule.is_running:
            self._schedule.start(now)
            self._triggering.request_final(now)

    def _on_trigger_requested(self, event: on.TriggerRequested, now: Instant) -> None:
        if self.state in _ENDING:
            self._failures.fail_request(event.request_id, Reason.CHECKPOINT_COORDINATOR_SHUTDOWN)
        elif self.state is not CoordinatorState.RUNNING:
            self._failures.tasks_not_running(event.request_id)
        elif self._stopping and not event.properties.is_synchronous:
            # Refused during a stop with savepoint: sources that were only stopped would count as finished.
            self._failures.fail_request(event.request_id, Reason.CHECKPOINT_COORDINATOR_SUSPEND)
        else:
            self._stopping = event.properties.is_synchronous
            self._triggering.request(event, now)

    # --- settings and graph of the job

    def _on_configuration_patched(self, event: on.ConfigurationPatched, now: Instant) -> None:
        if self.state in _ENDING:
            return  # the job ended while the settings were being persisted
        before = self._in_force.settings
        settings = self._in_force.settings = self._with_retention(event.configuration.effective())
        if before.schedule != settings.schedule:
            self._triggering.reschedule(now)
        if before.timeout_ms != settings.timeout_ms and self._pending:
            self._triggering.move_deadlines(now)

    def _on_retention_asked(self, event: on.RetentionAsked, now: Instant) -> None:
        if self.state not in _ENDING:
            self._outlive_cancelling = True
            self._in_force.settings = self._with_retention(self._in_force.settings)

    def _with_retention(self, configuration: CheckpointConfiguration) -> CheckpointConfiguration:
        if not self._outlive_cancelling:
            return configuration
        return replace(configuration, retention=CheckpointRetention.RETAIN_ON_CANCELLATION)

    # --- restore

    def _on_restore_requested(self, event: on.RestoreRequested, now: Instant) -> None:
        self._retention.find_leftovers(self._pending.last_id)
        self.state = CoordinatorState.RESTORING
        self._restoring.request(event)

    def _on_store_added(self, event: on.StoreAdded, now: Instant) -> None:
        if not self._restoring.store_added(event.checkpoint_id):
            self._completion.on_store_added(event, now)

    def _on_store_failed(self, event: on.StoreFailed, now: Instant) -> None:
        if not self._restoring.store_failed(event.checkpoint_id, event.message):
            self._completion.on_store_failed(event, now)

    def _on_store_unknown(self, event: on.StoreUnknown, now: Instant) -> None:
        if not self._restoring.store_unknown(event.checkpoint_id):
            self._completion.on_store_unknown(event, now)

    # --- shutdown

    def _on_shutdown(self, event: on.Shutdown, now: Instant) -> None:
        if self.state is CoordinatorState.CLOSING and not event.fenced:
            raise UnexpectedEventError(self.state, event)
        self.state = CoordinatorState.CLOSING
        self._job_status = event.job_status
        self._fenced = event.fenced
        if event.fenced:
            self._retention.fence()
        self._restoring.abandon()
        self._leave_deployment(Reason.CHECKPOINT_COORDINATOR_SHUTDOWN, now)
        if not event.fenced:
            return
        # Writes in progress may still take effect; only the leading driver, which will read them, can know.
        for pending in self._pending.values():
            request_id = pending.request.request_id
            self._failures.fail_request(request_id, Reason.CHECKPOINT_COORDINATOR_SHUTDOWN, pending=pending)
        self._pending.clear()
        self.state = CoordinatorState.CLOSED
        self._effects.append(out.ShutdownComplete())

    def _continue_closing(self) -> None:
        """Once nothing is being written, releases the retained checkpoints; then waits for the clean-up."""
        if self._pending or self._triggering.is_locating or self._restoring.is_adding:
            return
        # A suspended job continues in another driver, from these checkpoints.
        if self._job_status != SUSPENDED:
            self._retention.release(self._job_status)
        if self._retention.cleaning == 0:
            self._retention.delete_unused_shared_files()
            self.state = CoordinatorState.CLOSED
            self._effects.append(out.ShutdownComplete(self._retention.keeps_nothing))


_CLOSING_WAITS_FOR = (
    on.Shutdown,
    on.LocationFailed,
    on.MetadataWritten,
    on.MetadataFailed,
    on.StoreAdded,
    on.StoreFailed,
    on.StoreRemoved,
    on.CleanupDone,
)
"""LocationReady is not listed: a directory created too late is deleted, and closing waits for that CleanupDone."""
