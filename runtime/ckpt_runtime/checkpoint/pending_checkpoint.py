"""Checkpoints between trigger and end: their acknowledgements and their deadlines. Decides nothing.

States: LOCATING (its directory is being created) -> PENDING (waits for acknowledgements, then for finalisation) ->
WRITING (metadata) -> STORING (the HA pointer; checkpoints only) -> gone. From WRITING on, only a write that certainly
failed aborts the checkpoint.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, EdgeDescriptor, VertexDescriptor
from ckpt_runtime.checkpoint.execution_view import CheckpointPlan
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.state_handles import SubtaskState
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics, SubtaskStats
from ckpt_runtime.checkpoint.statistics_tracker import CheckpointStatsTracker

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
