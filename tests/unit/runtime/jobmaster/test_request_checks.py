"""Which state backend and which release may restore a snapshot: refused before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    ChannelStateStream,
    CompletedCheckpoint,
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedStateHandle,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.jobmaster.gateway_values import RunRequest, SubmissionFailed
from ckpt_runtime.jobmaster.request_checks import (
    check_backend,
    check_no_drill,
    check_planned,
    check_release,
    given_configuration,
)
from ckpt_runtime.version import VERSION

ALL = KeyGroupRange(0, 127)
FILE = StateFile("f", 1, "c")
IN_MEMORY = KeyedStateHandle(ALL, FILE, ())
ROCKSDB = IncrementalKeyedStateHandle(ALL, "rocksdb", {"f": FILE})
OWN = IncrementalKeyedStateHandle(ALL, "mine", {"f": FILE})
CANONICAL = CanonicalKeyedStateHandle(ALL, "s", {}, (), FILE)

pytestmark = pytest.mark.row("203.5", "203.7")


def snapshot(handles: Sequence[KeyedHandle]) -> CompletedCheckpoint:
    vertex = VertexDescriptor("v", "v", ("stateless", "op"), 1, 128)
    operators = {"stateless": OperatorSubtaskState(), "op": OperatorSubtaskState(tuple(handles))}
    states = {("v", 0): SubtaskState(operators)}
    return CompletedCheckpoint(1, "j", 0, 0, "/s", CheckpointProperties(), (vertex,), states)


def check(handles: Sequence[KeyedHandle], backend: str) -> None:
    request = RunRequest("p", savepoint_path="/s")
    check_backend(snapshot(handles), Configuration({"state.backend.type": backend}), request)


@pytest.mark.parametrize(
    ("handles", "backend"),
    [
        ([], "hashmap"),
        ([], "rocksdb"),
        ([IN_MEMORY], "hashmap"),
        ([ROCKSDB], "rocksdb"),
        ([CANONICAL, CANONICAL], "hashmap"),
        ([CANONICAL], "rocksdb"),
        ([OWN], "hashmap"),
    ],
)
def test_a_backend_restores_its_own_form_and_the_canonical_one(handles: list[KeyedHandle], backend: str) -> None:
    check(handles, backend)


@pytest.mark.parametrize(
    ("handles", "backend", "written"), [([IN_MEMORY], "rocksdb", "hashmap"), ([ROCKSDB], "hashmap", "rocksdb")]
)
def test_native_form_of_another_backend_is_refused_with_a_remedy(
    handles: list[KeyedHandle], backend: str, written: str
) -> None:
    with pytest.raises(SubmissionFailed, match="cannot restore from /s") as refused:
        check(handles, backend)
    assert f"native form of the state backend '{written}'" in str(refused.value)
    assert f"state.backend.type is '{backend}'" in str(refused.value)
    assert "only a savepoint in canonical form can change the backend" in str(refused.value)


def test_metadata_names_the_backend_that_reads_the_state() -> None:
    assert [snapshot([handle]).state_backend for handle in (IN_MEMORY, ROCKSDB, CANONICAL)] == [
        "hashmap",
        "rocksdb",
        "any",
    ]
    assert snapshot([]).state_backend == "any"


def released(written_by: str | None, *, in_flight: bool) -> CompletedCheckpoint:
    found = replace(snapshot([IN_MEMORY]), written_by=written_by)
    if not in_flight:
        return found
    (key,) = found.states
    streams = (ChannelStateStream(0, 0, "", ()),)
    return replace(found, states={key: replace(found.states[key], inputs=streams)})


@pytest.mark.row("203.13")
@pytest.mark.parametrize("written_by", ["0.0.9", "9.1.0", VERSION.replace("0.1", "0.10")])
def test_in_flight_data_is_restored_only_by_the_release_that_wrote_it(written_by: str) -> None:
    check_release(released(written_by, in_flight=False), RunRequest("p", savepoint_path="/s"))
    with pytest.raises(SubmissionFailed, match="unaligned checkpoint of release.*take a savepoint"):
        check_release(released(written_by, in_flight=True), RunRequest("p", savepoint_path="/s"))


@pytest.mark.parametrize("written_by", [VERSION, f"{VERSION.rpartition('.')[0]}.99", None])
def test_in_flight_data_is_restored_by_releases_that_differ_in_the_patch_only(written_by: str | None) -> None:
    check_release(released(written_by, in_flight=True), RunRequest("p", savepoint_path="/s"))


def graph(kind: str) -> JobGraph:
    return JobGraph("g", (JobVertex("v", (OperatorNode("u", "u", kind),), 1),), ())


@pytest.mark.row("air.9")
@pytest.mark.parametrize(("kind", "drill"), [("sink", True), ("committer", True), ("drill_sink", False)])
def test_operators_of_drills_are_refused_in_other_jobs_and_real_sinks_in_drills(kind: str, drill: bool) -> None:
    with pytest.raises(SubmissionFailed, match=kind):
        check_planned(graph(kind), RunRequest("p", drill=drill))
    check_planned(graph(kind), RunRequest("p", drill=not drill))


@pytest.mark.row("air.9")
def test_drill_retains_nothing_and_ends_with_its_first_failure_under_any_options() -> None:
    said = {"execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION"}
    said["restart-strategy.type"] = "fixed-delay"
    assert given_configuration(RunRequest("p", configuration=said)).to_dict() == said
    assert given_configuration(RunRequest("p", configuration=said, drill=True)).to_dict() == {
        "execution.checkpointing.externalized-checkpoint-retention": "NO_EXTERNALIZED_CHECKPOINTS",
        "restart-strategy.type": "none",
    }


@pytest.mark.row("air.9")
def test_checkpoint_of_a_drill_starts_no_job() -> None:
    real = snapshot([])
    request = RunRequest("p", savepoint_path="/s")
    check_no_drill(real, request)
    marked = OperatorSubtaskState((), (OperatorListState("restore-drill", OperatorStateMode.SPLIT, ({"rows": 0},)),))
    with pytest.raises(SubmissionFailed, match="cannot restore from /s: it is a checkpoint of a restore drill"):
        check_no_drill(replace(real, states={("v", 0): SubtaskState({"op": marked})}), request)
