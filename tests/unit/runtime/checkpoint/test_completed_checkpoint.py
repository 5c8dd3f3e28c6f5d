"""Handles of keyed state say what they are; what was written before they did is read all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    DOCUMENT_VERSION,
    CompletedCheckpoint,
    IncrementalKeyedStateHandle,
    KeyedSection,
    KeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    check_state,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import DocumentError, checked

GROUPS = KeyGroupRange(0, 63)
SECTION = KeyedSection("counts", {"kind": "value"}, ((3, 0, 5),))
KEYED = KeyedStateHandle(GROUPS, StateFile("f", 5, "c"), (SECTION,))
FILES = {"000012.sst": StateFile("file:///shared/x", 7, "c"), "MANIFEST": StateFile("", 2, "c", b"ab")}
INCREMENTAL = IncrementalKeyedStateHandle(GROUPS, "files", FILES, {"states": ["counts"]})
STATE = SubtaskState({"op": OperatorSubtaskState((KEYED, INCREMENTAL))}, 14)


def checkpoint(state: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": 1, "job_id": "j", "timestamp": 1, "completion_timestamp": 2, "directory": "file:///c",
        "properties": {"type": "CHECKPOINT", "savepoint_format": None, "full": False, "drain": False},
        "vertices": [{"id": "v", "name": "v", "operator_uids": ["op"], "parallelism": 1, "max_parallelism": 64}],
        "edges": [], "states": [{"vertex": "v", "subtask": 0, "state": state}], "finished": [],
        "version": DOCUMENT_VERSION,
    }  # fmt: skip


def test_handles_survive_their_document_and_name_their_files() -> None:
    assert checked(STATE.to_json(), SubtaskState) == STATE
    check_state(STATE, "it")
    assert CompletedCheckpoint.from_json(checkpoint(STATE.to_json())).states == {("v", 0): STATE}
    assert [handle["kind"] for handle in STATE.to_json()["operators"]["op"]["keyed"]] == ["key_groups", "incremental"]
    assert STATE.files() == [KEYED.file, FILES["000012.sst"]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"<= 1.*version"),
        ({"kind": "other"}, r"Invalid value 'other'.*kind"),
        ({"files": {"../outside": {"path": "f", "length": 1, "checksum": "c"}}}, "matching regex"),
        ({"files": {"name\n": {"path": "f", "length": 1, "checksum": "c"}}}, "matching regex"),
        ({"key_groups": [0, 1, 2]}, "length"),
        ({"description": {"a": eval("[" * 70 + "]" * 70)}}, "nested deeper"),
    ],
)
def test_a_handle_that_this_version_does_not_know_is_refused(changes: dict[str, Any], message: str) -> None:
    document = json.loads(json.dumps(STATE.to_json()))
    document["operators"]["op"]["keyed"][1] |= changes
    with pytest.raises(DocumentError, match=message):
        CompletedCheckpoint.from_json(checkpoint(document))
