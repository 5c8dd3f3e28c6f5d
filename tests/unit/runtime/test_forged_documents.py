"""Each kind of document that is stored or sent, with each field in turn forged: it works, or is refused by name."""

from __future__ import annotations

import json
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import msgspec
import orjson
import pytest

from ckpt_runtime.checkpoint.channel_state_assignment import StateAssignmentError
from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    SubtaskState,
    check_state,
)
from ckpt_runtime.checkpoint.configuration import CheckpointOverrides
from ckpt_runtime.checkpoint.executions import TaskState
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties
from ckpt_runtime.checkpoint.sink_state import pending_names, restored_sink_ids
from ckpt_runtime.checkpoint.state_assignment import assign_states, restored_max_parallelism
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.cli.framework import read_session
from ckpt_runtime.client.process_id import ProcessId
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.registry import VERTEX_BOUNDS
from ckpt_runtime.frontend.planning_process import PlanResult
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.graph.schema import checked
from ckpt_runtime.jobmaster.ended_job import EndedJob
from ckpt_runtime.jobmaster.known_jobs import find_jobs
from ckpt_runtime.network.agent_messages import (
    FROM_AGENT,
    FROM_UNREGISTERED,
    TO_AGENT,
    AdoptWorker,
    AgentHeartbeat,
    ProcessIdentity,
    RegisterAgent,
    RegisterWorker,
    WorkerExited,
)
from ckpt_runtime.network.connections import Message, MessageDecoder, encode
from ckpt_runtime.network.control_messages import (
    FROM_WORKER,
    TO_WORKER,
    AcknowledgeCheckpoint,
    DeclineCheckpoint,
    SubtaskMeasures,
    TaskFailure,
    TaskStateChanged,
    TriggerCheckpoint,
    WorkerHeartbeat,
)
from ckpt_runtime.network.elements import CheckpointBarrier, decode_element, encode_element
from ckpt_runtime.process_figures import ProcessMeter
from ckpt_runtime.scheduler.job_events import FailureInfo
from ckpt_runtime.scheduler.replacement import declared_bounds
from ckpt_runtime.snapshots.inspection import states_of, summarized
from ckpt_runtime.snapshots.snapshot import Snapshot
from ckpt_runtime.spark.launch import SessionInfo
from ckpt_runtime.storage import metadata
from ckpt_runtime.storage.claims import Claim, Claimant, _read_successor, read_claim
from ckpt_runtime.storage.filesystem import Location, make_directory, resolve
from ckpt_runtime.storage.ha_store import HaStore, HeldUpgrade, HeldUpgrades
from ckpt_runtime.storage.leader_store import opened, signed
from ckpt_runtime.storage.metadata import read_metadata
from ckpt_runtime.storage.publish import checksum_of, publish
from ckpt_runtime.storage.savepoint_entry import Mark, SavepointEntry, read_entry
from ckpt_runtime.storage.versioned_document import decode_document, encode_document
from tests.support.forging import FEW_VALUES, unnamed_errors
from tests.support.golden import DIRECTORY as GOLDEN
from tests.support.golden_session import DIRECTORY as HIGH_AVAILABILITY
from tests.support.stored_documents import CHECKPOINT, GRAPH, RESULT, STORED, source_state, state

SNAPSHOTS = ["unaligned", "canonical", "rocksdb"]


def _use_graph(document: Any) -> None:
    graph = JobGraph.from_json(document)
    assert graph.slots >= 1
    assert graph.fingerprint
    assert all(graph.vertex(edge.target).name for edge in graph.edges)


def _use_result(document: Any) -> None:
    ended = EndedJob(document)
    ended.overview(), ended.details(), ended.config_info(), ended.checkpoint_statistics(), ended.metrics()
    ended.exception_history(5), ended.result()


def _use_snapshot(document: Any) -> None:
    found = CompletedCheckpoint.from_json(document)
    snapshot = Snapshot(resolve("memory://forged"), found)
    summarized(snapshot)
    restored_sink_ids(found), pending_names([found]), json.dumps(found.to_json())
    restored_max_parallelism(found)
    with suppress(StateAssignmentError):
        assign_states(found, GRAPH, allow_non_restored_state=True)
    list(states_of(snapshot, count=False))


def _use_state(document: Any) -> None:
    found = checked(document, SubtaskState)
    check_state(found, "it")
    found.files(), json.dumps(found.to_json())


def _use_committables(document: Any) -> None:
    """As clean-up does: which files may a restore still commit?"""
    found = checked(document, SubtaskState)
    pending_names([replace(CHECKPOINT, states={(VERTEX, 0): found})])


