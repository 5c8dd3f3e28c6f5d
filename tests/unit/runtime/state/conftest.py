"""Helpers for backend tests: snapshots to memory and back, with each backend."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import BackendParameters, KeyedSnapshot, KeyedStateBackend
from ckpt_runtime.state.registry import create_backend
from tests.support.inline_snapshots import handles_of, restore, written

MAX_PARALLELISM = 128


class Snapshots:
    """Takes snapshots into handles, goes through their JSON form, and restores from them."""

    def __init__(self, name: str, directory: Path, **configuration: str) -> None:
        self.name = name
        self.configuration = configuration
        self._directory = directory
        self._backends: list[KeyedStateBackend] = []

    def backend(self, first: int = 0, last: int = MAX_PARALLELISM - 1) -> Any:
        parameters = BackendParameters(
            "op",
            KeyGroupRange(first, last),
            MAX_PARALLELISM,
            lambda: tempfile.mkdtemp(dir=self._directory),
            self.configuration,
        )
        self._backends.append(create_backend(self.name, parameters))
        return self._backends[-1]

    def written(self, snapshot: KeyedSnapshot) -> list[KeyedHandle]:
        return written(snapshot)

    def of(self, backend: KeyedStateBackend) -> list[Any]:
        return cast(list[Any], handles_of([backend]))

    def restored(self, handles: Sequence[KeyedHandle], first: int = 0, last: int = MAX_PARALLELISM - 1) -> Any:
        backend = self.backend(first, last)
        restore(backend, handles)
        return backend

    def close(self) -> None:
        for backend in self._backends:
            backend.close()


def small_cache() -> dict[str, str]:
    """A cache that nothing fits into."""
    return {"state.backend.rocksdb.cache.max-keys": "4", "state.backend.rocksdb.memory.fixed-per-slot": "8mb"}


@pytest.fixture
def snapshots(tmp_path: Path) -> Iterator[Snapshots]:
    made = Snapshots("hashmap", tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["hashmap", "rocksdb", "rocksdb with a small cache"])
def all_snapshots(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Snapshots]:
    """For what every backend has to do."""
    name, _, small = request.param.partition(" ")
    made = Snapshots(name, tmp_path, **(small_cache() if small else {}))
    yield made
    made.close()
    assert list(tmp_path.iterdir()) == [], "local files outlive their backend"


@pytest.fixture
def int_key() -> pa.Schema:
    return pa.schema([pa.field("k", pa.int64())])
