"""Keyed state and cached aggregates on RocksDB, against plain models: updates, freezing, snapshots, rescaling."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedHandle
from ckpt_runtime.graph.key_groups import KeyGroupRange, key_group_range
from ckpt_runtime.graph.output_schemas import aggregate_type
from ckpt_runtime.graph.specs import Aggregate
from ckpt_runtime.state.backend import BackendParameters, KeyedSnapshot, KeyedStateBackend
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.memory.keyed_state import FrozenView, LayeredDict
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.state.states import AggregateColumn
from tests.support import reference_kernels as reference
from tests.support.effort import examples
from tests.support.inline_snapshots import CHECKPOINT, handles_of, restore, written

FUNCTIONS = ("count", "sum", "min", "max", "avg")
VALUES = {
    pa.int64(): st.integers(-(2**40), 2**40),
    pa.int8(): st.integers(-128, 127),
    pa.float64(): st.one_of(st.integers(-1000, 1000).map(float), st.just(float("nan"))),
    pa.string(): st.text(max_size=6),
}
KEY = pa.schema([("k", pa.string())])


def aggregates(kind: pa.DataType) -> list[AggregateColumn]:
    schema = pa.schema([("v", kind)])
    wanted = [name for name in FUNCTIONS if kind != pa.string() or name not in ("sum", "avg")]
    return [
        AggregateColumn(name, "v", name, kind, aggregate_type(schema, Aggregate(name, "v", name))) for name in wanted
    ]


def same(left: Any, right: Any) -> bool:
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(right))


@st.composite
def batches(draw: st.DrawFn) -> tuple[pa.DataType, list[pa.RecordBatch]]:
    kind = draw(st.sampled_from(list(VALUES)))
    row = st.tuples(st.one_of(st.none(), st.sampled_from("abcdef")), st.one_of(st.none(), VALUES[kind]))
    parts = draw(st.lists(st.lists(row, min_size=1, max_size=12), min_size=1, max_size=5))
    return kind, [
        pa.record_batch({"k": pa.array([k for k, _ in part], pa.string()), "v": pa.array([v for _, v in part], kind)})
        for part in parts
    ]


@settings(deadline=None)
@given(batches(), st.integers(1, 4), st.integers(1, 4))
def test_aggregates_follow_the_model_over_snapshots_and_rescaling(drawn: Any, before: int, after: int) -> None:
    kind, parts = drawn
    wanted = aggregates(kind)
    seen: dict[Any, list[Any]] = {}
    backend = MemoryKeyedStateBackend(KeyGroupRange(0, 15), 16, "op")
    for part in parts:
        table = backend.aggregate_table("a", KEY, wanted)
        results = [array.to_pylist() for array in table.update(part)]
        for position, (key, value) in enumerate(zip(part["k"].to_pylist(), part["v"].to_pylist(), strict=True)):
            seen.setdefault(key, []).append(value)
            for column, result in zip(wanted, results, strict=True):
                expected = reference.running_aggregate(column.function, seen[key])
                assert same(result[position], expected), (column.function, seen[key])
        backend = rescaled(rescaled([backend], before), after, merge=True)[0]


def rescaled(
    backends: list[MemoryKeyedStateBackend], parallelism: int, merge: bool = False
) -> list[MemoryKeyedStateBackend]:
    """The state split over ``parallelism`` backends, or merged into one after that."""
    handles = handles_of(backends)
    found = []
    for index in range(parallelism):
        backend = MemoryKeyedStateBackend(key_group_range(16, parallelism, index), 16, "op")
        restore(backend, handles)
        found.append(backend)
    return rescaled(found, 1) if merge else found


class FrozenDict(RuleBasedStateMachine):
    """A LayeredDict beside a dict, with snapshots taken, read late and released in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.real: LayeredDict[int, list[int]] = LayeredDict()
        self.model: dict[int, list[int]] = {}
        self.views: list[tuple[Any, dict[int, list[int]]]] = []

    @rule(key=st.integers(0, 9), value=st.integers())
    def put(self, key: int, value: int) -> None:
        self.real.put(key, [value])
        self.model[key] = [value]

    @rule(key=st.integers(0, 9))
    def remove(self, key: int) -> None:
        self.real.remove(key)
        self.model.pop(key, None)

    @rule(key=st.integers(0, 9), value=st.integers())
    def change_in_place(self, key: int, value: int) -> None:
        found = self.real.writable(key, list)
        assert (found is None) == (key not in self.model)
        if found is not None:
            found.append(value)
            self.model[key].append(value)

    @rule()
    def freeze(self) -> None:
        self.views.append((self.real.freeze(), {key: list(value) for key, value in self.model.items()}))

    @rule(budget=st.integers(1, 5))
    def maintain(self, budget: int) -> None:
        self.real.maintain(budget)

    @rule(pick=st.integers(0, 100))
    def release(self, pick: int) -> None:
        if self.views:
            view, _ = self.views.pop(pick % len(self.views))
            view.release()

    @invariant()
    def views_show_their_moment(self) -> None:
        for view, expected in self.views:
            entries = [entry for chunk in view.chunks(3) for entry in chunk]
            assert len(entries) == len(expected)
            assert dict(entries) == expected

    @invariant()
    def reads_agree(self) -> None:
        assert {key: self.real.get(key) for key in range(10) if self.real.get(key) is not None} == self.model
        chunks = FrozenView(tuple(self.real._layers)).chunks()
        assert {key: value for chunk in chunks for key, value in chunk} == self.model


TestFrozenDict = FrozenDict.TestCase


TestFrozenDict.settings = settings(deadline=None)


KEYS = [None, *(f"key-{number}" for number in range(24))]
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
