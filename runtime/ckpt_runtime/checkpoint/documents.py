"""The schema of ``_metadata``: the JSON forms of this room's values. Shapes only."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from msgspec import Struct

from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.checkpoint.state_handles import KeyedStateHandle, SubtaskState
from ckpt_runtime.checkpoint.statistics import CheckpointType
from ckpt_runtime.graph.job_graph import Partitioning
from ckpt_runtime.graph.schema import DocumentError, NonNegative, Parallelism, check_values, checked


class _Properties(Struct):
    type: CheckpointType
    savepoint_format: SavepointFormat | None
    full: bool
    drain: bool


class _Vertex(Struct):
    id: str
    name: str
    operator_uids: list[str]
    parallelism: Parallelism
    max_parallelism: Parallelism


class _Edge(Struct):
    source: str
    target: str
    partitioning: Partitioning
    keys: list[str]


class _Entry(Struct):
    vertex: str
    subtask: NonNegative
    state: SubtaskState

    @property
    def key(self) -> SubtaskKey:
        return (self.vertex, self.subtask)


class _Checkpoint(Struct):
    id: NonNegative
    job_id: str
    timestamp: int
    completion_timestamp: int
    directory: str
    properties: _Properties
    vertices: list[_Vertex]
    states: list[Any]
    finished: list[tuple[str, NonNegative]]
    edges: list[_Edge] = []


def check_checkpoint(document: object) -> dict[SubtaskKey, SubtaskState]:
    """Raises :class:`DocumentError` unless it is the JSON form of a ``CompletedCheckpoint``, fitting together.

    Returns its states.
    """
    found = checked(document, _Checkpoint)
    parallelism = {vertex.id: vertex.parallelism for vertex in found.vertices}
    if len(parallelism) != len(found.vertices):
        raise DocumentError("two vertices have the same id")
    # One by one: a large document must not hold up the other threads of this process.
    entries = [checked(_with_kinds(entry), _Entry) for entry in found.states]
    for name, subtasks in (("states", [entry.key for entry in entries]), ("finished", found.finished)):
        if len(set(subtasks)) != len(subtasks):
            raise DocumentError(f"`{name}` names a subtask twice")
        for vertex, subtask in subtasks:
            if subtask >= parallelism.get(vertex, 0):
                raise DocumentError(f"`{name}` names subtask {subtask} of {vertex[:100]!r}, which there is not")
    uids = {vertex.id: frozenset(vertex.operator_uids) for vertex in found.vertices}
    for entry in entries:
        where = f"the state of subtask {entry.subtask} of {entry.vertex[:100]!r}"
        for uid in entry.state.operators.keys() - uids[entry.vertex]:
            raise DocumentError(f"{where} is also one of operator {uid[:100]!r}, which the vertex has not")
        check_state(entry.state, where)
    return {entry.key: entry.state for entry in entries}


def _with_kinds(entry: Any) -> Any:
    """Before handles of keyed state said their kind there was one. What has another shape is refused afterwards."""
    with suppress(LookupError, TypeError, AttributeError):
        for operator in entry["state"]["operators"].values():
            for handle in operator["keyed"]:
                handle.setdefault("kind", "key_groups")
    return entry


def check_state(state: SubtaskState, where: str) -> None:
    """Raises :class:`DocumentError` for values in it that no document can hold."""
    for operator in state.operators.values():
        for handle in operator.keyed:
            if isinstance(handle, KeyedStateHandle):
                for section in handle.sections:
                    check_values(section.descriptor, f"{where}: a descriptor")
            else:
                check_values(handle.description, f"{where}: a description")
        for listed in operator.lists:
            check_values(listed.items, f"{where}: a list state")
