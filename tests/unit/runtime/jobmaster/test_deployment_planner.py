"""From a job graph and its slots to deployments: both ends of a channel agree, and state reaches its subtask."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.state_handles import (
    ChannelStateSegment,
    ChannelStateStream,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    StateFile,
)
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.jobmaster.deployment_planner import RestoredState, SlotPlacement, plan_deployments
from ckpt_runtime.scheduler.deployment import Deployment, Program

PROGRAM = Program("p", "m:pipeline", ("--x",))


def vertex(name: str, parallelism: int, max_parallelism: int = 128) -> JobVertex:
    return JobVertex(name, (OperatorNode(f"{name}-uid", name, "map"),), parallelism, max_parallelism)


def graph(*edges: JobEdge, **parallelisms: int) -> JobGraph:
    return JobGraph("job", tuple(vertex(name, count) for name, count in parallelisms.items()), edges)


def plan(job: JobGraph, restored: RestoredState | None = None, slots: int | None = None) -> list[Deployment]:
    placements = [SlotPlacement((f"host{i}", 1000 + i), i) for i in range(job.slots if slots is None else slots)]
    return plan_deployments("j", job, PROGRAM, placements, deployment=7, attempt=3, restored=restored)


def links(deployments: list[Deployment]) -> dict[int, tuple[tuple[str, int], tuple[str, int]]]:
    """Channel index to (producer, consumer), after checking that both ends say the same."""
    producers, consumers = {}, {}
    for slot, deployment in enumerate(deployments):
        for subtask in deployment.subtasks:
            assert subtask.subtask_index == slot
            key = (subtask.vertex_id, slot)
            for output in subtask.outputs:
                for channel in output.channels:
                    assert channel.index not in producers
                    producers[channel.index] = (key, channel.address)
            for channel in subtask.inputs:
                assert channel.index not in consumers
                consumers[channel.index] = (key, channel.local)
    assert producers.keys() == consumers.keys()
    for index, (producer, address) in producers.items():
        consumer, local = consumers[index]
        assert local == (producer[1] == consumer[1]) == (address is None)
        assert address in (None, (f"host{consumer[1]}", 1000 + consumer[1]))
    return {index: (producers[index][0], consumers[index][0]) for index in producers}


def test_slot_sharing_gives_slot_i_the_subtasks_i() -> None:
    deployments = plan(graph(a=1, b=3, c=2))
    assert [[s.vertex_id for s in d.subtasks] for d in deployments] == [["a", "b", "c"], ["b", "c"], ["b"]]
    assert {(d.job_id, d.deployment, d.attempt, d.program) for d in deployments} == {("j", 7, 3, PROGRAM)}
    assert [d.pin_cpu for d in deployments] == [0, 1, 2]
    assert all(d.restored_checkpoint_id is None and d.snapshot_directory == "" for d in deployments)


def test_forward_links_equal_subtasks_in_the_same_worker() -> None:
    found = links(plan(graph(JobEdge("a", "b", Partitioning.FORWARD), a=3, b=3)))
    assert set(found.values()) == {(("a", i), ("b", i)) for i in range(3)}


def test_hash_links_everybody_in_the_consumers_order() -> None:
    deployments = plan(graph(JobEdge("a", "b", Partitioning.HASH, ("k",)), a=2, b=3))
    assert set(links(deployments).values()) == {(("a", i), ("b", k)) for i in range(2) for k in range(3)}
    output = deployments[0].subtasks[0].outputs[0]
    assert (output.partitioning, output.keys, output.max_parallelism) == (Partitioning.HASH, ("k",), 128)
    assert [channel.address for channel in output.channels] == [None, ("host1", 1001), ("host2", 1002)]


def test_gates_are_numbered_in_the_order_of_the_edges() -> None:
    job = graph(JobEdge("a", "c", Partitioning.REBALANCE), JobEdge("b", "c", Partitioning.BROADCAST), a=1, b=2, c=1)
    consumer = next(s for s in plan(job)[0].subtasks if s.vertex_id == "c")
    assert [channel.input_index for channel in consumer.inputs] == [0, 1, 1]


def test_equal_edges_are_two_gates_with_channels_of_their_own() -> None:
    edge = JobEdge("a", "b", Partitioning.REBALANCE)
    deployments = plan(graph(edge, edge, a=2, b=2))
    each = [(("a", i), ("b", k)) for i in range(2) for k in range(2)]
    assert sorted(links(deployments).values()) == sorted(each * 2)
    producer, consumer = deployments[0].subtasks
    assert [len(output.channels) for output in producer.outputs] == [2, 2]
    assert [channel.input_index for channel in consumer.inputs] == [0, 0, 1, 1]


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
    assert len(links(plan(job))) == expected


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
