"""Helpers for backend tests: snapshots to memory and back."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pyarrow as pa
import pytest
from msgspec import convert, to_builtins

from ckpt_runtime.checkpoint.state_handles import KeyedSection
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import KeyedSnapshot, RestoreSource
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend

MAX_PARALLELISM = 128


class Snapshots:
    """Takes snapshots into bytes, goes through the JSON form of their handles, and restores from them."""

    def backend(self, first: int = 0, last: int = MAX_PARALLELISM - 1) -> MemoryKeyedStateBackend:
        return MemoryKeyedStateBackend(KeyGroupRange(first, last), MAX_PARALLELISM, "op")

    def written(self, snapshot: KeyedSnapshot) -> list[RestoreSource]:
        stream = io.BytesIO()
        stream.write(b"header!")
        sections = [convert(to_builtins(s), KeyedSection) for s in snapshot.write(stream, stream.tell())]
        snapshot.release()
        data = stream.getvalue()
        return [RestoreSource(section, lambda offset, length: data[offset : offset + length]) for section in sections]

    def of(self, backend: MemoryKeyedStateBackend) -> list[RestoreSource]:
        return self.written(backend.snapshot(1))

    def restored(self, sources: Sequence[RestoreSource], first: int = 0, last: int = 127) -> MemoryKeyedStateBackend:
        backend = self.backend(first, last)
        backend.restore(sources)
        return backend


@pytest.fixture
def snapshots() -> Snapshots:
    return Snapshots()


@pytest.fixture
def int_key() -> pa.Schema:
    return pa.schema([pa.field("k", pa.int64())])
