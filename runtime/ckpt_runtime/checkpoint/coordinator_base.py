"""What the parts of the checkpoint coordinator share: its fields, and how a checkpoint is aborted. Pure.

The coordinator is one machine, written in layers: this one, ``coordinator_triggering`` (when and what to trigger),
``coordinator_completion`` (acknowledgements to notification, restore, shutdown) and ``coordinator`` (the door).
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint.aborted_checkpoints import AbortedCheckpoints
from ckpt_runtime.checkpoint.cleaner import CheckpointCleaner
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, EdgeDescriptor, VertexDescriptor
from ckpt_runtime.checkpoint.completed_checkpoint_store import CompletedCheckpointStore, RetainedCheckpoint
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.effects import Effect
from ckpt_runtime.checkpoint.events import TimerId, TimerKind
from ckpt_runtime.checkpoint.execution_view import ExecutionView
from ckpt_runtime.checkpoint.executions import ExecutionId
from ckpt_runtime.checkpoint.failure_manager import CheckpointFailureManager
from ckpt_runtime.checkpoint.failure_reason import CheckpointFailureReason
from ckpt_runtime.checkpoint.id_counter import CheckpointIdCounter, CheckpointIdSource
from ckpt_runtime.checkpoint.instant import Instant
from ckpt_runtime.checkpoint.pending_checkpoint import PendingCheckpoint, PendingState
from ckpt_runtime.checkpoint.periodic_trigger import PeriodicTrigger
from ckpt_runtime.checkpoint.request_decider import CheckpointRequestDecider, TriggerRequest
from ckpt_runtime.checkpoint.shared_state_registry import SharedStateRegistry
from ckpt_runtime.checkpoint.statistics import CheckpointStatsSnapshot
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker
from ckpt_runtime.graph.job_graph import JobGraph

FINAL_CHECKPOINT_RETRY_MS = 1_000
"""Without periodic checkpoints a failed last checkpoint is tried again after this pause."""


class CoordinatorState(Enum):
    """CREATED: no deployment runs. RESTORING: waits for writes in flight. CLOSING: waits for clean-up."""

    CREATED = "created"
    RUNNING = "running"
    RESTORING = "restoring"
    CLOSING = "closing"
    CLOSED = "closed"


class UnexpectedEventError(RuntimeError):
    """An event that the coordinator cannot take in its state: a bug of its shell. Nothing has changed."""

    def __init__(self, state: CoordinatorState, event: object) -> None:
        super().__init__(f"{event!r} is not possible in state {state.value}")


class CoordinatorBase:
    """Fields and the abort of a checkpoint; see ``coordinator.CheckpointCoordinator``."""

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
        self._edges = tuple(EdgeDescriptor.of(edge) for edge in graph.edges)
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
        self._aborted = AbortedCheckpoints()
        self._triggering: int | None = None
        self._locating: set[int] = set()
        self._first_own_id: int | None = None
        self._last_own_id = 0
        self._searched_up_to = 0
        self._final_generation = 0
        self._final_requested = False
        self._sequence = 0
        for entry in self._store.entries:
            self._adopt(entry)

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
    def latest_is_owned(self) -> bool:
        """False while what a restore would use is a snapshot that stays the user's."""
        return self._store.latest_is_owned

    @property
    def retained(self) -> tuple[RetainedCheckpoint, ...]:
        """Oldest first."""
        return self._store.entries

    @property
    def referenced(self) -> tuple[str, ...]:
        """Directories of the snapshots that a restore may need, here or by the next driver.

        With those that are on their way to be retained, and those whose pointers are not certainly gone.
        """
        pending = (pending.directory for pending in self._pending.values() if pending.directory is not None)
        retained = (entry.checkpoint.directory for entry in self._store.entries)
        return (*retained, *pending, *self._cleaner.pointed_to)

    @property
    def pending_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._pending))

    def pending_request(self, checkpoint_id: int) -> TriggerRequest | None:
        """What a pending checkpoint was triggered for."""
        pending = self._pending.get(checkpoint_id)
        return None if pending is None else pending.request

    def statistics(self) -> CheckpointStatsSnapshot:
        """A frozen view for REST."""
        return self._stats.snapshot()

    def _emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def _adopt(self, entry: RetainedCheckpoint) -> None:
        """Takes over a checkpoint of an earlier driver or job."""
        self._ids.advance_to(entry.checkpoint.id + 1)
        self._registry.register_all(entry.checkpoint.id, entry.checkpoint.states.values(), entry.owned)

    def _abortable(self) -> list[PendingCheckpoint]:
        """Oldest first."""
        return [self._pending[number] for number in sorted(self._pending) if self._pending[number].can_abort]

    def _is_finalizing(self) -> bool:
        """Whether a checkpoint that will enter the store, or a synchronous savepoint, is being written."""
        return any(
            not pending.can_abort and pending.request.properties.notifies_and_subsumes
            for pending in self._pending.values()
        )

    def _fail_request(
        self,
        request_id: str | None,
        reason: CheckpointFailureReason,
        message: str = "",
        pending: PendingCheckpoint | None = None,
    ) -> None:
        if request_id is None:
            return
        checkpoint_id = None if pending is None else pending.id
        reached_tasks = pending is not None and pending.state is not PendingState.LOCATING
        self._emit(out.RequestFailed(request_id, reason, message or reason.message, checkpoint_id, reached_tasks))

    def _abort(
        self,
        pending: PendingCheckpoint,
        reason: CheckpointFailureReason,
        now: Instant,
        detail: str = "",
        reporter: ExecutionId | None = None,
    ) -> None:
        """Ends a checkpoint without completing it. ``reporter`` is the task that declined, if one did."""
        message = f"{reason.message} {detail}".rstrip()
        del self._pending[pending.id]
        self._aborted.add(pending.id)
        if self._triggering == pending.id:
            self._triggering = None
        self._fail_request(pending.request.request_id, reason, message, pending)
        self._emit(out.CancelTimer(TimerId(TimerKind.CANCELLER, pending.id)))
        if pending.directory is not None and not self._fenced:
            self._cleaner.discard_location(pending.id, pending.directory)
        self._stats.report_failed(pending.id, now.abs_ms, message)
        fails_job = self._failures.on_failure(
            reason,
            pending.request.properties,
            pending.id,
            task_level=reporter is not None,
            attempt_is_running=reporter is not None and self._executions.is_running(reporter),
        )
        if fails_job and self._state is CoordinatorState.RUNNING:
            times = 0 if pending.request.properties.is_synchronous else self._failures.failed_jobs
            self._emit(out.FailJob(reason, message, times))
        if pending.state is not PendingState.LOCATING:
            tasks = pending.plan.to_wait_for
            self._emit(out.NotifyAborted(pending.id, pending.timestamp, self._store.latest_id, tasks))
        if pending.request.final:
            self._retry_final_checkpoint(now)

    def _retry_final_checkpoint(self, now: Instant) -> None:
        """Tasks that wait for their last checkpoint wait for ever if none is triggered periodically."""
        if self._periodic.next_at is None and self._executions.all_wait_for_final_checkpoint:
            self._final_generation += 1
            timer = TimerId(TimerKind.FINAL_CHECKPOINT)
            self._emit(out.ScheduleTimer(timer, self._final_generation, now.rel_ms + FINAL_CHECKPOINT_RETRY_MS))