def _use_file(name: str, read: Callable[[Location], object]) -> Callable[[Any], None]:
    """Stores a document in a directory of its own, as ``name``, and reads it as the engine does."""

    def use(document: Any) -> None:
        directory = resolve(f"memory://{uuid4().hex}")
        make_directory(directory)
        try:
            publish(directory.child(*name.split("/")), encode_document(document))
        except ValueError:  # JSON has no such number: it cannot be stored
            return
        read(directory)

    return use


def _use_session(document: Any) -> None:
    with TemporaryDirectory() as directory:
        file = Path(directory) / "session.json"
        file.touch(0o600)
        file.write_text(json.dumps(document))
        read_session(file)


def _use_leader(document: Any) -> None:
    """An attacker who has the token can sign any document."""
    opened(json.dumps(signed({**document}, TOKEN, "c", time.time() + 5)).encode(), TOKEN, "c", time.time())
    opened(json.dumps(document).encode(), None, "c", time.time())


def _use_header(document: Any) -> None:
    """Reads metadata whose header says what the document says, and has a checksum that fits."""
    try:
        payload = orjson.dumps({**document, "header_checksum": checksum_of(orjson.dumps(document))})
    except TypeError:  # JSON has no such number: it cannot be stored
        return
    metadata.decode(SKIPPABLE.pack(0x184D2A5C, len(payload)) + payload + BODY, "it")


VERTEX = GRAPH.vertices[0].id
CLAIMANT = Claimant("1" * 32, "file:///ha/default", "file:///s/1", "m:1:2")
CLAIM = Claim(CLAIMANT, "file:///s/1/chk-3", ("shared/a",), (replace(CLAIMANT, job_id="2" * 32),), 4)
MARK = Mark(5, True, "ana", "4 s", 9)
ENTRY = SavepointEntry("1" * 32, 3, 4, 5, "NATIVE", "hashmap", 6, 7, "0.1.0", "j", "p", 1, "c", "t", (MARK,), (MARK,))
COMMITTED = OperatorListState(
    "messages",
    OperatorStateMode.SPLIT,
    ({"version": 2, "checkpoint": 3, "messages": [[0, '{"name":"a"}'], [1, None], [2, "text"]], "writer": "w"},),
)
OWN = OperatorListState("pending", OperatorStateMode.SPLIT, ({"committable": {"name": "b"}}, {"name": "c"}))
TOKEN = "t" * 20
SKIPPABLE = struct.Struct("<II")
METADATA = metadata.encode({"a": [1]})
HEADER_END = SKIPPABLE.size + SKIPPABLE.unpack_from(METADATA)[1]
BODY = METADATA[HEADER_END:]
HEADER = {
    key: value for key, value in json.loads(METADATA[SKIPPABLE.size : HEADER_END]).items() if key != "header_checksum"
}

DOCUMENTS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    **STORED,
    "graph": (GRAPH.to_json(), _use_graph),
    "result of a job": (RESULT, _use_result),
    "acknowledged state": (state(0).to_json(), _use_state),
    "acknowledged state of a source": (source_state().to_json(), _use_state),
    "declared bounds": (
        {vertex.id: [1, 4] for vertex in GRAPH.vertices},
        lambda document: declared_bounds(replace(GRAPH, configuration={VERTEX_BOUNDS: json.dumps(document)})),
    ),
    "result of planning": (
        {"job_graph": GRAPH.to_json(), "warnings": ["w"], "own_configuration": {"a": "b"}},
        lambda document: PlanResult.from_json(json.dumps(document).encode()),
    ),
    "committables": (SubtaskState({"sink": OperatorSubtaskState(lists=(COMMITTED, OWN))}).to_json(), _use_committables),
    "claim": (asdict(CLAIM), _use_file("claim", read_claim)),
    "successor of a claim": (
        asdict(CLAIMANT),
        _use_file("claim-after-1", lambda place: _read_successor(place.child("claim-after-1"))),
    ),
    "entry of the savepoint catalogue": (asdict(ENTRY), _use_file(f"catalogue/{1:020d}.json", read_entry)),
    "upgrades": (
        {"upgrades": {"1" * 32: asdict(HeldUpgrade("o", "2" * 32, 3, 4, "r", "/s"))}},
        lambda document: checked(document, HeldUpgrades),
    ),
    "session file": (
        msgspec.to_builtins(SessionInfo("http://x", ProcessId(3, 4), ProcessId(5, 6), "/l", "/s", TOKEN)),
        _use_session,
    ),
    "address of the leader": ({"rest": "http://x:1", "app_id": "a", "epoch": 3}, _use_leader),
    "header of metadata": (HEADER, _use_header),
    "barrier": (
        json.loads(encode_element(CheckpointBarrier(3, 4, CheckpointOptions(CheckpointProperties(), "d")))),
        lambda document: decode_element(json.dumps(document).encode()),
    ),
    "overrides": (
        {"checkpointTimeout": 123_000, "unalignedEnabled": True},
        lambda document: CheckpointOverrides.from_document(json.dumps(document)),
    ),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_forged_document_works_or_is_refused_by_name(name: str) -> None:
    document, read = DOCUMENTS[name]
    found, refused = unnamed_errors(json.loads(json.dumps(document)), read)
    assert not found, "\n".join(found)
    assert refused > 0


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_forged_metadata_of_a_stored_snapshot_works_or_is_refused_by_name(name: str) -> None:
    document = read_metadata(str(GOLDEN / "format-2" / name)).document
    found, refused = unnamed_errors(document, _use_snapshot, FEW_VALUES)
    assert not found, "\n".join(found)
    assert refused > 0


