"""A valid document of each kind that a job stores, for tests that change it."""

from __future__ import annotations

from dataclasses import asdict

from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateSegment,
    ChannelStateStream,
    CompletedCheckpoint,
    EdgeDescriptor,
    KeyedSection,
    KeyedStateHandle,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.statistics import CheckpointCounts, CheckpointStatsSnapshot, RestoredCheckpointStats
from ckpt_runtime.configuration.configuration import Configuration, OwnConfiguration
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import checked
from ckpt_runtime.jobmaster.ended_job import EndedJob, result_document
from ckpt_runtime.jobmaster.gateway_values import EffectiveCheckpointConfig, LineagePlace, RunRequest
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.checkpoint_storage import SnapshotDisposal
from ckpt_runtime.storage.job_store import StoredJob
from ckpt_runtime.storage.leader_store import LeaderInfo

JOB = "0123456789abcdef" * 2
SOURCE, SINK = "a" * 32, "b" * 32
GRAPH = JobGraph(
    "job",
    (
        JobVertex(SOURCE, (OperatorNode("source", "source", "source", stateful=True),), 2),
        JobVertex(
            SINK, tuple(OperatorNode(uid, uid, "aggregate", stateful=True) for uid in ("count", "inline")), 2, 128
        ),
    ),
    (JobEdge(SOURCE, SINK, Partitioning.HASH, ("key",)),),
    {"parallelism.default": "2"},
)


def state(subtask: int) -> SubtaskState:
    file = StateFile(f"state-{subtask}", 100, "xxh3-128:" + "0" * 32)
    section = KeyedSection("counts", {"kind": "value", "key": [{"name": "k"}]}, ((64 * subtask, 0, 50),))
    groups = KeyGroupRange(64 * subtask, 64 * subtask + 63)
    segment = ChannelStateSegment(file, 0, 50, groups)
    return SubtaskState(
        {
            "count": OperatorSubtaskState(
                (KeyedStateHandle(groups, file, (section,)),),
                (OperatorListState("offsets", OperatorStateMode.SPLIT, ({"partition": 1, "offset": [1]}, 2)),),
            ),
            "inline": OperatorSubtaskState(
                (KeyedStateHandle(groups, StateFile("", 3, "xxh3-128:" + "0" * 32, b"abc"), ()),)
            ),
        },
        100,
        (ChannelStateStream(0, 1, "c2NoZW1h", (segment,)),),
    )


def source_state() -> SubtaskState:
    offsets = OperatorListState("offsets", OperatorStateMode.UNION, ([1, {"a": None}],))
    segment = ChannelStateSegment(StateFile("", 3, "xxh3-128:" + "0" * 32, b"abc"), 0, 3)
    outputs = (ChannelStateStream(0, 0, "", (segment,)),)
    return SubtaskState({"source": OperatorSubtaskState(lists=(offsets,))}, 3, outputs=outputs)


CHECKPOINT = CompletedCheckpoint(
    7,
    JOB,
    1,
    2,
    "file:///s",
    CheckpointProperties(),
    tuple(VertexDescriptor.of(vertex) for vertex in GRAPH.vertices),
    {(SOURCE, 1): source_state(), **{(SINK, subtask): state(subtask) for subtask in range(2)}},
    frozenset({(SOURCE, 0)}),
    tuple(EdgeDescriptor.of(edge) for edge in GRAPH.edges),
)
FAILURE = FailureCause("E", "m", "t")
CONFIG = EffectiveCheckpointConfig(CheckpointConfiguration(), True, "hashmap", "filesystem")
REQUEST = RunRequest("p", "m:f", ("a",), 2, {"a": "b"}, "/s", job_id=JOB)
RESULT = result_document(
    job_id=JOB,
    status=JobStatus.FAILED,
    graph=GRAPH,
    own=OwnConfiguration(Configuration({"a": "b"})),
    timestamps={JobStatus.INITIALIZING: 1, JobStatus.FAILED: 2},
    failure=FAILURE,
    exceptions=[{"failure": {"exception": "E", "message": "m", "stack_trace": "t"}, "timestamp_ms": 1}],
    restart_strategy="none",
    checkpoint_config=CONFIG,
    request=REQUEST,
    checkpoints=CheckpointStatsSnapshot(
        CheckpointCounts(),
        latest_restored=RestoredCheckpointStats(3, 5, is_savepoint=True, external_path="/s/savepoint"),
    ),
    restarts=1,
    lineage=LineagePlace("7" * 32, 2),
)

STORED = {
    "plan": (StoredJob(JOB, GRAPH.to_json(), {"a": "b"}).to_json(), StoredJob.from_json),
    "leader": (asdict(LeaderInfo("http://x", "app", "1", 3)), lambda document: checked(document, LeaderInfo)),
    "disposal": ({"directory": "file:///s", "files": ["a", "b/c"]}, SnapshotDisposal.from_json),
    "request": (RESULT["request"], lambda document: checked(document, RunRequest)),
    "failure": (RESULT["exceptions"][0], lambda document: EndedJob({**RESULT, "exceptions": [document]})),
}
