"""The schema of ``_metadata``: the JSON forms of this room's values. Shapes only."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.checkpoint.state_handles import NO_PEER, OperatorStateMode, SubtaskState
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


class _File(Struct):
    path: str
    length: NonNegative
    checksum: str
    inline: bytes | None = None


class _Section(Struct):
    name: str
    descriptor: dict[str, Any]
    key_group_offsets: list[tuple[NonNegative, NonNegative, NonNegative]]


class _Keyed(Struct):
    key_groups: tuple[int, int]
    file: _File
    sections: list[_Section]


class _ListState(Struct):
    name: str
    mode: OperatorStateMode
    items: list[Any]


class _Operator(Struct):
    keyed: list[_Keyed]
    lists: list[_ListState]


class _Segment(Struct):
    file: _File
    offset: NonNegative
    length: NonNegative
    key_groups: tuple[int, int] | None


class _Stream(Struct):
    edge: NonNegative
    peer: int
    schema: str
    segments: list[_Segment]


class _SubtaskState(Struct):
    operators: dict[str, _Operator]
    bytes: NonNegative
    inputs: list[_Stream] = []
    outputs: list[_Stream] = []


class _Entry(Struct):
    vertex: str
    subtask: NonNegative
    state: _SubtaskState


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


def check_checkpoint(document: object) -> None:
    """Raises :class:`DocumentError` unless it is the JSON form of a ``CompletedCheckpoint``, fitting together."""
    found = checked(document, _Checkpoint)
    parallelism = {vertex.id: vertex.parallelism for vertex in found.vertices}
    if len(parallelism) != len(found.vertices):
        raise DocumentError("two vertices have the same id")
    # One by one: a large document must not hold up the other threads of this process.
    entries = [checked(entry, _Entry) for entry in found.states]
    states = [(entry.vertex, entry.subtask) for entry in entries]
    for name, subtasks in (("states", states), ("finished", found.finished)):
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


def check_state(state: SubtaskState | _SubtaskState, where: str) -> None:
    """Raises :class:`DocumentError` for values in it that no document can hold."""
    for operator in state.operators.values():
        for keyed in operator.keyed:
            for section in keyed.sections:
                check_values(section.descriptor, f"{where}: a descriptor")
        for listed in operator.lists:
            check_values(listed.items, f"{where}: a list state")
    if any(stream.peer < NO_PEER for stream in (*state.inputs, *state.outputs)):
        raise DocumentError(f"{where}: a peer is negative")
