"""Rules for what may be replaced in a live job, and when (FLIP-530).

| state of the job | parallelism, configuration |
|---|---|
| INITIALIZING, BACKING_OFF, CLEARING | the next deployment uses the new one |
| ACQUIRING, RESTORING | preparation of the deployment starts again with the new one |
| DEPLOYING, RUNNING | the current deployment ends for the new one |
| STOPPING, ENDING | refused: a stop with savepoint is in progress |
| CANCELLING, FAILING and after the end | refused: there is no next deployment |

The restart strategy may be replaced in every state: it applies from the next failure on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.configuration.registry import VERTEX_BOUNDS
from ckpt_runtime.graph.job_graph import MAX_SUBTASKS, JobGraph, Partitioning
from ckpt_runtime.graph.schema import Parallelism, decoded
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
    """The replacement is not possible, now or at all. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class ParallelismBounds:
    """Parallelism bounds of one vertex: ``upper`` is desired, ``lower`` is required if slots are short."""

    lower: int
    upper: int


def subtasks_of(graph: JobGraph) -> tuple[SubtaskKey, ...]:
    """All subtasks of the graph, in deployment order."""
    return tuple((vertex.id, index) for vertex in graph.vertices for index in range(vertex.parallelism))


def check_replaceable(state: JobState, what: str) -> None:
    """Raises :class:`ReplacementRefusedError` if the state allows no further deployment."""
    if state not in _REPLACEABLE_IN:
        raise ReplacementRefusedError(f"the {what} of a job that is {state.value} cannot be replaced")


def rescaled(graph: JobGraph, bounds: Mapping[str, ParallelismBounds], slots: int) -> JobGraph:
    """Returns ``graph`` at the parallelism that ``slots`` allow within the (valid) ``bounds``, and stores these bounds
    in it."""
    text = json.dumps({vertex: [wanted.lower, wanted.upper] for vertex, wanted in bounds.items()}, sort_keys=True)
    declared = replace(graph, configuration={**graph.configuration, VERTEX_BOUNDS: text})
    return declared.with_parallelism(
        {vertex: max(wanted.lower, min(wanted.upper, slots)) for vertex, wanted in bounds.items()}
    )


_Declared = dict[str, tuple[Parallelism, Parallelism]]


def declared_bounds(graph: JobGraph) -> dict[str, ParallelismBounds]:
    """The bounds of the last rescale; a vertex without declared bounds has its parallelism as both bounds.

    Raises DocumentError for a stored graph whose bounds are damaged.
    """
    declared = decoded(graph.configuration.get(VERTEX_BOUNDS, "{}").encode(), _Declared)
    return {v.id: ParallelismBounds(*declared.get(v.id, (v.parallelism, v.parallelism))) for v in graph.vertices}


def with_bounds_of(graph: JobGraph, present: JobGraph) -> JobGraph:
    """``graph`` with the bounds that were declared for ``present``."""
    declared = present.configuration.get(VERTEX_BOUNDS)
    if declared is None:
        return graph
    return replace(graph, configuration={**graph.configuration, VERTEX_BOUNDS: declared})


def check_bounds(graph: JobGraph, bounds: Mapping[str, ParallelismBounds]) -> None:
    """Checks that ``bounds`` cover all vertices and do not exceed their key groups, so that all state still fits.

    Raises :class:`ReplacementRefusedError` with one line per problem, with Flink's message where Flink has one.
    """
    if lines := [*_wrong_bounds(graph, bounds)] or [*_wrong_together(graph, bounds)]:
        raise ReplacementRefusedError("\n".join(lines))


def _wrong_bounds(graph: JobGraph, bounds: Mapping[str, ParallelismBounds]) -> Iterator[str]:
    for vertex in graph.vertices:
        wanted = bounds.get(vertex.id)
        if wanted is None:
            yield f"The request is incomplete, missing job vertex [{vertex.id}] resource requirements."
        elif wanted.lower < 1 or wanted.upper < 1:
            yield (
                f"Both, the requested lower bound [{wanted.lower}] and upper bound [{wanted.upper}] for job vertex "
                f"[{vertex.id}] must be greater than zero."
            )
        elif wanted.lower > wanted.upper:
            yield (
                f"The requested lower bound [{wanted.lower}] for job vertex [{vertex.id}] is higher than the upper "
                f"bound [{wanted.upper}]."
            )
        elif wanted.upper > vertex.greatest_parallelism:
            yield (
                f"The newly requested parallelism {wanted.upper} for the job vertex {vertex.id} exceeds its maximum "
                f"parallelism {vertex.greatest_parallelism}."
            )
    known = {vertex.id for vertex in graph.vertices}
    yield from (f"Job vertex [{vertex}] was not found in the JobGraph." for vertex in bounds if vertex not in known)


def _wrong_together(graph: JobGraph, bounds: Mapping[str, ParallelismBounds]) -> Iterator[str]:
    for edge in graph.edges:
        if edge.partitioning is Partitioning.FORWARD and bounds[edge.source] != bounds[edge.target]:
            yield (
                f"The job vertices {edge.source} and {edge.target} are connected one to one; their bounds have to be "
                "the same."
            )
    if (subtasks := sum(wanted.upper for wanted in bounds.values())) > MAX_SUBTASKS:
        yield f"The requested parallelisms make {subtasks} subtasks; at most {MAX_SUBTASKS} are allowed."
