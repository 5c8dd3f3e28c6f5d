"""Subtasks and their execution attempts, and the running deployment of them. Pure.

:class:`ExecutionView` says which subtasks a checkpoint triggers and awaits if some have finished (FLIP-147).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, Partitioning

SubtaskKey = tuple[str, int]
"""(vertex id, subtask index)"""


@dataclass(frozen=True, slots=True, order=True)
class ExecutionId:
    """One attempt to run one subtask. A redeployed subtask gets a greater ``attempt``."""

    vertex_id: str
    subtask: int
    attempt: int

    @property
    def key(self) -> SubtaskKey:
        return (self.vertex_id, self.subtask)


class TaskState(StrEnum):
    """The state of a subtask in its worker, in Flink's terms."""

    INITIALIZING = "INITIALIZING"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    CANCELED = "CANCELED"
    FAILED = "FAILED"


@dataclass(frozen=True, slots=True)
class CheckpointPlan:
    """The plan of one checkpoint. ``to_wait_for`` (running) subtasks are also notified; ``finished`` have ended.

    ``graph`` is the deployment's graph: the checkpoint is completed with it, even if the graph is replaced later.
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
        self._at_end_of_data: dict[SubtaskKey, bool] = {}
        self._finished_on_restore: frozenset[str] = frozenset()

    def replace_graph(self, graph: JobGraph) -> None:
        """The next deployment runs another graph. Only allowed between deployments."""
        self._graph = graph

    @property
    def is_deployed(self) -> bool:
        """Whether there is a deployment that a failure can still affect."""
        return bool(self._executions)

    def deployed(
        self, running: Iterable[ExecutionId], finished: Iterable[ExecutionId], finished_on_restore: frozenset[str]
    ) -> None:
        """Starts a deployment. Raises ValueError unless each subtask of the graph has exactly one execution."""
        given = tuple(running)
        executions = {execution.key: execution for execution in given}
        expected = {(vertex.id, index) for vertex in self._graph.vertices for index in range(vertex.parallelism)}
        if executions.keys() != expected or len(executions) != len(given):
            raise ValueError(f"executions {sorted(executions)} are not the subtasks {sorted(expected)}")
        self._executions = executions
        self._finished = {execution.key for execution in finished}
        self._at_end_of_data = {}
        self._finished_on_restore = finished_on_restore

    def gone(self) -> None:
        """All tasks of the deployment are stopping."""
        self._executions = {}
        self._finished = set()
        self._at_end_of_data = {}

    def is_running(self, execution: ExecutionId) -> bool:
        # The whole id is compared: an earlier attempt of the subtask has the same key.
        return self._executions.get(execution.key) == execution and execution.key not in self._finished

    def finished(self, execution: ExecutionId) -> bool:
        """Records the end of a subtask; returns False if the subtask is not running."""
        if not self.is_running(execution):
            return False
        self._finished.add(execution.key)
        return True

    def end_of_data(self, execution: ExecutionId, waits: bool = True) -> bool:
        """Records that a subtask has no more data, and whether it waits for its final checkpoint.

        Returns False for one that is not running.
        """
        if not self.is_running(execution):
            return False
        self._at_end_of_data[execution.key] = waits
        return True

    @property
    def all_wait_for_final_checkpoint(self) -> bool:
        """Whether all subtasks have ended or wait for a final checkpoint, at least one of them for its own.

        A subtask that needs none waits as long as one of its predecessors does; otherwise it is about to end.
        """
        running = self._executions.keys() - self._finished
        waiting = {key for key in running if self._at_end_of_data.get(key, False)}
        if not waiting or not running <= self._at_end_of_data.keys():
            return False
        # Each subtask is visited once, regardless of the number of paths to it.
        held_up = dict.fromkeys(waiting, True)
        return all(self._is_held_up(key, held_up) for key in running)

    def _is_held_up(self, key: SubtaskKey, known: dict[SubtaskKey, bool]) -> bool:
        if key not in known:
            known[key] = any(
                (edge.source, index) not in self._finished and self._is_held_up((edge.source, index), known)
                for edge in self._graph.inputs(key[0])
                for index in _predecessors(edge, key[1], self._graph)
            )
        return known[key]

    @property
    def any_finished(self) -> bool:
        """Whether a subtask has ended in this deployment; vertices finished on restore do not count."""
        return any(vertex_id not in self._finished_on_restore for vertex_id, _ in self._finished)

    def plan(self) -> CheckpointPlan:
        """The plan for a checkpoint taken now; there is nothing to wait for when no subtask runs."""
        if not self._executions:
            return CheckpointPlan(self._graph, (), (), frozenset())
        return calculate_plan(self._graph, self._executions, frozenset(self._finished), self._finished_on_restore)


def calculate_plan(
    graph: JobGraph,
    executions: Mapping[SubtaskKey, ExecutionId],
    finished: frozenset[SubtaskKey],
    finished_on_restore: frozenset[str] = frozenset(),
) -> CheckpointPlan:
    """Plans to trigger each running subtask without running predecessors and to wait for all running ones.

    ``executions`` are the current attempts of all subtasks, ``finished`` those in state FINISHED.
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
            # Includes subtasks with running predecessors: barriers reach them from the triggered subtasks.
            to_wait_for.append(execution)
            if not any(_has_running_predecessor(edge, index, running_vertices) for edge in inputs):
                to_trigger.append(execution)
    return CheckpointPlan(graph, tuple(to_trigger), tuple(to_wait_for), finished, finished_on_restore)


def _predecessors(edge: JobEdge, index: int, graph: JobGraph) -> Iterable[int]:
    """The subtasks of the edge's source that send to subtask ``index`` of its target."""
    return (index,) if edge.partitioning is Partitioning.FORWARD else range(graph.vertex(edge.source).parallelism)


def _has_running_predecessor(edge: JobEdge, index: int, running: Mapping[str, list[int]]) -> bool:
    upstream = running[edge.source]
    if edge.partitioning is Partitioning.FORWARD:
        return index in upstream
    return bool(upstream)
