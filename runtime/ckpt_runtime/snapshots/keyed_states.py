"""Reads the keyed state in a snapshot without a job: lists the states, and returns their rows by key group.

Each file is verified as a whole before any of its rows is returned, and rows are decoded a part at a time, in the order
of key groups. State in the native form of a backend is first restored into such a backend on this machine, which
writes it in canonical form. No operator requests the states there, and a backend writes states that are not requested
unchanged into its next snapshot.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CanonicalKeyedStateHandle,
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedStateHandle,
    StateFile,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.processes.held_directory import HeldDirectory
from ckpt_runtime.snapshots.snapshot import Snapshot, StoredFiles, UnsharedFiles
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.state.canonical import CanonicalState, canonical_states
from ckpt_runtime.state.errors import CorruptStateError, schema_mismatch
from ckpt_runtime.state.memory.parts import read_block
from ckpt_runtime.state.registry import create_backend, described_states
from ckpt_runtime.state.stored_rows import check_descriptor, schema_from_json
from ckpt_runtime.storage.filesystem import resolve


def rewrite(
    snapshot: Snapshot,
    backend: str,
    operator: tuple[str, KeyGroupRange, int],
    handles: Sequence[KeyedHandle],
    properties: CheckpointProperties,
    files: UnsharedFiles,
) -> Sequence[KeyedHandle]:
    """Restores these handles of one operator into a backend and writes the state again; returns the new handles.

    ``operator`` consists of its uid, the key groups to restore and the max parallelism. Raises StateError and
    StorageError for unreadable state.
    """
    with HeldDirectory("ckpt-rewrite-") as scratch:
        restored = create_backend(backend, BackendParameters(*operator, partial(tempfile.mkdtemp, dir=scratch)))
        with closing(restored), closing(StoredFiles(snapshot.directory.url)) as reader:
            restored.restore(handles, reader, owned=False)
            frozen = restored.snapshot(snapshot.metadata.id, properties)
            try:
                return frozen.write(files)
            finally:
                frozen.release()


_Rows = Iterator[tuple[int, pa.RecordBatch]]
_CANONICAL = CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.CANONICAL)


class _Source(Protocol):
    """The source of a state's rows; one class per stored form."""

    def rows(self, key_groups: KeyGroupRange) -> _Rows: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredState:
    """One named keyed state of an operator. ``schema`` is that of its stored rows.

    ``bytes`` is the stored size of the rows; None if several states share their files. In a process that may end
    without running clean-up code, call :meth:`close` after use.
    """

    uid: str
    vertex: VertexDescriptor
    name: str
    descriptor: dict[str, Any]
    schema: pa.Schema
    bytes: int | None
    source: _Source

    @property
    def kind(self) -> str:
        """The kind of state, as in its descriptor."""
        return str(self.descriptor["kind"])

    @property
    def key_groups(self) -> KeyGroupRange:
        """The key groups of the whole operator."""
        return KeyGroupRange(0, self.vertex.max_parallelism - 1)

    def rows(self, key_groups: KeyGroupRange) -> _Rows:
        """Yields the rows in the given key groups as (key group, batch), in ascending order of key groups.

        Raises CorruptStateError or StorageError; no row of a damaged file is returned.
        """
        return self.source.rows(key_groups.intersection(self.key_groups))

    def close(self) -> None:
        """Deletes the temporary local files that reading it has created.

        Must not be called while rows of this state, or of another state of the same operator, are being read.
        """
        self.source.close()


def keyed_states(snapshot: Snapshot, uid: str | None = None) -> list[StoredState]:
    """The states of all operators, or of one, in the order of vertices, operators and names.

    Reads no file. Raises CorruptStateError, StateSchemaError when parts of a state differ, and
    UnsupportedBackendError.
    """
    found = []
    for vertex in snapshot.metadata.vertices:
        for operator in vertex.operator_uids:
            if uid in (None, operator):
                states = _states_of(snapshot, vertex, operator)
                names = [state.name for state in states]
                if len(set(names)) < len(names):
                    raise CorruptStateError(f"operator {operator!r} has a state in two forms: {sorted(names)}")
                found += sorted(states, key=lambda state: state.name)
    return found


def _states_of(snapshot: Snapshot, vertex: VertexDescriptor, uid: str) -> list[StoredState]:
    """Reads the handles by form. An operator has one form, unless a backend passes on handles that it was given."""
    handles = [handle for state in snapshot.states(uid) for handle in state.keyed]
    url = snapshot.directory.url
    canonical = [handle for handle in handles if isinstance(handle, CanonicalKeyedStateHandle)]
    native = [handle for handle in handles if isinstance(handle, IncrementalKeyedStateHandle)]
    states = _paged_states(url, vertex, uid, [handle for handle in handles if isinstance(handle, KeyedStateHandle)])
    states += _canonical_states(url, vertex, uid, canonical)
    for backend in sorted({handle.backend for handle in native}):
        own = [handle for handle in native if handle.backend == backend]
        states += _exported_states(snapshot, vertex, uid, own)
    return states


# --- pages of the backend in memory


