"""A deployment survives its trip to the worker."""

from __future__ import annotations

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.state_handles import (
    ChannelStateSegment,
    ChannelStateStream,
    KeyedSection,
    KeyedStateHandle,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    StateFile,
)
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.scheduler.deployment import (
    Deployment,
    InputChannelDescriptor,
    OutputChannelDescriptor,
    OutputDescriptor,
    Program,
    SubtaskDescriptor,
)

numbers = st.integers(0, 1 << 40)
texts = st.text(max_size=8)
values = st.one_of(st.none(), st.booleans(), numbers, texts, st.lists(numbers, max_size=2))

files = st.one_of(
    st.builds(StateFile, texts, numbers, texts), st.builds(StateFile, st.just(""), numbers, texts, st.binary())
)
sections = st.builds(
    KeyedSection, texts, st.dictionaries(texts, texts, max_size=2), st.tuples(st.tuples(numbers, numbers, numbers))
)
keyed = st.builds(KeyedStateHandle, st.builds(KeyGroupRange, numbers, numbers), files, st.tuples(sections))
lists = st.builds(OperatorListState, texts, st.sampled_from(OperatorStateMode), st.lists(values, max_size=2).map(tuple))
states = st.builds(OperatorSubtaskState, st.lists(keyed, max_size=2).map(tuple), st.lists(lists, max_size=2).map(tuple))
addresses = st.one_of(st.none(), st.tuples(texts, st.integers(1, 65_535)))
outputs = st.builds(
    OutputDescriptor,
    st.sampled_from(Partitioning),
    st.lists(texts, max_size=2).map(tuple),
    numbers,
    st.lists(st.builds(OutputChannelDescriptor, numbers, addresses), max_size=3).map(tuple),
)
key_groups = st.one_of(st.none(), st.builds(KeyGroupRange, numbers, numbers))
segments = st.builds(ChannelStateSegment, files, numbers, numbers, key_groups)
streams = st.builds(ChannelStateStream, numbers, numbers, texts, st.lists(segments, max_size=2).map(tuple))
subtasks = st.builds(
    SubtaskDescriptor,
    texts,
    numbers,
    st.lists(st.builds(InputChannelDescriptor, numbers, numbers, st.booleans()), max_size=3).map(tuple),
    st.lists(outputs, max_size=2).map(tuple),
    st.dictionaries(texts, states, max_size=2),
    st.booleans(),
    st.lists(streams, max_size=2).map(tuple),
)
GRAPH = JobGraph(
    "job",
    (
        JobVertex("a" * 32, (OperatorNode("s", "Source", "source"),), 2),
        JobVertex("b" * 32, (OperatorNode("k", "Count", "aggregate", True, False, True),), 3, 64),
    ),
    (JobEdge("a" * 32, "b" * 32, Partitioning.HASH, ("k",)),),
    {"parallelism.default": "2"},
)
deployments = st.builds(
    Deployment,
    job_id=texts,
    deployment=numbers,
    attempt=numbers,
    graph=st.just(GRAPH),
    program=st.builds(Program, texts, texts, st.lists(texts, max_size=2).map(tuple)),
    subtasks=st.lists(subtasks, max_size=2).map(tuple),
    restored_checkpoint_id=st.one_of(st.none(), numbers),
    snapshot_directory=texts,
    snapshot_owned=st.booleans(),
    pin_cpu=st.one_of(st.none(), st.integers(0, 64)),
)


@given(deployments)
@settings(deadline=None, max_examples=50)
def test_it_comes_back_equal(deployment: Deployment) -> None:
    wire = orjson.dumps(deployment.to_json())
    assert Deployment.from_json(orjson.loads(wire)) == deployment
