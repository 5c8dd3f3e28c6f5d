"""What may be replaced, in which state, by what: the whole table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.replacement import (
    ParallelismBounds,
    ReplacementRefusedError,
    check_bounds,
    check_replaceable,
    rescaled,
    subtasks_of,
)

REPLACEABLE = {
    JobState.INITIALIZING,
    JobState.ACQUIRING,
    JobState.RESTORING,
    JobState.DEPLOYING,
    JobState.RUNNING,
    JobState.CLEARING,
    JobState.BACKING_OFF,
}


def chain(*parallelism: int, kind: Partitioning = Partitioning.HASH) -> JobGraph:
    vertices = tuple(
        JobVertex(f"v{index}", (OperatorNode(f"u{index}", f"name{index}", "map"),), number)
        for index, number in enumerate(parallelism)
    )
    edges = tuple(JobEdge(f"v{index}", f"v{index + 1}", kind) for index in range(len(parallelism) - 1))
    return JobGraph("job", vertices, edges)


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("what", ["parallelism", "configuration"])
def test_plan_can_be_replaced_in_some_states_and_others_are_named(state: JobState, what: str) -> None:
    if state in REPLACEABLE:
        check_replaceable(state, what)
    else:
        with pytest.raises(ReplacementRefusedError, match=f"the {what} of a job that is {state.value}"):
            check_replaceable(state, what)


def test_subtasks_are_in_deployment_order() -> None:
    assert subtasks_of(chain(1, 2)) == (("v0", 0), ("v1", 0), ("v1", 1))


def both(lower: int, upper: int) -> dict[str, ParallelismBounds]:
    return dict.fromkeys(("v0", "v1"), ParallelismBounds(lower, upper))


def refused(graph: JobGraph, bounds: dict[str, ParallelismBounds]) -> list[str]:
    with pytest.raises(ReplacementRefusedError) as raised:
        check_bounds(graph, bounds)
    return str(raised.value).splitlines()


@pytest.mark.row("203.14")
class TestBounds:
    """Messages are Flink's, as recorded from it."""

    def test_within_the_key_groups(self) -> None:
        check_bounds(chain(1, 2), both(1, 128))

    def test_a_line_for_each_vertex(self) -> None:
        assert refused(chain(1, 1), both(3, 2)) == [
            f"The requested lower bound [3] for job vertex [{name}] is higher than the upper bound [2]."
            for name in ("v0", "v1")
        ]
        assert refused(chain(1, 1), both(0, 2)) == [
            f"Both, the requested lower bound [0] and upper bound [2] for job vertex [{name}] "
            "must be greater than zero."
            for name in ("v0", "v1")
        ]
        assert refused(chain(1, 1), both(1, 1000)) == [
            f"The newly requested parallelism 1000 for the job vertex {name} exceeds its maximum parallelism 128."
            for name in ("v0", "v1")
        ]

    def test_all_vertices_and_no_others(self) -> None:
        assert refused(chain(1, 1, 1), {**both(1, 1), "v9": ParallelismBounds(1, 1)}) == [
            "The request is incomplete, missing job vertex [v2] resource requirements.",
            "Job vertex [v9] was not found in the JobGraph.",
        ]

    def test_vertices_connected_one_to_one_must_have_equal_parallelism(self) -> None:
        graph = chain(2, 2, kind=Partitioning.FORWARD)
        check_bounds(graph, both(3, 3))
        (line,) = refused(graph, {**both(2, 2), "v0": ParallelismBounds(3, 3)})
        assert line.startswith("The job vertices v0 and v1 are connected one to one")

    def test_vertex_that_commits_for_the_whole_job_keeps_parallelism_1(self) -> None:
        graph = chain(2, 1)
        committer = replace(graph.vertices[1], operators=(OperatorNode("u1", "commit", "committer"),))
        graph = replace(graph, vertices=(graph.vertices[0], committer))
        check_bounds(graph, {**both(2, 2), "v1": ParallelismBounds(1, 1)})
        assert refused(graph, both(2, 2)) == [
            "The newly requested parallelism 2 for the job vertex v1 exceeds its maximum parallelism 1."
        ]

    def test_not_more_subtasks_than_a_driver_can_hold(self) -> None:
        graph = chain(1, 1)
        graph = replace(graph, vertices=tuple(replace(vertex, max_parallelism=60_000) for vertex in graph.vertices))
        (line,) = refused(graph, both(1, 60_000))
        assert "120000 subtasks; at most 100000" in line


@pytest.mark.parametrize(("slots", "expected"), [(1, (2, 3)), (3, (3, 3)), (9, (4, 3))])
def test_parallelism_is_limited_by_the_available_slots(slots: int, expected: tuple[int, ...]) -> None:
    bounds = {"v0": ParallelismBounds(2, 4), "v1": ParallelismBounds(3, 3)}
    graph = rescaled(chain(1, 1), bounds, slots)
    assert tuple(vertex.parallelism for vertex in graph.vertices) == expected