@dataclass(frozen=True, slots=True)
class _Pages:
    """A state in the pages of the memory backend. ``blocks`` holds (key group, file, offset, length)."""

    directory: str
    name: str
    schema: pa.Schema
    blocks: list[tuple[int, StateFile, int, int]]

    def rows(self, key_groups: KeyGroupRange) -> _Rows:
        with closing(StoredFiles(self.directory)) as files:
            for group, file, offset, length in sorted(self.blocks, key=lambda block: block[0]):
                if group in key_groups:
                    for batch in read_block(self.name, self.schema, files.read(file, offset, length)):
                        yield group, batch

    def close(self) -> None:
        """Does nothing: pages are read directly from the snapshot."""


def _paged_states(
    directory: str, vertex: VertexDescriptor, uid: str, handles: Sequence[KeyedStateHandle]
) -> list[StoredState]:
    descriptors: dict[str, dict[str, Any]] = {}
    blocks: dict[str, list[tuple[int, StateFile, int, int]]] = {}
    for handle in handles:
        for section in handle.sections:
            check_descriptor(section.name, section.descriptor)
            known = descriptors.setdefault(section.name, section.descriptor)
            if section.descriptor != known:
                schemas = [schema_from_json(each.get("schema")) for each in (known, section.descriptor)]
                raise schema_mismatch(uid, section.name, "parts of the snapshot differ", *schemas)
            found = [(group, handle.file, offset, length) for group, offset, length in section.key_group_offsets]
            blocks.setdefault(section.name, []).extend(found)
    states = []
    for name, descriptor in descriptors.items():
        schema = schema_from_json(descriptor.get("schema"))
        size = sum(length for _, _, _, length in blocks[name])
        pages = _Pages(directory, name, schema, blocks[name])
        states.append(StoredState(uid, vertex, name, descriptor, schema, size, pages))
    return states


# --- canonical form


@dataclass(frozen=True, slots=True)
class _Canonical:
    directory: str
    state: CanonicalState
    max_parallelism: int

    def rows(self, key_groups: KeyGroupRange) -> _Rows:
        with closing(StoredFiles(self.directory)) as files:
            yield from self.state.batches(files, key_groups, self.max_parallelism)

    def close(self) -> None:
        """Does nothing: canonical files are read directly from the snapshot."""


def _canonical_states(
    directory: str, vertex: VertexDescriptor, uid: str, handles: Sequence[CanonicalKeyedStateHandle]
) -> list[StoredState]:
    states = []
    for state in canonical_states(uid, handles):
        source = _Canonical(directory, state, vertex.max_parallelism)
        size = sum(part.file.length for part in state.parts)
        states.append(StoredState(uid, vertex, state.name, state.descriptor, state.schema, size, source))
    return states


# --- other backends


@dataclass(slots=True)
class _Export:
    """Makes the state of one operator readable that is stored in the native form of a backend.

    For the requested key groups, it writes all states in canonical form into a temporary directory. It keeps the result
    until other key groups are requested, because the states of an operator are read one after the other.
    """

    snapshot: Snapshot
    vertex: VertexDescriptor
    uid: str
    handles: Sequence[IncrementalKeyedStateHandle]
    _latest: KeyGroupRange | None = None
    _states: dict[str, StoredState] = field(default_factory=dict)
    _local: HeldDirectory | None = None

    def rows(self, name: str, key_groups: KeyGroupRange) -> _Rows:
        if key_groups != self._latest:
            self._latest = None
            self._local = HeldDirectory("ckpt-exported-")
            directory = resolve(self._local.path)
            met = [handle for handle in self.handles if len(handle.key_groups.intersection(key_groups))]
            operator = (self.uid, key_groups, self.vertex.max_parallelism)
            written = rewrite(
                self.snapshot, self.handles[0].backend, operator, met, _CANONICAL, UnsharedFiles(directory)
            )
            handles = [handle for handle in written if isinstance(handle, CanonicalKeyedStateHandle)]
            self._states = {
                state.name: state for state in _canonical_states(directory.url, self.vertex, self.uid, handles)
            }
            self._latest = key_groups
        state, _in_use = self._states.get(name), self._local
        if state is not None:
            yield from state.rows(key_groups)

    def close(self) -> None:
        local, self._local, self._latest = self._local, None, None
        self._states = {}
        if local is not None:
            local.remove()


@dataclass(frozen=True, slots=True)
class _Exported:
    export: _Export
    name: str

    def rows(self, key_groups: KeyGroupRange) -> _Rows:
        return self.export.rows(self.name, key_groups)

    def close(self) -> None:
        self.export.close()


def _exported_states(
    snapshot: Snapshot, vertex: VertexDescriptor, uid: str, handles: Sequence[IncrementalKeyedStateHandle]
) -> list[StoredState]:
    """The states that the handles describe; reads no file."""
    export = _Export(snapshot, vertex, uid, handles)
    found: dict[str, StoredState] = {}
    for handle in handles:
        for name, descriptor in described_states(handle.backend, uid, handle.description).items():
            schema = schema_from_json(descriptor.get("schema"))
            state = found.setdefault(
                name, StoredState(uid, vertex, name, descriptor, schema, None, _Exported(export, name))
            )
            if state.descriptor != descriptor:
                raise schema_mismatch(uid, name, "parts of the snapshot differ", state.schema, schema)
    return list(found.values())
