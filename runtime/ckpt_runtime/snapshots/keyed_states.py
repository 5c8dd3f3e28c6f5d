"""The keyed state in a snapshot, read without a job: which states there are, and their rows by key group.

Each file is verified as a whole before a row of it is given out, and rows are decoded a block at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ckpt_runtime.checkpoint.completed_checkpoint import VertexDescriptor
from ckpt_runtime.checkpoint.state_handles import (
    CanonicalKeyedStateHandle,
    IncrementalKeyedStateHandle,
    KeyedHandle,
    KeyedSection,
    KeyedStateHandle,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.snapshot import Snapshot
from ckpt_runtime.snapshots.stored_files import StoredFiles
from ckpt_runtime.state import stored_rows
from ckpt_runtime.state.canonical.reader import canonical_states
from ckpt_runtime.state.errors import UnsupportedBackendError, schema_mismatch
from ckpt_runtime.state.memory.pages import read_block


@dataclass(frozen=True, slots=True)
class StoredState:
    """One named keyed state of an operator. ``schema`` is that of its stored rows, ``bytes`` what these take."""

    uid: str
    vertex: VertexDescriptor
    name: str
    descriptor: dict[str, Any]
    schema: pa.Schema
    bytes: int

    @property
    def kind(self) -> str:
        """As in the descriptor."""
        return str(self.descriptor["kind"])

    @property
    def key_groups(self) -> KeyGroupRange:
        """All that there can be."""
        return KeyGroupRange(0, self.vertex.max_parallelism - 1)


def keyed_states(snapshot: Snapshot, uid: str | None = None) -> list[StoredState]:
    """All states, or those of one operator, in the order of vertices, operators and names.

    Raises CorruptStateError, StateSchemaError when parts of a state differ, and UnsupportedBackendError.
    """
    found = []
    for vertex in snapshot.metadata.vertices:
        for operator in vertex.operator_uids:
            if uid in (None, operator):
                found += _states_of(snapshot, vertex, operator)
    return found


def state_rows(
    snapshot: Snapshot, state: StoredState, key_groups: KeyGroupRange
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of a state in the given key groups: batches with their key group, in its order.

    Raises CorruptStateError, or StorageError as the storage does; nothing of a damaged file is given out.
    """
    canonical = [handle for handle in _canonical(snapshot, state.uid) if handle.name == state.name]
    blocks = [
        (group, position, handle.file, offset, length)
        for position, (handle, section) in enumerate(_sections(snapshot, state.uid))
        if section.name == state.name
        for group, offset, length in section.key_group_offsets
        if group in key_groups and group in state.key_groups
    ]
    with closing(StoredFiles(snapshot.directory.url)) as files:
        for stored in canonical_states(state.uid, canonical):
            owned = key_groups.intersection(state.key_groups)
            yield from stored.batches(files, owned, state.vertex.max_parallelism)
        for group, _, file, offset, length in sorted(blocks, key=lambda block: block[:2]):
            for batch in read_block(state.name, state.schema, files.read(file, offset, length)):
                yield group, batch


def _states_of(snapshot: Snapshot, vertex: VertexDescriptor, uid: str) -> list[StoredState]:
    descriptors: dict[str, dict[str, Any]] = {}
    sizes: dict[str, int] = {}
    for name, descriptor, stored in _parts(snapshot, uid):
        stored_rows.check_descriptor(name, descriptor)
        known = descriptors.setdefault(name, descriptor)
        if descriptor != known:
            schemas = [stored_rows.schema_from_json(each.get("schema")) for each in (known, descriptor)]
            raise schema_mismatch(uid, name, "parts of the snapshot differ", *schemas)
        sizes[name] = sizes.get(name, 0) + stored
    return [
        StoredState(uid, vertex, name, known, stored_rows.schema_from_json(known.get("schema")), sizes[name])
        for name, known in sorted(descriptors.items())
    ]


def _parts(snapshot: Snapshot, uid: str) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Name, descriptor and size of each part of each state."""
    for _, section in _sections(snapshot, uid):
        yield section.name, section.descriptor, sum(length for _, _, length in section.key_group_offsets)
    for part in _canonical(snapshot, uid):
        yield part.name, part.descriptor, part.file.length


def _sections(snapshot: Snapshot, uid: str) -> Iterator[tuple[KeyedStateHandle, KeyedSection]]:
    for handle in _handles(snapshot, uid):
        if isinstance(handle, IncrementalKeyedStateHandle):
            raise UnsupportedBackendError(
                f"operator {uid!r}: its state was written by the backend {handle.backend!r}, whose files only it reads"
            )
        if isinstance(handle, KeyedStateHandle):
            yield from ((handle, section) for section in handle.sections)


def _canonical(snapshot: Snapshot, uid: str) -> Iterator[CanonicalKeyedStateHandle]:
    return (handle for handle in _handles(snapshot, uid) if isinstance(handle, CanonicalKeyedStateHandle))


def _handles(snapshot: Snapshot, uid: str) -> Iterator[KeyedHandle]:
    for state in snapshot.states(uid):
        yield from state.keyed
