"""A completed checkpoint or savepoint: the content of its metadata and the locations of its files. Pure.

Handles are also part of acknowledgements. Paths are relative to the snapshot's directory, or absolute URLs for files
elsewhere. Handles of keyed state record their kind and version. ``msgspec`` writes and reads all of it as JSON;
:func:`check_state` checks what a schema cannot describe.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, TypeAlias

from msgspec import Meta, Struct, structs, to_builtins

from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.properties import CheckpointProperties, SavepointFormat
from ckpt_runtime.graph.job_graph import JobEdge, JobVertex, Partitioning
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import DocumentError, NonNegative, Parallelism, check_values, checked
from ckpt_runtime.version import VERSION

_Version1 = Annotated[int, Meta(ge=1, le=1)]
_FileName = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,254}\Z")]
"""Restricted, because a backend creates local files of these names from metadata of untrusted origin."""


class OperatorStateMode(StrEnum):
    """How a list state is spread when the parallelism changes (Flink's SPLIT_DISTRIBUTE, UNION, BROADCAST).

    An operator with UNION state loses the items of finished subtasks: a snapshot does not wait for them (FLIP-147).
    """

    SPLIT = "SPLIT"
    UNION = "UNION"
    BROADCAST = "BROADCAST"


class StateFile(Struct, frozen=True, omit_defaults=True):
    """One file of a snapshot, or its bytes if it is small enough to be stored in the metadata.

    ``path`` is empty when ``inline`` holds the content. ``checksum`` is ``"algorithm:hex"`` over the whole content.
    """

    path: str
    length: NonNegative
    checksum: str
    inline: bytes | None = None


@dataclass(frozen=True, slots=True)
class KeyedSection:
    """One named keyed state inside a file: a run of Arrow IPC record batches per key group, in key-group order.

    ``key_group_offsets`` holds ``(key_group, offset, length)`` of every non-empty key group; offsets count from the
    file's start. ``descriptor`` describes the state (kind, key and value schemas, aggregate columns) as JSON.
    """

    name: str
    descriptor: dict[str, Any]
    key_group_offsets: tuple[tuple[NonNegative, NonNegative, NonNegative], ...]


class KeyedStateHandle(Struct, frozen=True, tag_field="kind", tag="key_groups"):
    """The keyed state of one operator in one subtask: one file in key-group order (Flink's KeyGroupsStateHandle)."""

    key_groups: KeyGroupRange
    file: StateFile
    sections: tuple[KeyedSection, ...]
    version: _Version1 = 1

    def state_files(self) -> Iterable[StateFile]:
        return (self.file,)


class IncrementalKeyedStateHandle(Struct, frozen=True, tag_field="kind", tag="incremental"):
    """The keyed state of one operator in one subtask, as files in the backend's own format, by the backend's names.

    Some files may be shared with other checkpoints. ``description`` is the backend's own, as JSON.
    """

    key_groups: KeyGroupRange
    backend: str
    files: dict[_FileName, StateFile]
    description: dict[str, Any] = {}
    version: _Version1 = 1

    def state_files(self) -> Iterable[StateFile]:
        return self.files.values()


class RowGroup(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The number of rows in a part of a file, and the key groups they belong to."""

    rows: NonNegative
    key_groups: KeyGroupRange


class CanonicalKeyedStateHandle(Struct, frozen=True, tag_field="kind", tag="canonical"):
    """One named keyed state of one operator in one subtask, as a file that every backend can read (FLIP-203).

    ``descriptor`` describes the state as in :class:`KeyedSection`; the file contains it too. ``row_groups`` are the
    file's row groups in order.
    """

    key_groups: KeyGroupRange
    name: str
    descriptor: dict[str, Any]
    row_groups: tuple[RowGroup, ...]
    file: StateFile
    version: _Version1 = 1

    def state_files(self) -> Iterable[StateFile]:
        return (self.file,)


KeyedHandle: TypeAlias = KeyedStateHandle | IncrementalKeyedStateHandle | CanonicalKeyedStateHandle


@dataclass(frozen=True, slots=True)
class OperatorListState:
    """A named list state of one operator in one subtask; the items are JSON values."""

    name: str
    mode: OperatorStateMode
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class OperatorSubtaskState:
    """Everything that one operator keeps in one subtask."""

    keyed: tuple[KeyedHandle, ...] = ()
    lists: tuple[OperatorListState, ...] = ()


NO_PEER = -1
"""``peer`` of in-flight data whose channel no longer exists because the job was rescaled."""


@dataclass(frozen=True, slots=True)
class ChannelStateSegment:
    """Consecutive in-flight elements of one channel: a run of whole frames inside a channel state file (FLIP-76).

    ``key_groups`` selects the rows to read; the other rows belong to another subtask. None means all rows.
    """

    file: StateFile
    offset: NonNegative
    length: NonNegative
    key_groups: KeyGroupRange | None = None


@dataclass(frozen=True, slots=True)
class ChannelStateStream:
    """The in-flight elements of one channel, in the order in which they have to be processed.

    ``edge`` is the position of the job edge among the vertex's inputs (of an output stream: among its outputs),
    ``peer`` the index of the subtask at the channel's other end, or :data:`NO_PEER`. ``schema`` is the rows' Arrow IPC
    schema message in base64, empty when the stream has no rows.
    """

    edge: NonNegative
    peer: Annotated[int, Meta(ge=NO_PEER)]
    schema: str
    segments: tuple[ChannelStateSegment, ...]

    @property
    def bytes(self) -> int:
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True, slots=True)
class SubtaskState:
    """What one subtask acknowledges: its operators' state by uid. ``bytes`` is the size of this snapshot.

    ``inputs`` and ``outputs`` are in-flight data of an unaligned checkpoint: the data that the barrier overtook in the
    subtask's input channels and output queues. Streams with the same edge and peer are processed in this order.
    ``bytes`` includes them.
    """

    operators: dict[str, OperatorSubtaskState] = field(default_factory=dict)
    bytes: NonNegative = 0
    inputs: tuple[ChannelStateStream, ...] = ()
    outputs: tuple[ChannelStateStream, ...] = ()

    @property
    def has_channel_state(self) -> bool:
        return bool(self.inputs or self.outputs)

    @property
    def in_flight_bytes(self) -> int:
        return sum(stream.bytes for stream in (*self.inputs, *self.outputs))

    def files(self) -> list[StateFile]:
        """Files that this state refers to (inline content has none), in a stable order, each once."""
        handles = (handle for operator in self.operators.values() for handle in operator.keyed)
        files = [file for handle in handles for file in handle.state_files()]
        files += [segment.file for stream in (*self.inputs, *self.outputs) for segment in stream.segments]
        return list({file.path: file for file in files if file.inline is None}.values())

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_builtins(self)
        return document


def check_state(state: SubtaskState, where: str) -> None:
    """Raises :class:`DocumentError` for values in ``state`` that a document cannot contain."""
    for operator in state.operators.values():
        for handle in operator.keyed:
            match handle:
                case KeyedStateHandle():
                    for section in handle.sections:
                        check_values(section.descriptor, f"{where}: a descriptor")
                case CanonicalKeyedStateHandle():
                    check_values(handle.descriptor, f"{where}: a descriptor")
                case IncrementalKeyedStateHandle():
                    check_values(handle.description, f"{where}: a description")
        for listed in operator.lists:
            check_values(listed.items, f"{where}: a list state")


# Limits memory. Tasks only build upon recent checkpoints, so old paths do not recur.
GIVEN_UP_REMEMBERED = 100_000


class SharedStateConflictError(RuntimeError):
    """A state refers to a file it may not use: a different file at this path, a deleted one, or the user's."""


class FileGivenUpError(SharedStateConflictError):
    """The only conflict is that files were given up: a full checkpoint replaced the last one that used them."""


@dataclass(slots=True)
class _SharedFile:
    file: StateFile
    last_used_by: int
    deletable: bool


def is_shared(file: StateFile) -> bool:
    """Whether the file may be used by several checkpoints."""
    return "://" in file.path or file.path.startswith("/")


class SharedStateRegistry:
    """Tracks which shared files are used and which can be deleted (Flink's SharedStateRegistry). It deletes nothing.

    A file with an absolute path is shared between checkpoints; one with a relative path belongs to its checkpoint only.
    Files of a snapshot that the job does not own are never deleted.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _SharedFile] = {}
        self._given_up: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def register(self, checkpoint_id: int, state: SubtaskState, deletable: bool = True) -> None:
        """Registers that ``checkpoint_id`` uses the state's shared files; called at acknowledgement.

        Raises :class:`SharedStateConflictError` if a known path has another length or checksum, was given up, or
        belongs to a snapshot that the user owns. A task that does not know the latest completed checkpoint yet may
        reuse files of an older one, which are deleted if the latest is a full one: if this is the only conflict, the
        error is a :class:`FileGivenUpError`. The state's other files are registered anyway, so that they are deleted
        together with their checkpoint.
        """
        conflicts: list[SharedStateConflictError] = []
        for file in (file for file in state.files() if is_shared(file)):
            entry = self._entries.get(file.path)
            conflict = self._conflict(file, entry, deletable)
            if conflict is not None:
                conflicts.append(conflict)
                continue
            if entry is None:
                entry = self._entries[file.path] = _SharedFile(file, checkpoint_id, deletable)
            # Acknowledgements of concurrent checkpoints come in any order.
            entry.last_used_by = max(entry.last_used_by, checkpoint_id)
        if conflicts:
            given_up = all(isinstance(conflict, FileGivenUpError) for conflict in conflicts)
            kind = FileGivenUpError if given_up else SharedStateConflictError
            raise kind("; ".join(map(str, conflicts)))

    def _conflict(self, file: StateFile, entry: _SharedFile | None, deletable: bool) -> SharedStateConflictError | None:
        if entry is None and file.path in self._given_up:
            return FileGivenUpError(f"shared file {file.path} was already released: no retained checkpoint uses it")
        if entry is None:
            return None
        if entry.file != file:
            return SharedStateConflictError(f"shared file {file.path}: registered {entry.file}, now {file}")
        if deletable and not entry.deletable:
            return SharedStateConflictError(f"shared file {file.path} belongs to a snapshot that the user owns")
        return None

    def register_all(self, checkpoint_id: int, states: Iterable[SubtaskState], deletable: bool = True) -> None:
        """Registers the files of a whole (restored) checkpoint."""
        for state in states:
            self.register(checkpoint_id, state, deletable)

    def unregister_unused(self, lowest_retained: int) -> tuple[str, ...]:
        """Drops files not used from checkpoint ``lowest_retained`` on; returns the sorted paths to delete."""
        unused = [path for path, entry in self._entries.items() if entry.last_used_by < lowest_retained]
        # Remembered before they are deleted: an acknowledgement that names one may already be on its way.
        self._given_up.update(dict.fromkeys(unused))
        while len(self._given_up) > GIVEN_UP_REMEMBERED:
            self._given_up.popitem(last=False)
        return tuple(sorted(path for path in unused if self._entries.pop(path).deletable))

    def unregister_all(self, kept: Collection[str] = ()) -> tuple[str, ...]:
        """Clears the registry at the end of a job; returns the sorted paths to delete, without ``kept``."""
        paths = tuple(sorted(path for path, entry in self._entries.items() if entry.deletable and path not in kept))
        self._entries.clear()
        return paths

    def knows(self, path: str) -> bool:
        """Whether the file is in use, or was in use until it was given up."""
        return path in self._entries or path in self._given_up


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
    directory that its metadata names; it differs from ``directory`` after a move or a copy. ``lineage`` is the lineage
    of the job; None in snapshots of earlier releases.
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
        """Returns the snapshot, in ``directory``, in the form in which the job that now owns it refers to it.

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
        # Checked first, because a document of another version may have any shape.
        if isinstance(document, dict):
            version, writer = document.get("version"), document.get("written_by")
            if type(version) is not int or version != DOCUMENT_VERSION:
                raise OtherVersionError(
                    f"the document has version {str(version)[:40]}, written by release {str(writer)[:40]}; "
                    f"this release, {VERSION}, reads version {DOCUMENT_VERSION}"
                )
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
