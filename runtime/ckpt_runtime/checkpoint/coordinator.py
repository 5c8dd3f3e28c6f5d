"""The checkpoint coordinator of one job: triggers, collects, completes and aborts checkpoints. A pure machine.

One door, :meth:`CheckpointCoordinator.handle`: an event and the present moment in, effects out. It has no clock, no
thread and no I/O, and holds no lock because nothing runs beside it. The order of effects is the order in which the
shell must start them. Sources: Flink's CheckpointCoordinator, FLIP-147, FLIP-203, FLIP-571.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import EdgeDescriptor, VertexDescriptor
from ckpt_runtime.checkpoint.completed_checkpoint_store import RetainedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.coordinator_base import CoordinatorState, UnexpectedEventError
from ckpt_runtime.checkpoint.coordinator_completion import CompletionLayer
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import CoordinatorEvent, TimerId, TimerKind
from ckpt_runtime.checkpoint.execution_view import ExecutionView
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.id_counter import CheckpointIdSource
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker
from ckpt_runtime.graph.job_graph import JobGraph

__all__ = ["CheckpointCoordinator", "CoordinatorState", "UnexpectedEventError"]

_OPEN = frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING, CoordinatorState.RESTORING})
_ANY = frozenset(CoordinatorState)
_ACCEPTED_IN: dict[type[Any], frozenset[CoordinatorState]] = {
    on.JobRunning: frozenset({CoordinatorState.CREATED}),
    on.TasksLeftRunning: frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING}),
    on.RestoreRequested: frozenset({CoordinatorState.CREATED, CoordinatorState.RESTORING}),
    on.PeriodicTriggerStopped: frozenset({CoordinatorState.CREATED, CoordinatorState.RUNNING}),
    on.PeriodicTriggerStarted: frozenset({CoordinatorState.RUNNING}),
    on.GraphReplaced: frozenset({CoordinatorState.CREATED, CoordinatorState.RESTORING}),
    on.Shutdown: _OPEN | {CoordinatorState.CLOSING},
}


class CheckpointCoordinator(CompletionLayer):
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
        super().__init__(job_id, graph, configuration, ids, recovered, first_delay_ms, statistics)
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
            on.GraphReplaced: self._on_graph_replaced,
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
            on.LeftoversFound: self._on_leftovers_found,
        }

    def handle(self, event: CoordinatorEvent, now: Instant) -> list[Effect]:
        """Takes one event and returns what is to be done, in order.

        Raises :class:`UnexpectedEventError` when the state does not allow the event; nothing has changed then.
        """
        handler = self._handlers.get(type(event))
        if handler is None:
            raise UnexpectedEventError(self._state, event)
        if self._state is CoordinatorState.CLOSED and self._fenced:
            self._refuse_when_fenced(event)
        elif self._state in _ACCEPTED_IN.get(type(event), _ANY):
            handler(event, now)
        else:
            raise UnexpectedEventError(self._state, event)
        effects = list(self._effects)
        self._effects.clear()
        return effects

    def _refuse_when_fenced(self, event: CoordinatorEvent) -> None:
        """Another driver leads now: late messages change nothing here, and no file is touched."""
        if isinstance(event, on.TriggerRequested):
            self._fail_request(event.request_id, Reason.CHECKPOINT_COORDINATOR_SHUTDOWN)

    # --- the job's life

    def _on_job_running(self, event: on.JobRunning, now: Instant) -> None:
        self._executions.deployed(event)
        self._state = CoordinatorState.RUNNING
        self._failures.on_restart()
        self._final_requested = False
        self._start_periodic(now)

    def _on_graph_replaced(self, event: on.GraphReplaced, now: Instant) -> None:
        self._vertices = tuple(VertexDescriptor.of(vertex) for vertex in event.graph.vertices)
        self._edges = tuple(EdgeDescriptor.of(edge) for edge in event.graph.edges)
        self._executions = ExecutionView(event.graph)

    def _on_tasks_left_running(self, event: on.TasksLeftRunning, now: Instant) -> None:
        self._state = CoordinatorState.CREATED
        self._executions.gone()
        self._emit(out.CancelTimer(TimerId(TimerKind.FINAL_CHECKPOINT)))
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
        self._request_final_checkpoint_once(now)
        self._decide(now)

    def _on_end_of_data(self, event: on.EndOfDataReached, now: Instant) -> None:
        if self._executions.end_of_data(event.execution):
            self._request_final_checkpoint_once(now)
            self._decide(now)

    def _request_final_checkpoint_once(self, now: Instant) -> None:
        if self._executions.all_wait_for_final_checkpoint and not self._final_requested:
            self._request_final_checkpoint(now)

    def _on_periodic_stopped(self, event: on.PeriodicTriggerStopped, now: Instant) -> None:
        self._stop_periodic(Reason.CHECKPOINT_COORDINATOR_SUSPEND, now)

    def _on_periodic_started(self, event: on.PeriodicTriggerStarted, now: Instant) -> None:
        if not self._periodic.running:
            self._start_periodic(now)
