"""What of a job may be replaced while it lives, and when (FLIP-530). Rules only.

| state of the job | graph, configuration |
|---|---|
| INITIALIZING, BACKING_OFF, CLEARING | the next deployment has the new one |
| ACQUIRING, RESTORING | the deployment in preparation is begun again with the new one |
| DEPLOYING, RUNNING | the present deployment ends for the new one |
| STOPPING, ENDING | refused: a stop with savepoint is in progress |
| CANCELLING, FAILING and after the end | refused: there is no next deployment |

The restart strategy may be replaced in every state: it counts from the next failure on.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.graph.job_graph import JobGraph, Partitioning
from ckpt_runtime.scheduler.job_status import JobState

_REPLACEABLE_IN = frozenset(
    {
        JobState.INITIALIZING,
        JobState.ACQUIRING,
        JobState.RESTORING,
        JobState.DEPLOYING,
        JobState.RUNNING,
        JobState.CLEARING,
        JobState.BACKING_OFF,
    }
)


class ReplacementRefusedError(ValueError):
    """What was to be replaced cannot be, now or at all. Nothing has changed."""


def subtasks_of(graph: JobGraph) -> tuple[SubtaskKey, ...]:
    """All subtasks, in deployment order."""
    return tuple((vertex.id, index) for vertex in graph.vertices for index in range(vertex.parallelism))


def check_replaceable(state: JobState, what: str) -> None:
    """Raises :class:`ReplacementRefusedError` when the state allows no other deployment."""
    if state not in _REPLACEABLE_IN:
        raise ReplacementRefusedError(f"the {what} of a job that is {state.value} cannot be replaced")


def check_graph(present: JobGraph, new: JobGraph) -> None:
    """Only the parallelism of vertices may differ, up to their key groups: all state keeps its place.

    Raises :class:`ReplacementRefusedError` naming the vertex.
    """
    if new.edges != present.edges or [v.id for v in new.vertices] != [v.id for v in present.vertices]:
        raise ReplacementRefusedError("the new graph has other vertices or edges; only the parallelism may change")
    for before, after in zip(present.vertices, new.vertices, strict=True):
        if replace(after, parallelism=before.parallelism) != before:
            raise ReplacementRefusedError(f"vertex {before.name!r} has changed in more than its parallelism")
        if not 1 <= after.parallelism <= after.max_parallelism:
            raise ReplacementRefusedError(
                f"vertex {after.name!r}: parallelism {after.parallelism} is not between 1 and {after.max_parallelism}, "
                "its max parallelism"
            )
    for edge in new.edges:
        source, target = new.vertex(edge.source), new.vertex(edge.target)
        if edge.partitioning is Partitioning.FORWARD and source.parallelism != target.parallelism:
            raise ReplacementRefusedError(
                f"vertices {source.name!r} and {target.name!r} are connected one to one; their parallelism has to "
                f"be the same, not {source.parallelism} and {target.parallelism}"
            )
