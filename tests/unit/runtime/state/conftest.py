"""Helpers for backend tests: snapshots to memory and back."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.state_handles import KeyedHandle
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.snapshots import KeyedSnapshot
from tests.support.inline_snapshots import handles_of, restore, written

MAX_PARALLELISM = 128


class Snapshots:
    """Takes snapshots into handles, goes through their JSON form, and restores from them."""

    def backend(self, first: int = 0, last: int = MAX_PARALLELISM - 1) -> MemoryKeyedStateBackend:
        return MemoryKeyedStateBackend(KeyGroupRange(first, last), MAX_PARALLELISM, "op")

    def written(self, snapshot: KeyedSnapshot) -> list[KeyedHandle]:
        return written(snapshot)

    def of(self, backend: MemoryKeyedStateBackend) -> list[KeyedHandle]:
        return handles_of([backend])

    def restored(self, handles: Sequence[KeyedHandle], first: int = 0, last: int = 127) -> MemoryKeyedStateBackend:
        backend = self.backend(first, last)
        restore(backend, handles)
        return backend


@pytest.fixture
def snapshots() -> Snapshots:
    return Snapshots()


@pytest.fixture
def int_key() -> pa.Schema:
    return pa.schema([pa.field("k", pa.int64())])
