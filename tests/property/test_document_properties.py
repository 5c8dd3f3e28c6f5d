"""Documents and archives that were forged or damaged anywhere: one named error comes out, or a value to use."""

from __future__ import annotations

import copy
import io
import json
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.channel_state_assignment import StateAssignmentError
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint, SubtaskState, check_state
from ckpt_runtime.checkpoint.state_assignment import assign_states, restored_max_parallelism
from ckpt_runtime.frontend.planning_process import PlanResult
from ckpt_runtime.graph.job_graph import MAX_SUBTASKS, JobGraph
from ckpt_runtime.graph.schema import DocumentError, checked
from ckpt_runtime.jobmaster.ended_job import EndedJob
from ckpt_runtime.jobmaster.program_store import ProgramRefusedError, modules_of
from ckpt_runtime.snapshots.snapshot import disposal_of, open_snapshot
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import make_directory, resolve
from ckpt_runtime.storage.metadata import write_metadata
from tests.support.effort import examples
from tests.support.stored_documents import CHECKPOINT, GRAPH, JOB, RESULT, STORED, state

texts = st.text(max_size=6)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | texts | st.sampled_from([-1, 1 << 63, 1 << 70, "", JOB])
)
junk = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)


def places(document: Any) -> list[tuple[Any, Any]]:
    """Each container with each of its keys."""
    found, pending = [], [document]
    while pending:
        container = pending.pop()
        keys = list(container) if isinstance(container, dict) else range(len(container))
        for key in keys:
            found.append((container, key))
            if isinstance(container[key], dict | list):
                pending.append(container[key])
    return found


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """A valid document after one to three changes: something replaced, removed, doubled, added or exchanged."""
    document = json.loads(json.dumps(valid))
    for _ in range(draw(st.integers(1, 3))):
        known = places(document)
        if not known:
            break
        container, key = draw(st.sampled_from(known))
        match draw(st.sampled_from(["replace", "remove", "double", "add", "exchange"])):
            case "replace":
                container[key] = draw(junk)
            case "remove":
                del container[key]
            case "double" if isinstance(container, list):
                container.append(copy.deepcopy(container[key]))
            case "exchange":
                other, place = draw(st.sampled_from(known))
                container[key] = copy.deepcopy(other[place]) if place in other or isinstance(other, list) else None
            case _ if isinstance(container, dict):
                container[draw(texts)] = draw(junk)
            case _:
                container.append(draw(junk))
    return document


def refused(read: Callable[[Any], Any], document: Any, *also: type[Exception]) -> Any:
    """What was read; None when it was refused by name."""
    with suppress(DocumentError, *also):
        return read(document)
    return None


def test_the_documents_of_these_tests_are_right() -> None:
    assert CompletedCheckpoint.from_json(json.loads(json.dumps(CHECKPOINT.to_json()))) == CHECKPOINT
    assert JobGraph.from_json(json.loads(json.dumps(GRAPH.to_json()))) == GRAPH
    assert EndedJob(json.loads(json.dumps(RESULT))).overview().name == "job"
    assign_states(CHECKPOINT, GRAPH, allow_non_restored_state=True)


@settings(max_examples=examples(250))
@given(mutated(CHECKPOINT.to_json()))
def test_forged_metadata_of_a_snapshot_is_read_or_refused(document: Any) -> None:
    found = refused(CompletedCheckpoint.from_json, document)
    if found is not None:
        assert isinstance(found, CompletedCheckpoint)
        json.dumps(found.to_json())
        with suppress(StateAssignmentError):
            restored_max_parallelism(found)
            assign_states(found, GRAPH, allow_non_restored_state=True)


@settings(max_examples=examples(200))
@given(mutated(state(0).to_json()))
def test_forged_acknowledgements_are_read_or_refused(document: Any) -> None:
    found = refused(lambda document: checked(document, SubtaskState), document)
    if found is not None and refused(lambda state: check_state(state, "it") is None, found):
        found.files()
        json.dumps(found.to_json())


@settings(max_examples=examples(200))
@given(mutated(GRAPH.to_json()))
def test_forged_graphs_are_read_or_refused(document: Any) -> None:
    found = refused(JobGraph.from_json, document)
    if found is not None:
        assert found.slots >= 1
        assert found.fingerprint
        assert all(found.vertex(edge.target).name for edge in found.edges)


@settings(max_examples=examples(200))
@given(
    mutated({"job_graph": GRAPH.to_json(), "warnings": ["w"], "own_configuration": {"a": "b"}}), st.binary(max_size=3)
)
def test_answers_of_the_plan_process(document: Any, tail: bytes) -> None:
    found = refused(PlanResult.from_json, json.dumps(document).encode() + tail)
    assert found is None or (found.job_graph is None) == (found.failure is not None)


@settings(max_examples=examples(100))
@given(mutated(RESULT))
def test_forged_results_are_read_or_refused(document: Any) -> None:
    found = refused(EndedJob, document)
    if found is not None:
        found.overview(), found.details(), found.config_info(), found.checkpoint_statistics()


@pytest.mark.parametrize("name", STORED)
@settings(max_examples=examples(100))
@given(data=st.data())
def test_other_forged_documents_are_read_or_refused(name: str, data: st.DataObject) -> None:
    valid, read = STORED[name]
    refused(read, data.draw(mutated(valid)), StorageError)


@settings(max_examples=examples(100))
@given(mutated(CHECKPOINT.to_json()))
def test_files_of_forged_metadata(document: Any) -> None:
    """An attacker can compute checksums, too."""
    directory = resolve(f"memory://{uuid4().hex}")
    make_directory(directory)
    try:
        write_metadata(directory, document)
    except (ValueError, AttributeError):  # not a document at all
        return
    refused(open_snapshot, directory.url, StorageError)
    refused(disposal_of, directory.url, StorageError)


ARCHIVE = io.BytesIO()
with zipfile.ZipFile(ARCHIVE, "w", zipfile.ZIP_DEFLATED) as files:
    files.writestr("job.py", "def pipeline(spark):\n    pass\n" * 5)
    files.writestr("päckage/data.txt", "some data " * 20)


@settings(max_examples=examples(200))
@given(data=st.data())
def test_damaged_archives_are_read_or_refused(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    content = bytearray(ARCHIVE.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(content)))
        end = min(len(content), start + data.draw(st.integers(0, 6)))
        content[start:end] = data.draw(st.binary(max_size=6))
    archive = Path(tmp_path_factory.getbasetemp()) / "damaged.zip"
    archive.write_bytes(content)
    with suppress(ProgramRefusedError):
        assert all(isinstance(module, str) for module in modules_of(archive))


def test_a_graph_with_more_subtasks_than_a_driver_can_keep() -> None:
    document = GRAPH.to_json()
    vertices = [{**document["vertices"][0], "id": f"{number:032x}", "parallelism": 32768} for number in range(4)]
    with pytest.raises(DocumentError, match=f"at most {MAX_SUBTASKS}"):
        JobGraph.from_json({**document, "vertices": vertices, "edges": []})


def test_values_without_a_schema_are_not_nested_deeply() -> None:
    document = CHECKPOINT.to_json()
    deep: Any = 1
    for _ in range(200):
        deep = [deep]
    document["states"][1]["state"]["operators"]["count"]["lists"][0]["items"] = [deep]
    with pytest.raises(DocumentError, match="nested deeper than 64 levels"):
        CompletedCheckpoint.from_json(document)
