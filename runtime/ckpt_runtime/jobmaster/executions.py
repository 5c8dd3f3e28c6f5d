"""The present attempt of a job's subtasks: states, times and metrics, for the job master's decisions and for REST."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.contract.jobs import Backpressure, SubtaskPressure
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex
from ckpt_runtime.jobmaster.gateway_values import (
    NOT_YET,
    ExecutionState,
    SubtaskDetails,
    VertexDetails,
)
from ckpt_runtime.network.control_messages import SubtaskMeasures

TERMINAL = frozenset({ExecutionState.FINISHED, ExecutionState.CANCELED, ExecutionState.FAILED})


_COUNTERS = {
    "numRecordsIn": "rows_in",
    "numRecordsOut": "rows_out",
    "numBytesIn": "bytes_in",
    "numBytesOut": "bytes_out",
    "numLateRecordsDropped": "late_rows_dropped",
    "accumulateBusyTimeMs": "busy_ms",
    "accumulateIdleTimeMs": "idle_ms",
    "accumulateBackPressuredTimeMs": "backpressured_ms",
}
_RATES = {
    "numRecordsInPerSecond": "rows_in",
    "numRecordsOutPerSecond": "rows_out",
    "numBytesInPerSecond": "bytes_in",
    "numBytesOutPerSecond": "bytes_out",
    "busyTimeMsPerSecond": "busy_ms",
    "idleTimeMsPerSecond": "idle_ms",
    "backPressuredTimeMsPerSecond": "backpressured_ms",
}
"""Flink's names of metrics, and the figures of a heartbeat that they come from."""

_MOVES = ("rows_in", "rows_out", "slices")
"""The figures that change when a row has moved."""


def subtask_pressure(index: int, attempt: int, backpressured: float, idle: float, busy: float) -> SubtaskPressure:
    """The pressure of a subtask, from its shares of time."""
    level = _level(backpressured)
    return SubtaskPressure(
        index=index,
        attempt=attempt,
        level=level,
        level_in_kebab=level,
        backpressured=backpressured,
        idle=idle,
        busy=busy,
    )


def vertex_pressure(measured_at_ms: int, subtasks: Sequence[SubtaskPressure]) -> Backpressure:
    """The pressure of a vertex; before the first measurement it has no subtasks."""
    if not subtasks:
        return Backpressure(status="deprecated")
    level = _level(max(subtask.backpressured for subtask in subtasks))
    return Backpressure(
        status="ok", level=level, level_in_kebab=level, measured_at_ms=measured_at_ms, subtasks=tuple(subtasks)
    )


def _level(ratio: float) -> str:
    return "high" if ratio > _HIGH_PRESSURE else "low" if ratio > _LOW_PRESSURE else "ok"


def wall_clock_ms() -> int:
    """Reads milliseconds since the epoch, for display and statistics; never for deadlines."""
    return time.time_ns() // 1_000_000


@dataclass(slots=True)
class _Measurement:
    """Keeps the last two heartbeats' figures of one subtask: their difference is the present load.

    All durations are by the worker's clock: a late heartbeat does not change a rate. ``still_ms`` is for how long no
    row has moved, and ``stalled_ms`` for how long no row has moved although work waited at every heartbeat.
    """

    at_ms: int = NOT_YET
    current: SubtaskMeasures | None = None
    previous: SubtaskMeasures | None = None
    span_ms: float = 0.0
    still_ms: float = 0.0
    stalled_ms: float = 0.0

    def update(self, figures: SubtaskMeasures, now_ms: int) -> None:
        previous = self.previous = self.current
        self.current, self.at_ms = figures, now_ms
        self.span_ms = 0.0 if previous is None else max(0.0, figures.measured_ms - previous.measured_ms)
        moved = previous is None or any(getattr(figures, name) != getattr(previous, name) for name in _MOVES)
        self.still_ms = 0.0 if moved else self.still_ms + self.span_ms
        self.stalled_ms = 0.0 if moved or not figures.work_waits else self.stalled_ms + self.span_ms

    def rate(self, name: str) -> float:
        """Gives the change per second over the last heartbeat interval."""
        if not self.span_ms or self.previous is None:
            return 0.0
        change: float = getattr(self.current, name) - getattr(self.previous, name)
        return max(0.0, change) / self.span_ms * 1000


@dataclass(slots=True)
class Execution:
    """One attempt of one subtask."""

    id: ExecutionId
    endpoint: str = ""
    slot: str = ""
    state: ExecutionState = ExecutionState.CREATED
    timestamps: dict[ExecutionState, int] = field(default_factory=dict)
    measurement: _Measurement = field(default_factory=_Measurement)

    def enter(self, state: ExecutionState) -> None:
        self.state = state
        self.timestamps[state] = wall_clock_ms()


_HIGH_PRESSURE, _LOW_PRESSURE = 0.5, 0.1


