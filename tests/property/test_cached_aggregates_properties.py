"""Aggregates on RocksDB behind a cache of a few keys, against a dict: updates, snapshots written late or never."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import BackendParameters, KeyedSnapshot, KeyedStateBackend
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.state.states import AggregateColumn
from tests.support import reference_kernels as reference
from tests.support.effort import examples
from tests.support.inline_snapshots import CHECKPOINT, restore, written

KEYS = [None, *(f"key-{number}" for number in range(24))]
KEY = pa.schema([("k", pa.string())])
COLUMNS = [
    AggregateColumn("count", None, "rows", None, pa.int64()),
    AggregateColumn("sum", "v", "sum", pa.int64(), pa.int64()),
    AggregateColumn("max", "t", "max", pa.string(), pa.string()),
]
ROW = st.tuples(st.sampled_from(KEYS), st.one_of(st.none(), st.integers(-99, 99)), st.one_of(st.none(), st.text("abc")))
Model = dict[Any, list[tuple[Any, ...]]]


class CachedAggregates(RuleBasedStateMachine):
    """See the module."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.backends: list[KeyedStateBackend] = []
        self.backend = self.made([])
        self.model: Model = {}
        self.snapshots: list[tuple[KeyedSnapshot, Model]] = []
        self.ids = 0

    def made(self, handles: list[KeyedHandle]) -> KeyedStateBackend:
        configuration = {"state.backend.rocksdb.cache.max-keys": "4"}
        make_directory = lambda: tempfile.mkdtemp(dir=self.directory.name)  # noqa: E731
        parameters = BackendParameters("op", KeyGroupRange(0, 15), 16, make_directory, configuration)
        backend = create_backend("rocksdb", parameters)
        self.backends.append(backend)
        if handles:
            restore(backend, handles)
        return backend

    def updated(self, backend: KeyedStateBackend, model: Model, rows: list[tuple[Any, ...]]) -> None:
        keys, numbers, texts = (list(column) for column in zip(*rows, strict=True))
        batch = pa.record_batch(
            {"k": pa.array(keys, pa.string()), "v": pa.array(numbers, pa.int64()), "t": pa.array(texts, pa.string())}
        )
        found = zip(*[a.to_pylist() for a in backend.aggregate_table("a", KEY, COLUMNS).update(batch)], strict=True)
        for row, values in zip(rows, found, strict=True):
            model.setdefault(row[0], []).append(row[1:])
            seen = model[row[0]]
            sums = reference.running_aggregate("sum", [number for number, _ in seen])
            greatest = reference.running_aggregate("max", [text for _, text in seen])
            assert values == (len(seen), sums, greatest)

    @rule(rows=st.lists(ROW, min_size=1, max_size=12))
    def update(self, rows: list[tuple[Any, ...]]) -> None:
        self.updated(self.backend, self.model, rows)

    @rule()
    def freeze(self) -> None:
        self.ids += 1
        snapshot = self.backend.snapshot(self.ids, CHECKPOINT)
        self.snapshots.append((snapshot, {key: list(rows) for key, rows in self.model.items()}))

    @rule(pick=st.integers(0, 9), restores=st.booleans())
    def write(self, pick: int, restores: bool) -> None:
        """The job may resume from any snapshot, not only from the oldest one."""
        if self.snapshots:
            snapshot, model = self.snapshots.pop(pick % len(self.snapshots))
            restored = self.made(written(snapshot))
            if restores:
                self.backend, self.model = restored, model
            self.updated(restored, model, [(key, 1, "b") for key in KEYS])

    @rule(pick=st.integers(0, 9))
    def give_up(self, pick: int) -> None:
        if self.snapshots:
            self.snapshots.pop(pick % len(self.snapshots))[0].release()

    def teardown(self) -> None:
        for snapshot, _ in self.snapshots:
            snapshot.release()
        for backend in self.backends:
            backend.close()
        assert list(Path(self.directory.name).iterdir()) == []
        self.directory.cleanup()


TestCachedAggregates = CachedAggregates.TestCase
TestCachedAggregates.settings = settings(deadline=None, max_examples=examples(30), stateful_step_count=20)
