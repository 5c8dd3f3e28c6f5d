"""The running deployment, and whom a checkpoint triggers and awaits when some have finished (FLIP-147). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckpt_runtime.checkpoint.events import JobRunning
from ckpt_runtime.checkpoint.executions import ExecutionId, SubtaskKey
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, Partitioning


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """``to_wait_for`` are the running subtasks, which are also the ones to notify; ``finished`` ended before.

    ``graph`` is that of the deployment: the checkpoint is completed as one of this graph, whatever comes later.
    """

    graph: JobGraph
    to_trigger: tuple[ExecutionId, ...]
    to_wait_for: tuple[ExecutionId, ...]
    finished: frozenset[SubtaskKey]
    finished_on_restore: frozenset[str] = frozenset()


class ExecutionView:
    """One deployment of a job graph; empty between deployments."""

    def __init__(self, graph: JobGraph) -> None:
        self._graph = graph
        self._executions: dict[SubtaskKey, ExecutionId] = {}
        self._finished: set[SubtaskKey] = set()
        self._at_end_of_data: set[SubtaskKey] = set()
        self._finished_on_restore: frozenset[str] = frozenset()

    def replace_graph(self, graph: JobGraph) -> None:
        """The next deployment is one of another graph. Only between deployments."""
        self._graph = graph

    @property
    def is_deployed(self) -> bool:
        """Whether a deployment runs, so that a failure can still reach it."""
        return bool(self._executions)

    def deployed(self, event: JobRunning) -> None:
        """Raises ValueError unless there is exactly one execution for each subtask of the graph."""
        executions = {execution.key: execution for execution in event.executions}
        expected = {(vertex.id, index) for vertex in self._graph.vertices for index in range(vertex.parallelism)}
        if executions.keys() != expected or len(executions) != len(event.executions):
            raise ValueError(f"executions {sorted(executions)} are not the subtasks {sorted(expected)}")
        self._executions = executions
        self._finished = {execution.key for execution in event.finished}
        self._at_end_of_data = set()
        self._finished_on_restore = event.finished_on_restore

    def gone(self) -> None:
        """All tasks of the deployment are stopping."""
        self._executions = {}
        self._finished = set()
        self._at_end_of_data = set()

    def is_running(self, execution: ExecutionId) -> bool:
        return self._executions.get(execution.key) == execution and execution.key not in self._finished

    def finished(self, execution: ExecutionId) -> bool:
        """Notes the end of a subtask; returns False for one that is not running."""
        if not self.is_running(execution):
            return False
        self._finished.add(execution.key)
        return True

    def end_of_data(self, execution: ExecutionId) -> bool:
        """Notes that a subtask waits for its last checkpoint; returns False for one that is not running."""
        if not self.is_running(execution):
            return False
        self._at_end_of_data.add(execution.key)
        return True

    @property
    def all_wait_for_final_checkpoint(self) -> bool:
        """Whether every subtask has ended or waits for a last checkpoint, and at least one waits."""
        waiting = self._at_end_of_data - self._finished
        return bool(waiting) and len(waiting) + len(self._finished) == len(self._executions)

    @property
    def any_finished(self) -> bool:
        return bool(self._finished)

    def plan(self) -> CheckpointPlan:
        """For the present moment; nothing to wait for when no subtask runs."""
        if not self._executions:
            return CheckpointPlan(self._graph, (), (), frozenset())
        return calculate_plan(self._graph, self._executions, frozenset(self._finished), self._finished_on_restore)


def calculate_plan(
    graph: JobGraph,
    executions: Mapping[SubtaskKey, ExecutionId],
    finished: frozenset[SubtaskKey],
    finished_on_restore: frozenset[str] = frozenset(),
) -> CheckpointPlan:
    """Triggers every running subtask none of whose predecessors runs, and waits for all running ones.

    ``executions`` are the present attempts of all subtasks, ``finished`` those in state FINISHED.
    """
    running_vertices = {
        vertex.id: [index for index in range(vertex.parallelism) if (vertex.id, index) not in finished]
        for vertex in graph.vertices
    }
    to_trigger: list[ExecutionId] = []
    to_wait_for: list[ExecutionId] = []
    for vertex in graph.vertices:
        inputs = graph.inputs(vertex.id)
        for index in running_vertices[vertex.id]:
            execution = executions[vertex.id, index]
            to_wait_for.append(execution)
            if not any(_has_running_predecessor(edge, index, running_vertices) for edge in inputs):
                to_trigger.append(execution)
    return CheckpointPlan(graph, tuple(to_trigger), tuple(to_wait_for), finished, finished_on_restore)


def _has_running_predecessor(edge: JobEdge, index: int, running: Mapping[str, list[int]]) -> bool:
    upstream = running[edge.source]
    if edge.partitioning is Partitioning.FORWARD:
        return index in upstream
    return bool(upstream)