class ExecutionGraph:
    """Holds all subtasks of a job, in their present attempt."""

    def __init__(self, graph: JobGraph) -> None:
        self.executions: dict[SubtaskKey, Execution] = {}
        self.reset(0, graph)

    def reset(self, attempt: int, graph: JobGraph) -> None:
        """Starts a new attempt of every subtask."""
        self.graph = graph
        self.executions = {
            (vertex.id, index): Execution(ExecutionId(vertex.id, index, attempt))
            for vertex in self.graph.vertices
            for index in range(vertex.parallelism)
        }
        self.enter_all(ExecutionState.CREATED)

    def enter_all(self, state: ExecutionState) -> None:
        """Puts every subtask that has not ended into a state."""
        for execution in self.executions.values():
            if execution.state not in TERMINAL:
                execution.enter(state)

    def counts(self) -> Counter[ExecutionState]:
        return Counter(execution.state for execution in self.executions.values())

    def measured(self, tasks: Iterable[SubtaskMeasures]) -> None:
        """Takes a worker's heartbeat."""
        now = wall_clock_ms()
        for figures in tasks:
            execution = self.executions.get((figures.vertex_id, figures.subtask))
            if execution is not None:
                execution.measurement.update(figures, now)

    def vertex_details(self, vertex: JobVertex) -> VertexDetails:
        subtasks = tuple(_subtask_details(self.executions[vertex.id, index]) for index in range(vertex.parallelism))
        started = [subtask.start_time_ms for subtask in subtasks if subtask.start_time_ms != NOT_YET]
        ended = [subtask.end_time_ms for subtask in subtasks]
        return VertexDetails(
            vertex_id=vertex.id,
            name=vertex.name,
            parallelism=vertex.parallelism,
            max_parallelism=vertex.greatest_parallelism,
            status=_aggregate([subtask.state for subtask in subtasks]),
            start_time_ms=min(started, default=NOT_YET),
            end_time_ms=NOT_YET if NOT_YET in ended else max(ended),
            subtasks=subtasks,
        )

    def pressure(self, vertex: JobVertex) -> Backpressure:
        """The shares of time in the last measuring window; the level of the vertex is the highest of its subtasks."""
        subtasks = []
        measured_at = NOT_YET
        for index in range(vertex.parallelism):
            execution = self.executions[vertex.id, index]
            measurement = execution.measurement
            if measurement.previous is None or not measurement.span_ms:
                continue
            measured_at = max(measured_at, measurement.at_ms)
            shares = [min(1.0, measurement.rate(f"{name}_ms") / 1000) for name in ("backpressured", "idle", "busy")]
            subtasks.append(subtask_pressure(index, execution.id.attempt, *shares))
        return vertex_pressure(measured_at, subtasks)

    def vertex_metrics(self, vertex: JobVertex) -> dict[int, dict[str, float]]:
        """Gives values by Flink's metric names for each subtask."""
        found: dict[int, dict[str, float]] = {}
        for index in range(vertex.parallelism):
            measurement = self.executions[vertex.id, index].measurement
            current = measurement.current
            if current is not None:
                found[index] = {
                    **{name: getattr(current, figure) for name, figure in _COUNTERS.items()},
                    **{name: measurement.rate(figure) for name, figure in _RATES.items()},
                }
                found[index].update(current.state)
                if current.debloated_buffer_size is not None:
                    found[index]["debloatedBufferSize"] = current.debloated_buffer_size
        return found


def _subtask_details(execution: Execution) -> SubtaskDetails:
    measurement = execution.measurement
    started = execution.timestamps.get(ExecutionState.DEPLOYING, NOT_YET)
    ended = execution.timestamps.get(execution.state, NOT_YET) if execution.state in TERMINAL else NOT_YET
    return SubtaskDetails(
        index=execution.id.subtask,
        attempt=execution.id.attempt,
        state=execution.state,
        endpoint=execution.endpoint,
        slot_agent_id=execution.slot,
        start_time_ms=started,
        end_time_ms=ended,
        state_timestamps_ms=dict(execution.timestamps),
        measures=measurement.current,
        still_ms=measurement.still_ms,
        stalled_ms=measurement.stalled_ms,
    )


_PRECEDENCE = (
    ExecutionState.FAILED,
    ExecutionState.CANCELING,
    ExecutionState.CANCELED,
    ExecutionState.INITIALIZING,
    ExecutionState.DEPLOYING,
    ExecutionState.SCHEDULED,
    ExecutionState.CREATED,
    ExecutionState.RUNNING,
    ExecutionState.FINISHED,
)


def _aggregate(states: list[ExecutionState]) -> ExecutionState:
    """The state of a vertex: the first state in order of precedence that any of its subtasks is in."""
    return next(state for state in _PRECEDENCE if state in states)
