"""Which subtasks a checkpoint triggers, waits for and commits to, when some have finished (FLIP-147). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
