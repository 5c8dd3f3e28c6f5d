"""What may be replaced, in which state, by what: the whole table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.replacement import (
    ReplacementRefusedError,
    check_graph,
    check_replaceable,
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
@pytest.mark.parametrize("what", ["graph", "configuration"])
def test_state_and_what(state: JobState, what: str) -> None:
    if state in REPLACEABLE:
        check_replaceable(state, what)
    else:
        with pytest.raises(ReplacementRefusedError, match=f"the {what} of a job that is {state.value}"):
            check_replaceable(state, what)


def test_subtasks_are_in_deployment_order() -> None:
    assert subtasks_of(chain(1, 2)) == (("v0", 0), ("v1", 0), ("v1", 1))


class TestGraph:
    def test_another_parallelism(self) -> None:
        check_graph(chain(1, 2), chain(2, 1))
        check_graph(chain(1, 1), chain(1, 1))
        check_graph(chain(1, 1), chain(128, 128))

    @pytest.mark.parametrize("parallelism", [0, 129])
    def test_outside_of_its_key_groups(self, parallelism: int) -> None:
        with pytest.raises(
            ReplacementRefusedError, match=f"'name1': parallelism {parallelism} is not between 1 and 128"
        ):
            check_graph(chain(1, 1), chain(1, parallelism))

    def test_other_vertices_and_edges(self) -> None:
        present = chain(1, 1)
        renamed = replace(present, vertices=(replace(present.vertices[0], id="other"), present.vertices[1]))
        for new in (chain(1), chain(1, 1, 1), renamed, chain(1, 1, kind=Partitioning.REBALANCE)):
            with pytest.raises(ReplacementRefusedError, match="other vertices or edges"):
                check_graph(present, new)

    def test_more_than_the_parallelism(self) -> None:
        present = chain(1)
        (vertex,) = present.vertices
        for changed in (replace(vertex, max_parallelism=64), replace(vertex, operators=())):
            with pytest.raises(ReplacementRefusedError, match="'name0' has changed in more than its parallelism"):
                check_graph(present, replace(present, vertices=(changed,)))

    def test_one_to_one_edges_keep_both_ends_alike(self) -> None:
        present = chain(2, 2, kind=Partitioning.FORWARD)
        check_graph(present, chain(3, 3, kind=Partitioning.FORWARD))
        with pytest.raises(ReplacementRefusedError, match="be the same, not 3 and 2"):
            check_graph(present, chain(3, 2, kind=Partitioning.FORWARD))
