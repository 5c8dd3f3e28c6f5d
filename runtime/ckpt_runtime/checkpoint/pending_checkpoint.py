"""A checkpoint between its trigger and its end: who has acknowledged, and its deadline. Keeps books, decides nothing.

States: LOCATING (its directory is being made) -> PENDING (acknowledgements, then its turn to be finalised) -> WRITING
(metadata) -> STORING (the HA pointer; checkpoints only) -> gone. From WRITING on only a write that certainly failed
aborts it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, EdgeDescriptor, VertexDescriptor
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.checkpoint.plan_calculator import CheckpointPlan
from ckpt_runtime.checkpoint.request_decider import TriggerRequest
from ckpt_runtime.checkpoint.state_handles import OperatorStateMode, SubtaskState


class PendingState(Enum):
    """See the module's description."""

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
    """``timestamp`` is the wall clock of the trigger; ``started_at`` the monotonic moment its timeout was armed."""

    id: int
    request: TriggerRequest
    plan: CheckpointPlan
    timestamp: int
    started_at: int
    deadline: int
    generation: int = 0
    state: PendingState = PendingState.LOCATING
    directory: str | None = None
    shared_directory: str = ""
    acknowledged: dict[ExecutionId, SubtaskState] = field(default_factory=dict)
    finished_operators: set[ExecutionId] = field(default_factory=set)
    awaited: set[ExecutionId] = field(init=False)
    completed: CompletedCheckpoint | None = None
    resolve_attempts: int = 0

    def __post_init__(self) -> None:
        self.awaited = set(self.plan.to_wait_for)

    @property
    def can_abort(self) -> bool:
        """Finalising ones can only be ended by the answer of the storage."""
        return self.state not in (PendingState.WRITING, PendingState.STORING)

    @property
    def metadata(self) -> CompletedCheckpoint:
        """What :meth:`complete` made."""
        assert self.completed is not None
        return self.completed

    def classify(self, execution: ExecutionId) -> AckResult:
        if execution in self.awaited:
            return AckResult.SUCCESS
        return AckResult.DUPLICATE if execution in self.acknowledged else AckResult.UNKNOWN

    def acknowledge(self, execution: ExecutionId, state: SubtaskState, finished_operators: bool) -> None:
        """Only for an awaited attempt."""
        self.awaited.remove(execution)
        self.acknowledged[execution] = state
        if finished_operators:
            self.finished_operators.add(execution)

    def partly_finished_union_state(self, vertices: Iterable[VertexDescriptor]) -> str | None:
        """Names a vertex whose union list state is incomplete because only some of its subtasks finished, if any.

        Union state is restored from all subtasks together, so a snapshot without some of them is wrong.
        """
        for vertex in vertices:
            keys = {(vertex.id, index) for index in range(vertex.parallelism)}
            called_finish = {execution.key for execution in self.finished_operators} & keys
            ended = keys & self.plan.finished
            partly = 0 < len(ended) < len(keys) or 0 < len(called_finish | ended) < len(keys)
            if partly and any(
                _has_union_state(state)
                for execution, state in self.acknowledged.items()
                if execution.vertex_id == vertex.id
            ):
                return vertex.name
        return None

    def complete(
        self, job_id: str, vertices: tuple[VertexDescriptor, ...], edges: tuple[EdgeDescriptor, ...], now_abs: int
    ) -> CompletedCheckpoint:
        """The metadata of this checkpoint; of finished subtasks it has a marker, and in-flight data if there is any."""
        assert self.directory is not None
        on_restore = self.plan.finished_on_restore
        finished: set[SubtaskKey] = set(self.plan.finished)
        finished.update(
            (vertex.id, index) for vertex in vertices if vertex.id in on_restore for index in range(vertex.parallelism)
        )
        self.completed = CompletedCheckpoint(
            id=self.id,
            job_id=job_id,
            timestamp=self.timestamp,
            completion_timestamp=now_abs,
            directory=self.directory,
            properties=self.request.properties,
            vertices=vertices,
            states={
                execution.key: _in_flight_only(state) if execution.key in finished else state
                for execution, state in sorted(self.acknowledged.items())
                if execution.key not in finished or state.has_channel_state
            },
            finished=frozenset(finished),
            edges=edges,
        )
        return self.completed


def _in_flight_only(state: SubtaskState) -> SubtaskState:
    return SubtaskState(bytes=state.in_flight_bytes, inputs=state.inputs, outputs=state.outputs)


def _has_union_state(state: SubtaskState) -> bool:
    return any(
        entry.mode is OperatorStateMode.UNION for operator in state.operators.values() for entry in operator.lists
    )
