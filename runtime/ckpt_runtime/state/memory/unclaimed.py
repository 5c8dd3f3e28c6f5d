"""The restored content of states that are not in use yet: the key-group blocks of this backend's range.

Blocks are read once at restore (clipped to the range), decoded when a state is claimed, and until then
written to each snapshot, so that a state survives a run of the job that does not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from ckpt_runtime.checkpoint.state_handles import (
    CanonicalKeyedStateHandle,
    KeyedHandle,
    KeyedSection,
    KeyedStateHandle,
)
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state import stored_rows
from ckpt_runtime.state.canonical.reader import canonical_states
from ckpt_runtime.state.errors import CorruptStateError, UnsupportedBackendError, schema_mismatch
from ckpt_runtime.state.memory.pages import read_block
from ckpt_runtime.state.snapshots import SnapshotReader
from ckpt_runtime.state.stored_rows import StateWriter

Block: TypeAlias = bytes | memoryview | pa.Buffer


class UnclaimedState:
    """One unclaimed state. The blocks of a key group usually come from one subtask; several are accepted, too."""

    def __init__(self, uid: str, name: str, descriptor: dict[str, Any]) -> None:
        stored_rows.check_descriptor(name, descriptor)
        self.uid = uid
        self.name = name
        self.descriptor = descriptor
        self.schema = stored_rows.schema_from_json(descriptor.get("schema"))
        self._blocks: dict[int, list[Block]] = {}

    @property
    def kind(self) -> str:
        """The kind of state."""
        return str(self.descriptor["kind"])

    def add(self, section: KeyedSection, read: Callable[[int, int], Block], owned: KeyGroupRange) -> None:
        """Reads the blocks inside ``owned``."""
        if section.descriptor != self.descriptor:
            other = stored_rows.schema_from_json(section.descriptor.get("schema"))
            raise schema_mismatch(self.uid, self.name, "parts of the snapshot differ", self.schema, other)
        for key_group, offset, length in section.key_group_offsets:
            if key_group in owned:
                block = read(offset, length)
                if len(block) != length:
                    raise CorruptStateError(
                        f"state {self.name!r}: key group {key_group} has {len(block)} bytes at {offset}, not {length}"
                    )
                self._blocks.setdefault(key_group, []).append(block)

    def add_rows(self, key_group: int, batch: pa.RecordBatch) -> None:
        """Adds rows that were read from another form."""
        self._blocks.setdefault(key_group, []).append(batch.serialize())

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All rows."""
        return (batch for _, batch in self._by_group())

    def _by_group(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        for key_group in sorted(self._blocks):
            for block in self._blocks[key_group]:
                for batch in read_block(self.name, self.schema, block):
                    yield key_group, batch

    def freeze(self) -> UnclaimedState:
        """Returns the state itself, because blocks never change."""
        return self

    def write(self, writer: StateWriter, owned: KeyGroupRange, max_parallelism: int) -> None:
        """Copies the rows into a new snapshot; there are none outside ``owned``."""
        writer.write_batches(self.name, self.descriptor, self.schema, self._by_group())

    def release(self) -> None:
        """Does nothing: a snapshot holds nothing of its own."""


def unclaimed_states(
    uid: str, handles: Iterable[KeyedHandle], reader: SnapshotReader, owned: KeyGroupRange, max_parallelism: int
) -> dict[str, UnclaimedState]:
    """States by name from all parts of a snapshot that overlap ``owned``."""
    found: dict[str, UnclaimedState] = {}
    canonical = []
    for handle in handles:
        if isinstance(handle, CanonicalKeyedStateHandle):
            canonical.append(handle)
            continue
        if not isinstance(handle, KeyedStateHandle):
            raise UnsupportedBackendError(
                f"operator {uid!r}: its state was written by the backend {handle.backend!r}, which state.backend.type "
                "has to name"
            )
        for section in handle.sections:
            state = found.get(section.name)
            if state is None:
                state = found[section.name] = UnclaimedState(uid, section.name, section.descriptor)
            state.add(section, partial(reader.read, handle.file), owned)
    for stored in canonical_states(uid, canonical):
        state = found[stored.name] = UnclaimedState(uid, stored.name, stored.descriptor)
        for key_group, batch in stored.batches(reader, owned, max_parallelism):
            state.add_rows(key_group, batch)
    return found
