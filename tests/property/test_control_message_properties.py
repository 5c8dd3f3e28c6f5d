"""Every control message survives its trip, and what is none is refused by name, whatever it is."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    ChannelStateSegment,
    ChannelStateStream,
    IncrementalKeyedStateHandle,
    KeyedSection,
    KeyedStateHandle,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    RowGroup,
    StateFile,
    SubtaskState,
)
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.properties import (
    CheckpointFailureReason,
    CheckpointOptions,
    CheckpointProperties,
    CheckpointType,
    SavepointFormat,
)
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.network.agent_messages import (
    FROM_AGENT,
    FROM_UNREGISTERED,
    TO_AGENT,
    AdoptWorker,
    AgentCommand,
    AgentHeartbeat,
    AgentMessage,
    KillWorker,
    Ping,
    ProcessIdentity,
    RegisterAgent,
    RegisterWorker,
    Registration,
    ShutdownAgent,
    SpawnWorker,
    WorkerExited,
)
from ckpt_runtime.network.connections import MalformedMessageError, Message, MessageDecoder, encode
from ckpt_runtime.network.control_messages import (
    FROM_WORKER,
    TO_WORKER,
    AcknowledgeCheckpoint,
    AlignSources,
    CancelDeployment,
    Canceled,
    DeclineCheckpoint,
    DeploymentFailed,
    DeploySubtasks,
    DumpThreads,
    EndOfDataReport,
    FollowAgent,
    Following,
    LimitSources,
    NotifyCheckpointAborted,
    NotifyCheckpointComplete,
    ReadLog,
    RecentLog,
    SampledStack,
    SampledStacks,
    SampleStacks,
    SourceProgress,
    SparkAddress,
    SparkWanted,
    SubtaskMeasures,
    TaskFailure,
    TaskStateChanged,
    ThreadDump,
    TriggerCheckpoint,
    WorkerCommand,
    WorkerHeartbeat,
    WorkerMessage,
)
from ckpt_runtime.processes.thread_dump import ThreadInfo
from ckpt_runtime.scheduler.deployment import Deployment, JobDescriptor, Program, SubtaskDescriptor
from ckpt_runtime.scheduler.job_events import FailureInfo
from tests.support.effort import examples

numbers = st.integers(0, 1 << 40)
texts = st.text(max_size=8)
values = st.one_of(st.none(), st.booleans(), numbers, texts, st.lists(numbers, max_size=2))

files = st.one_of(
    st.builds(StateFile, texts, numbers, texts), st.builds(StateFile, st.just(""), numbers, texts, st.binary())
)
sections = st.builds(
    KeyedSection, texts, st.dictionaries(texts, texts, max_size=2), st.tuples(st.tuples(numbers, numbers, numbers))
)
ranges = st.builds(KeyGroupRange, numbers, numbers)
keyed = st.one_of(
    st.builds(KeyedStateHandle, ranges, files, st.tuples(sections)),
    st.builds(
        CanonicalKeyedStateHandle, ranges, texts, st.dictionaries(texts, texts, max_size=2),
        st.lists(st.builds(RowGroup, numbers, ranges), max_size=2).map(tuple), files,
    ),
    st.builds(
        IncrementalKeyedStateHandle, ranges, texts, st.dictionaries(st.sampled_from(["a", "b-1"]), files, max_size=2),
        st.dictionaries(texts, values, max_size=2),
    ),
)  # fmt: skip
lists = st.builds(OperatorListState, texts, st.sampled_from(OperatorStateMode), st.lists(values, max_size=2).map(tuple))
states = st.builds(OperatorSubtaskState, st.lists(keyed, max_size=2).map(tuple), st.lists(lists, max_size=2).map(tuple))
addresses = st.tuples(texts, st.integers(1, 65_535))
key_groups = st.one_of(st.none(), st.builds(KeyGroupRange, numbers, numbers))
segments = st.builds(ChannelStateSegment, files, numbers, numbers, key_groups)
streams = st.builds(ChannelStateStream, numbers, numbers, texts, st.lists(segments, max_size=2).map(tuple))
subtasks = st.builds(
    SubtaskDescriptor,
    texts,
    numbers,
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
programs = st.builds(Program, texts, texts, st.lists(texts, max_size=2).map(tuple))
jobs = st.one_of(st.none(), st.builds(JobDescriptor, texts, st.just(GRAPH), programs))
deployments = st.builds(
    Deployment,
    deployment=numbers,
    attempt=numbers,
    subtasks=st.lists(subtasks, max_size=2).map(tuple),
    addresses=st.lists(addresses, max_size=2).map(tuple),
    restored_checkpoint_id=st.one_of(st.none(), numbers),
    snapshot_directory=texts,
    snapshot_owned=st.booleans(),
    pin_cpu=st.one_of(st.none(), st.integers(0, 64)),
)


failures = st.builds(TaskFailure, st.builds(FailureInfo, texts, texts, texts), st.booleans(), st.booleans())
durations = st.floats(0, 1e18)
measures = st.builds(
    SubtaskMeasures,
    texts,
    *[numbers] * 6,
    *[durations] * 4,
    numbers,
    numbers,
    st.booleans(),
    st.booleans(),
    st.one_of(st.none(), numbers),
    st.dictionaries(texts, numbers, max_size=3),
)
subtask_states = st.builds(
    SubtaskState,
    st.dictionaries(texts, states, max_size=2),
    numbers,
    st.lists(streams, max_size=2).map(tuple),
    st.lists(streams, max_size=2).map(tuple),
)
options = st.builds(
    CheckpointOptions,
    st.builds(
        CheckpointProperties,
        st.sampled_from(CheckpointType),
        st.one_of(st.none(), st.sampled_from(SavepointFormat)),
        st.booleans(),
        st.booleans(),
    ),
    texts,
    st.booleans(),
    numbers,
    st.one_of(st.none(), numbers),
    texts,
)
metrics = st.builds(CheckpointMetrics, *[st.integers(-1, 1 << 40)] * 9, st.booleans())
processes = st.builds(ProcessIdentity, texts, st.integers(1, (1 << 31) - 1), numbers)
keys = st.lists(st.tuples(texts, numbers), max_size=3).map(tuple)
stacks = st.builds(SampledStack, numbers, st.lists(texts, max_size=2).map(tuple), numbers, numbers)
ports = st.integers(1, 65_535)
times = st.integers(-(1 << 63), (1 << 63) - 1)
reasons = st.sampled_from([*CheckpointFailureReason.__members__])
MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    RegisterAgent: st.builds(RegisterAgent, texts, texts, st.lists(numbers, max_size=3).map(tuple), processes),
    RegisterWorker: st.builds(RegisterWorker, texts, texts, st.tuples(texts, ports), processes, texts),
    AgentHeartbeat: st.builds(AgentHeartbeat, st.dictionaries(texts, numbers, max_size=3)),
    WorkerExited: st.builds(WorkerExited, texts, st.one_of(st.none(), st.integers(-64, 255))),
    SpawnWorker: st.builds(SpawnWorker, texts),
    AdoptWorker: st.builds(AdoptWorker, texts, processes, texts),
    KillWorker: st.builds(KillWorker, texts),
    Ping: st.builds(Ping, st.lists(texts, max_size=3).map(tuple)),
    ShutdownAgent: st.builds(ShutdownAgent, st.lists(texts, max_size=3).map(tuple)),
    DeploySubtasks: st.builds(DeploySubtasks, deployments, jobs, st.one_of(st.none(), st.binary())),
    CancelDeployment: st.builds(CancelDeployment, numbers),
    TriggerCheckpoint: st.builds(TriggerCheckpoint, numbers, keys, numbers, numbers, options),
    NotifyCheckpointComplete: st.builds(NotifyCheckpointComplete, numbers, keys, numbers),
    NotifyCheckpointAborted: st.builds(NotifyCheckpointAborted, numbers, keys, numbers, st.one_of(st.none(), numbers)),
    AlignSources: st.builds(AlignSources, numbers, keys, times),
    LimitSources: st.builds(LimitSources, numbers, keys, st.dictionaries(texts, st.floats(0, 1e18), max_size=2)),
    FollowAgent: st.builds(FollowAgent, processes),
    DumpThreads: st.builds(DumpThreads, numbers),
    ReadLog: st.builds(ReadLog, numbers),
    SampleStacks: st.builds(SampleStacks, numbers, texts, texts, st.integers(1, 1000), st.integers(1, 1000)),
    ThreadDump: st.builds(ThreadDump, numbers, st.lists(st.builds(ThreadInfo, texts, texts), max_size=2).map(tuple)),
    RecentLog: st.builds(RecentLog, numbers, texts),
    SampledStacks: st.builds(SampledStacks, numbers, st.lists(stacks, max_size=2).map(tuple)),
    Following: st.just(Following()),
    WorkerHeartbeat: st.builds(WorkerHeartbeat, st.integers(-1, 1 << 40), st.lists(measures, max_size=2).map(tuple)),
    DeploymentFailed: st.builds(DeploymentFailed, numbers, failures),
    SourceProgress: st.builds(SourceProgress, numbers, texts, numbers, st.one_of(st.none(), times), st.booleans()),
    SparkWanted: st.builds(SparkWanted, numbers),
    SparkAddress: st.builds(SparkAddress, texts, texts),
    Canceled: st.builds(Canceled, numbers, st.booleans()),
    TaskStateChanged: st.builds(TaskStateChanged, numbers, texts, numbers, st.sampled_from(TaskState), failures),
    EndOfDataReport: st.builds(EndOfDataReport, numbers, texts, numbers, st.booleans()),
    AcknowledgeCheckpoint: st.builds(
        AcknowledgeCheckpoint, numbers, texts, numbers, numbers, texts, subtask_states, metrics
    ),
    DeclineCheckpoint: st.builds(DeclineCheckpoint, numbers, texts, numbers, numbers, reasons, texts),
}
UNIONS: dict[MessageDecoder[Any], Any] = {
    FROM_UNREGISTERED: Registration,
    FROM_AGENT: AgentMessage,
    FROM_WORKER: WorkerMessage,
    TO_AGENT: AgentCommand,
    TO_WORKER: WorkerCommand,
}
DECODERS = list(UNIONS)
TO = {decoder: st.one_of([MESSAGES[kind] for kind in get_args(union)]) for decoder, union in UNIONS.items()}
sent = st.sampled_from(DECODERS).flatmap(lambda decoder: st.tuples(st.just(decoder), TO[decoder]))


@given(sent)
@settings(deadline=None, max_examples=examples(300))
def test_it_comes_back_equal(sent: tuple[MessageDecoder[Any], Message]) -> None:
    decoder, message = sent
    assert decoder.decode(encode(message)) == message


def test_every_message_is_among_these() -> None:
    assert MESSAGES.keys() == {kind for union in UNIONS.values() for kind in get_args(union)}


@given(sent, st.sampled_from(DECODERS))
@settings(deadline=None, max_examples=examples(100))
def test_a_decoder_refuses_the_messages_of_another_direction(
    sent: tuple[MessageDecoder[Any], Message], other: MessageDecoder[Any]
) -> None:
    decoder, message = sent
    if decoder is not other:
        with pytest.raises(MalformedMessageError, match=f"may not send message '{type(message).__name__}' here"):
            other.decode(encode(message))


junk = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(max_size=5),
        st.binary(max_size=5), st.just("x" * 1000),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)  # fmt: skip


@given(st.data(), sent)
@settings(deadline=None, max_examples=examples(500))
def test_message_with_a_changed_byte_is_accepted_or_refused_by_name(
    data: st.DataObject, sent: tuple[MessageDecoder[Any], Message]
) -> None:
    decoder, message = sent
    document = msgspec.msgpack.decode(encode(message))
    inner = document
    while isinstance(inner, dict | list) and inner:
        container = inner
        place = data.draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner))))
        inner = container[place]
        if data.draw(st.booleans()):
            break
    else:
        container, place = document, "type"
    if isinstance(container, dict) and data.draw(st.booleans()):
        del container[place]
    else:
        container[place] = data.draw(junk)
    try:
        taken = decoder.decode(msgspec.msgpack.encode(document))
    except MalformedMessageError as error:
        message_text = str(error)
    else:
        assert decoder.decode(encode(taken)) == taken or "nan" in repr(taken)
        return
    assert 0 < len(message_text) < 1000
    if document.get("type") == type(message).__name__:
        assert f"the message {type(message).__name__} of" in message_text


@given(st.binary(max_size=200), st.sampled_from(DECODERS))
@settings(max_examples=examples(300))
def test_bytes_that_are_no_message_are_refused(body: bytes, decoder: MessageDecoder[Any]) -> None:
    with pytest.raises(MalformedMessageError):
        decoder.decode(body)


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize(
    "body",
    [
        b"\x91" * 200_000,  # arrays in one another
        b"\x81\xa4type" * 50_000,
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion elements
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\x81\xa4type\xdb\xff\xff\xff\xff",
    ],
)
def test_measureless_announcements_are_refused_at_once(decoder: MessageDecoder[Any], body: bytes) -> None:
    with pytest.raises(MalformedMessageError, match="are not a message"):
        decoder.decode(body)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"checkpoint_id": -1}, r"Expected `int` >= 0 - at `\$.checkpoint_id`"),
        ({"subtask": "1"}, r"Expected `int`, got `str` - at `\$.subtask`"),
        ({"metrics": {"sync_duration": 0.5}}, r"Expected `int`, got `float` - at `\$.metrics.sync_duration`"),
        ({"state": {"operators": {"u": {"lists": [{"name": "n", "mode": "?", "items": []}]}}}}, r"Invalid enum value"),
        (
            {"state": {"operators": {"u": {"lists": [{"name": "n", "mode": "UNION", "items": [{1: 2}]}]}}}},
            "a list state has an object with a key that is not a text",
        ),
        (
            {"state": {"inputs": [{"edge": 0, "peer": -2, "schema": "", "segments": []}]}},
            r"Expected `int` >= -1 - at `\$.state.inputs\[0\].peer`",
        ),
    ],
)
def test_the_error_for_a_wrong_acknowledgement_names_what_is_wrong(change: dict[str, Any], expected: str) -> None:
    right = AcknowledgeCheckpoint(1, "v", 0, 7, "file:///c", SubtaskState(), CheckpointMetrics())
    document = msgspec.msgpack.decode(encode(right))
    assert FROM_WORKER.decode(msgspec.msgpack.encode(document)) == right
    with pytest.raises(
        MalformedMessageError, match=f"message AcknowledgeCheckpoint of a worker is malformed: .*{expected}"
    ):
        FROM_WORKER.decode(msgspec.msgpack.encode(document | change))


def test_failures_without_a_cause_and_reasons_that_there_are_not_are_refused() -> None:
    with pytest.raises(ValueError, match="does not name its failure"):
        TaskStateChanged(1, "v", 0, TaskState.FAILED)
    with pytest.raises(ValueError, match="'BECAUSE' is not a reason"):
        DeclineCheckpoint(1, "v", 0, 1, "BECAUSE", "")
