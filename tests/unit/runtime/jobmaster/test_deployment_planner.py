"""From a job graph and its slots to deployments: both ends of a channel agree, and state reaches its subtask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateSegment,
    ChannelStateStream,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    StateFile,
)
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.jobmaster.task_gateway import RestoredState, SlotPlacement, plan_deployments
from ckpt_runtime.network.connections import encode
from ckpt_runtime.network.control_messages import DeploySubtasks
from ckpt_runtime.scheduler.deployment import Deployment, input_channels, output_channels


def vertex(name: str, parallelism: int, max_parallelism: int = 128) -> JobVertex:
    return JobVertex(name, (OperatorNode(f"{name}-uid", name, "map"),), parallelism, max_parallelism)


def graph(*edges: JobEdge, **parallelisms: int) -> JobGraph:
    return JobGraph("job", tuple(vertex(name, count) for name, count in parallelisms.items()), edges)


def plan(job: JobGraph, restored: RestoredState | None = None, **sinks: SinkLineage) -> list[Deployment]:
    placements = [SlotPlacement((f"host{i}", 1000 + i), i) for i in range(job.slots)]
    return plan_deployments(job, placements, deployment=7, attempt=3, restored=restored, sinks=sinks)


def links(job: JobGraph) -> dict[int, tuple[tuple[str, int], tuple[str, int]]]:
    """Channel index to (producer, consumer), after checking that both ends say the same."""
    producers, consumers = {}, {}
    for slot, deployment in enumerate(plan(job)):
        for subtask in deployment.subtasks:
            assert subtask.subtask_index == slot
            key = (subtask.vertex_id, slot)
            for edge, channels in output_channels(job, *key):
                for channel in channels:
                    assert channel.index not in producers
                    producers[channel.index] = (key, (edge.target, channel.peer))
                    if channel.peer != slot:
                        assert deployment.addresses[channel.peer] == (f"host{channel.peer}", 1000 + channel.peer)
            for edge, channels in input_channels(job, *key):
                for channel in channels:
                    assert channel.index not in consumers
                    consumers[channel.index] = ((edge.source, channel.peer), key)
    assert producers == consumers
    return producers


def test_forward_links_equal_subtasks_in_the_same_worker() -> None:
    job = graph(JobEdge("a", "b", Partitioning.FORWARD), a=3, b=3)
    assert set(links(job).values()) == {(("a", i), ("b", i)) for i in range(3)}


def test_equal_edges_are_two_gates_with_channels_of_their_own() -> None:
    edge = JobEdge("a", "b", Partitioning.REBALANCE)
    job = graph(edge, edge, a=2, b=2)
    each = [(("a", i), ("b", k)) for i in range(2) for k in range(2)]
    assert sorted(links(job).values()) == sorted(each * 2)
    assert [len(channels) for _, channels in output_channels(job, "a", 0)] == [2, 2]
    assert [len(channels) for _, channels in input_channels(job, "b", 0)] == [2, 2]


def test_workers_get_the_addresses_and_sinks_of_their_own_subtasks() -> None:
    job = graph(JobEdge("a", "b", Partitioning.HASH), JobEdge("b", "c", Partitioning.FORWARD), a=2, b=3, c=3, d=4)
    assert [len(deployment.addresses) for deployment in plan(job)] == [3, 3, 0, 0]
    deployments = plan(graph(a=1, b=2), **{"a-uid": SinkLineage("1"), "b-uid": SinkLineage("2")})
    assert [set(deployment.sinks) for deployment in deployments] == [{"a-uid", "b-uid"}, {"b-uid"}]


def test_the_work_of_planning_grows_with_the_subtasks_and_not_with_the_channels() -> None:
    def operations(parallelism: int) -> int:
        """Bytecode instructions, which no load of the machine changes."""
        job = graph(JobEdge("a", "b", Partitioning.HASH), a=parallelism, b=parallelism)
        count = 0

        def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any]:
            nonlocal count
            frame.f_trace_opcodes = True
            count += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            plan(job)
        finally:
            sys.settrace(before)
        return count

    small, large = operations(50), operations(100)
    assert 0 < large < 2.2 * small


def test_a_message_of_500_subtasks_is_small_and_one_without_a_shuffle_as_small_as_any() -> None:
    def greatest(job: JobGraph) -> int:
        return max(len(encode(DeploySubtasks(deployment))) for deployment in plan(job))

    shuffled = graph(JobEdge("a", "b", Partitioning.HASH), a=500, b=500)
    assert greatest(shuffled) < 500 * 16
    assert greatest(graph(JobEdge("a", "b", Partitioning.FORWARD), a=500, b=500)) < 300


partitionings = st.sampled_from([Partitioning.HASH, Partitioning.REBALANCE, Partitioning.BROADCAST])


@given(st.lists(st.integers(1, 4), min_size=2, max_size=5), st.data())
def test_channels_of_any_graph_are_numbered_once(parallelisms: list[int], data: st.DataObject) -> None:
    names = [f"v{i}" for i in range(len(parallelisms))]
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    chosen = data.draw(st.lists(st.sampled_from(pairs), max_size=6))
    edges = []
    for source, target in chosen:
        equal = parallelisms[names.index(source)] == parallelisms[names.index(target)]
        kind = Partitioning.FORWARD if equal and data.draw(st.booleans()) else data.draw(partitionings)
        edges.append(JobEdge(source, target, kind))
    job = graph(*edges, **dict(zip(names, parallelisms, strict=True)))
    expected = sum(
        job.vertex(e.source).parallelism
        * (1 if e.partitioning is Partitioning.FORWARD else job.vertex(e.target).parallelism)
        for e in edges
    )
    assert len(links(job)) == expected


def test_restored_state_reaches_its_subtask_and_finished_vertices_are_marked() -> None:
    state = OperatorSubtaskState((), (OperatorListState("x", OperatorStateMode.SPLIT, (1,)),))
    stream = ChannelStateStream(0, 3, "", (ChannelStateSegment(StateFile("f", 9, "c"), 0, 9),))
    restored = RestoredState(
        9, "file:///chk-9", {("b", 1): {"b-uid": state}}, frozenset({"a"}), {("b", 1): (stream,)}, owned=False
    )
    deployments = plan(graph(a=1, b=2), restored)
    by_key = {(s.vertex_id, s.subtask_index): s for d in deployments for s in d.subtasks}
    assert by_key["b", 1].state == {"b-uid": state}
    assert by_key["b", 0].state == {}
    assert {key: subtask.in_flight for key, subtask in by_key.items() if subtask.in_flight} == {("b", 1): (stream,)}
    assert not any(deployment.snapshot_owned for deployment in deployments)
    assert all(deployment.snapshot_owned for deployment in plan(graph(a=1, b=2)))
    assert [by_key[key].finished for key in (("a", 0), ("b", 0), ("b", 1))] == [True, False, False]
    assert all((d.restored_checkpoint_id, d.snapshot_directory) == (9, "file:///chk-9") for d in deployments)
