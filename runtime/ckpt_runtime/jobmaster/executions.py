"""The present attempt of a job's subtasks: states, times and metrics, for the job master's decisions and for REST."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.contract.jobs import Backpressure, SubtaskPressure
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.jobmaster.gateway_values import NOT_YET, ExecutionState, MetricSeries, SubtaskDetails, VertexDetails
from ckpt_runtime.jobmaster.metric_table import OPERATOR, TASK, OperatorFigures, values_with_rates
from ckpt_runtime.network.control_messages import SubtaskMeasures

TERMINAL = frozenset({ExecutionState.FINISHED, ExecutionState.CANCELED, ExecutionState.FAILED})


_MAX_NAME_CHARS = 80
_SOURCES = frozenset({"source", "enumerator", "range_reader"})
_MOVES = ("rows_in", "rows_out", "slices")
"""The figures that change whenever a row moves."""


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
        """Records the figures of a worker's heartbeat."""
        now = wall_clock_ms()
        for figures in tasks:
            execution = self.executions.get((figures.vertex_id, figures.subtask))
            if execution is not None:
                execution.measurement.update(figures, now)

    @property
    def pending_rows(self) -> int | None:
        """The rows that wait to be read, summed over all sources that report them; None if none has reported yet."""
        current = (execution.measurement.current for execution in self.executions.values())
        counts = [figures.pending_rows for figures in current if figures is not None]
        known = [count for count in counts if count is not None]
        return sum(known) if known else None

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
                found[index] = _task_values(measurement)
                for node, values in _operator_values(vertex, measurement):
                    prefix = metric_prefix(node)
                    found[index].update((f"{prefix}.{name}", value) for name, value in values.items())
                found[index].update(current.state)
        return found

    def series(self, job_id: str, job_name: str) -> Iterator[MetricSeries]:
        """The metrics of all measured subtasks that have not ended, and of their operators."""
        for vertex in self.graph.vertices:
            for index in range(vertex.parallelism):
                execution = self.executions[vertex.id, index]
                measurement = execution.measurement
                if measurement.current is None or execution.state in TERMINAL:
                    continue
                labels = {
                    "host": execution.endpoint.rpartition(":")[0],
                    "tm_id": execution.slot,
                    "job_id": job_id,
                    "job_name": job_name,
                    "task_id": vertex.id,
                    "task_name": vertex.name,
                    "task_attempt_num": str(execution.id.attempt),
                    "subtask_index": str(index),
                }
                yield MetricSeries(labels, of_operator=False, values=_task_values(measurement))
                for node, values in _operator_values(vertex, measurement):
                    of_node = {"operator_id": node.uid, "operator_name": node.name}
                    yield MetricSeries({**labels, **of_node}, of_operator=True, values=values)


def limited(series: Iterable[MetricSeries], limit: int) -> tuple[tuple[MetricSeries, ...], int]:
    """The series of at most ``limit`` values, those of subtasks first, and the number of values left out."""
    kept, left, left_out = [], limit, 0
    for one in sorted(series, key=lambda one: one.of_operator):
        if len(one.values) <= left:
            left -= len(one.values)
            kept.append(one)
        else:
            left, left_out = 0, left_out + len(one.values)
    return tuple(kept), left_out


def _task_values(measurement: _Measurement) -> dict[str, float]:
    assert measurement.current is not None
    return values_with_rates(TASK, measurement.current, measurement.previous, measurement.span_ms)


def _operator_values(vertex: JobVertex, measurement: _Measurement) -> Iterator[tuple[OperatorNode, dict[str, float]]]:
    assert measurement.current is not None
    current = _operator_figures(vertex, measurement.current)
    previous = [] if measurement.previous is None else _operator_figures(vertex, measurement.previous)
    for node, figures, earlier in zip_longest(vertex.operators[: len(current)], current, previous):
        yield node, values_with_rates(OPERATOR, figures, earlier, measurement.span_ms)


def _operator_figures(vertex: JobVertex, measures: SubtaskMeasures) -> list[OperatorFigures]:
    """The figures of each operator of the chain; none unless the worker has reported as many."""
    rows, last = measures.operator_rows, len(vertex.operators) - 1
    if len(rows) != len(vertex.operators):
        return []
    received = (rows[0] if vertex.operators[0].kind in _SOURCES else measures.rows_in, *rows[:-1])
    return [
        OperatorFigures(
            received[place],
            rows[place],
            None if place else measures.input_watermark,
            measures.output_watermark if place == last else None,
            None if place else measures.pending_rows,
            None if place else measures.alignment_drift_ms,
        )
        for place in range(len(rows))
    ]


def metric_prefix(node: OperatorNode) -> str:
    """The operator's name in front of its metrics. Clients put it into query strings without escaping it."""
    name = re.sub(r"[^A-Za-z0-9_-]", "_", node.name)[:_MAX_NAME_CHARS]
    return name if node.kind not in _SOURCES or name.startswith("Source__") else f"Source__{name}"


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
