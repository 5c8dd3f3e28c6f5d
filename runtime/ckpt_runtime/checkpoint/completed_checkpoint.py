"""A completed checkpoint or savepoint: the content of its metadata. Immutable, with a JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import Struct, structs, to_builtins

from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointProperties, SavepointFormat
from ckpt_runtime.checkpoint.state_handles import (
    CanonicalKeyedStateHandle,
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedStateHandle,
    SubtaskState,
    check_state,
    is_shared,
)
from ckpt_runtime.graph.job_graph import JobEdge, JobVertex, Partitioning
from ckpt_runtime.graph.schema import DocumentError, NonNegative, Parallelism, checked
from ckpt_runtime.version import VERSION

DOCUMENT_VERSION = 2
"""Version of the JSON form, the only one that this release reads."""
HASHMAP = "hashmap"
ANY = "any"


class OtherVersionError(DocumentError):
    """The document has a version that this release does not read."""


@dataclass(frozen=True, slots=True)
class VertexDescriptor:
    """What a snapshot records about one vertex; ``operator_uids`` starts with the head of the chain."""

    id: str
    name: str
    operator_uids: tuple[str, ...]
    parallelism: Parallelism
    max_parallelism: Parallelism

    @classmethod
    def of(cls, vertex: JobVertex) -> VertexDescriptor:
        uids = tuple(operator.uid for operator in vertex.operators)
        return cls(vertex.id, vertex.name, uids, vertex.parallelism, vertex.max_parallelism)


@dataclass(frozen=True, slots=True)
class EdgeDescriptor:
    """What a snapshot records about one edge: in-flight data can only be restored to the same edge."""

    source: str
    target: str
    partitioning: Partitioning
    keys: tuple[str, ...] = ()

    @classmethod
    def of(cls, edge: JobEdge) -> EdgeDescriptor:
        return cls(edge.source, edge.target, edge.partitioning, edge.keys)


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """``timestamp`` is the trigger time that the barriers carried, ``completion_timestamp`` the time of finalisation.

    ``directory`` is the external path; paths in ``states`` are relative to it unless absolute. A subtask is in
    ``states`` or in ``finished`` (its operators had finished, FLIP-147). It is in both if it had finished and the
    barrier overtook data in its channels; its state is then only that in-flight data, without operators. ``edges`` are
    the job's edges in its order; snapshots older than in-flight data have none. ``written_by`` is the release that
    wrote the snapshot; None in snapshots older than this field. ``written_to`` is, for a snapshot that was read, the
    directory that its metadata names; it differs from ``directory`` after a move or a copy. ``lineage`` is the job's,
    and None in snapshots of earlier releases.
    """

    id: int
    job_id: str
    timestamp: int
    completion_timestamp: int
    directory: str
    properties: CheckpointProperties
    vertices: tuple[VertexDescriptor, ...]
    states: Mapping[SubtaskKey, SubtaskState] = field(default_factory=dict)
    finished: frozenset[SubtaskKey] = frozenset()
    edges: tuple[EdgeDescriptor, ...] = ()
    written_by: str | None = VERSION
    written_to: str | None = field(default=None, compare=False)
    lineage: str | None = None

    @property
    def lineage_id(self) -> str:
        """The id of the first job in the chain of jobs, each started from a snapshot of an earlier one."""
        return self.lineage or self.job_id

    @property
    def format(self) -> SavepointFormat:
        """The snapshot's format; checkpoints are always in the backend's native format (FLIP-203)."""
        return self.properties.savepoint_format or SavepointFormat.NATIVE

    @property
    def state_backend(self) -> str:
        """The only backend that can read the keyed state; :data:`ANY` if it is in canonical form or there is none."""
        handles = (
            handle
            for state in self.states.values()
            for operator in state.operators.values()
            for handle in operator.keyed
        )
        return next((backend for backend in map(_backend_of, handles) if backend != ANY), ANY)

    @property
    def is_savepoint(self) -> bool:
        return self.properties.is_savepoint

    @property
    def fully_finished_vertices(self) -> frozenset[str]:
        """The ids of the vertices whose subtasks had all finished."""
        return frozenset(
            vertex.id
            for vertex in self.vertices
            if all((vertex.id, subtask) in self.finished for subtask in range(vertex.parallelism))
        )

    def claimed(self) -> CompletedCheckpoint:
        """The snapshot as the job that now owns it refers to it, in ``directory``.

        Files that later increments may refer to get an absolute path, like all shared files, because they outlive the
        savepoint they belonged to (FLINK-39964). In a checkpoint, such files are shared already.
        """
        if not self.is_savepoint:
            return self
        return replace(self, states={key: _claimed_state(state, self.directory) for key, state in self.states.items()})

    def to_json(self) -> dict[str, Any]:
        """The JSON form. It is deterministic: subtasks are ordered by vertex id and index."""
        return {
            "version": DOCUMENT_VERSION,
            "written_by": self.written_by,
            "state_backend": self.state_backend,
            "format": self.format.value,
            "id": self.id,
            "job_id": self.job_id,
            "lineage": self.lineage,
            "timestamp": self.timestamp,
            "completion_timestamp": self.completion_timestamp,
            "directory": self.directory,
            "properties": to_builtins(self.properties),
            "vertices": [to_builtins(vertex) for vertex in self.vertices],
            "edges": [to_builtins(edge) for edge in self.edges],
            "states": [
                {"vertex": vertex, "subtask": subtask, "state": self.states[vertex, subtask].to_json()}
                for vertex, subtask in sorted(self.states)
            ],
            "finished": [[vertex, subtask] for vertex, subtask in sorted(self.finished)],
        }

    @classmethod
    def from_json(cls, document: object, directory: str | None = None) -> CompletedCheckpoint:
        """Reads the JSON form; ``directory``, where the metadata was found, replaces the recorded one (moves).

        Raises :class:`DocumentError` for a document of another shape, :class:`OtherVersionError` for another version.
        """
        _check_version(document)
        found = checked(document, _Document)
        return cls(
            id=found.id,
            job_id=found.job_id,
            timestamp=found.timestamp,
            completion_timestamp=found.completion_timestamp,
            directory=found.directory if directory is None else directory,
            properties=found.properties,
            vertices=found.vertices,
            states=_checked_states(found),
            finished=frozenset(found.finished),
            edges=found.edges,
            written_by=found.written_by,
            written_to=found.directory,
            lineage=found.lineage,
        )


def _backend_of(handle: KeyedHandle) -> str:
    match handle:
        case IncrementalKeyedStateHandle():
            return handle.backend
        case KeyedStateHandle():
            return HASHMAP
        case CanonicalKeyedStateHandle():
            return ANY


def _claimed_state(state: SubtaskState, directory: str) -> SubtaskState:
    operators = {
        uid: replace(operator, keyed=tuple(_claimed_handle(handle, directory) for handle in operator.keyed))
        for uid, operator in state.operators.items()
    }
    return replace(state, operators=operators)


def _claimed_handle(handle: KeyedHandle, directory: str) -> KeyedHandle:
    if not isinstance(handle, IncrementalKeyedStateHandle):
        return handle
    files = {
        name: file
        if file.inline is not None or is_shared(file)
        else structs.replace(file, path=f"{directory}/{file.path}")
        for name, file in handle.files.items()
    }
    return structs.replace(handle, files=files)


class _Document(Struct):
    id: NonNegative
    job_id: str
    timestamp: int
    completion_timestamp: int
    directory: str
    properties: CheckpointProperties
    vertices: tuple[VertexDescriptor, ...]
    states: list[Any]
    finished: list[tuple[str, NonNegative]]
    edges: tuple[EdgeDescriptor, ...] = ()
    written_by: str | None = None
    lineage: str | None = None


class _Entry(Struct):
    vertex: str
    subtask: NonNegative
    state: SubtaskState

    @property
    def key(self) -> SubtaskKey:
        return (self.vertex, self.subtask)


def _checked_states(found: _Document) -> dict[SubtaskKey, SubtaskState]:
    """Raises :class:`DocumentError` unless states, finished subtasks and vertices fit together."""
    parallelism = {vertex.id: vertex.parallelism for vertex in found.vertices}
    if len(parallelism) != len(found.vertices):
        raise DocumentError("two vertices have the same id")
    # Checked one by one, so that a large document does not block the other threads of this process.
    entries = [checked(entry, _Entry) for entry in found.states]
    for name, subtasks in (("states", [entry.key for entry in entries]), ("finished", found.finished)):
        if len(set(subtasks)) != len(subtasks):
            raise DocumentError(f"`{name}` names a subtask twice")
        for vertex, subtask in subtasks:
            if subtask >= parallelism.get(vertex, 0):
                raise DocumentError(f"`{name}` names subtask {subtask} of {vertex[:100]!r}, which does not exist")
    uids = {vertex.id: frozenset(vertex.operator_uids) for vertex in found.vertices}
    for entry in entries:
        where = f"the state of subtask {entry.subtask} of {entry.vertex[:100]!r}"
        for uid in entry.state.operators.keys() - uids[entry.vertex]:
            raise DocumentError(f"{where} is also a state of operator {uid[:100]!r}, which the vertex does not have")
        check_state(entry.state, where)
    return {entry.key: entry.state for entry in entries}


def _check_version(document: object) -> None:
    """Runs first, because a document of another version may have any shape."""
    if isinstance(document, dict):
        version, writer = document.get("version"), document.get("written_by")
        if type(version) is not int or version != DOCUMENT_VERSION:
            raise OtherVersionError(
                f"the document has version {str(version)[:40]}, written by release {str(writer)[:40]}; "
                f"this release, {VERSION}, reads version {DOCUMENT_VERSION}"
            )