LEADER = HIGH_AVAILABILITY / "0.1.0"
FAILED = TaskFailure(FailureInfo("E", "m", "t"))
PROCESS = ProcessIdentity("m", 7, 9)
MEASURES = SubtaskMeasures("v", 0, 1, 2, 3, 4, 0, 1.0, 2.0, 3.0, operator_rows=(1, 2), input_watermark=5)
PROPERTIES = CheckpointProperties()
MESSAGES: tuple[tuple[MessageDecoder[Any], Message], ...] = (
    (FROM_UNREGISTERED, RegisterAgent("s", "localhost", (0, 1), PROCESS)),
    (FROM_UNREGISTERED, RegisterWorker("s", "w", ("localhost", 5), PROCESS, "/d")),
    (FROM_AGENT, AgentHeartbeat({"w": 4})),
    (FROM_AGENT, WorkerExited("w", 1)),
    (TO_AGENT, AdoptWorker("w", PROCESS, "/d")),
    (FROM_WORKER, WorkerHeartbeat(3, (MEASURES,), (), ProcessMeter().measure())),
    (FROM_WORKER, TaskStateChanged(3, "v", 0, TaskState.FAILED, FAILED)),
    (FROM_WORKER, DeclineCheckpoint(3, "v", 0, 7, "IO_EXCEPTION", "m")),
    (FROM_WORKER, AcknowledgeCheckpoint(3, "v", 0, 7, "d", source_state(), CheckpointMetrics())),
    (TO_WORKER, TriggerCheckpoint(3, (("v", 0),), 7, 5, CheckpointOptions(PROPERTIES, "d"))),
)


@pytest.mark.parametrize(("decoder", "message"), MESSAGES, ids=lambda given: type(given).__name__)
def test_forged_control_message_is_decoded_or_refused_by_name(decoder: MessageDecoder[Any], message: Message) -> None:
    document = msgspec.msgpack.decode(encode(message))

    def decode(forged: Any) -> None:
        try:
            body = msgspec.msgpack.encode(forged)
        except OverflowError:  # MessagePack has no such number: it cannot be sent
            return
        decoder.decode(body)

    found, refused = unnamed_errors(document, decode)
    assert not found, "\n".join(found)
    assert refused > 0


@pytest.mark.parametrize("file", sorted(file.relative_to(LEADER) for file in LEADER.rglob("0*.json")), ids=str)
def test_forged_record_of_high_availability_is_recovered_or_refused_by_name(file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "default"
    shutil.copytree(LEADER, copy)
    cluster = Configuration({})

    def recover(document: Any) -> None:
        try:
            (copy / file).write_bytes(encode_document(document))
        except ValueError:  # JSON has no such number: it cannot be stored
            return
        store = HaStore(str(tmp_path), epoch=9)
        for found in find_jobs(store, cluster, read=lambda url: CHECKPOINT):
            if found.result is not None:
                EndedJob(found.result)
            assert found.failure is None or ": " in found.failure
        store.leader.current(), store.leader.lease(1)
        store.retired.read(), store.programs.adopt(), store.upgrades.read()

    found, _ = unnamed_errors(decode_document((LEADER / file).read_bytes(), str(file)), recover, FEW_VALUES, depth=3)
    assert not found, "\n".join(found)
