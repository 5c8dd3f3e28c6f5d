"""One row per key against a plain dict: reads, writes, removals, timers, and snapshots that go to any backend."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.hashing import hash_arrays, key_groups_of
from ckpt_runtime.state.memory import keyed_columns, row_buffer
from ckpt_runtime.state.memory.keyed_columns import ColumnTable
from ckpt_runtime.state.states import RowBufferSpec
from tests.support.effort import examples
from tests.support.inline_snapshots import CANONICAL, CHECKPOINT, handles_of, written
from tests.unit.runtime.state.conftest import MAX_PARALLELISM, Snapshots

KEYS = 30
NEVER = (1 << 63) - 1
FIXED = {"t": pa.int64(), "n": pa.int32(), "f": pa.float32(), "b": pa.bool_(), "at": pa.timestamp("us", "UTC")}
KINDS = {"fixed": FIXED, "text": {**FIXED, "s": pa.string()}, "text key": FIXED}
NATIVE = CheckpointProperties(CheckpointType.SAVEPOINT)
BACKENDS = {"hashmap": {}, "incremental": {"execution.checkpointing.incremental": "true"}, "rocksdb": {}}


def spec_of(kind: str) -> RowBufferSpec:
    key = pa.field("k", pa.string() if kind == "text key" else pa.int64())
    return RowBufferSpec("c", pa.schema([key, *map(pa.field, KINDS[kind], KINDS[kind].values())]), ("k",), "t", False)


def some_row(spec: RowBufferSpec, random: Random) -> tuple[Any, ...]:
    """A row whose time is there; all other values may be null."""
    values: dict[str, Callable[[], Any]] = {
        "t": lambda: random.choice([NEVER, random.randrange(50)]),
        "n": lambda: random.choice([None, -(1 << 31), 7]),
        "f": lambda: random.choice([None, -0.0, math.inf, 1.5]),
        "b": lambda: random.choice([None, True, False]),
        "at": lambda: random.choice([None, -1, 1 << 50]),
        "s": lambda: random.choice([None, "", "text " * random.randrange(9)]),
    }
    return tuple(values[name]() for name in spec.schema.names[1:])


def plain_rows(columns: list[pa.Array]) -> list[tuple[Any, ...]]:
    numbers = [each.cast(pa.int64()) if pa.types.is_timestamp(each.type) else each for each in columns]
    return list(zip(*(each.to_pylist() for each in numbers), strict=True))


class Job:
    """The same rows in the subtasks of a job, and in a dict."""

    def __init__(self, made: Snapshots, spec: RowBufferSpec, parallelism: int, handles: Any, rows: Any) -> None:
        self.spec, self.rows = spec, dict(rows)
        self.key_type = spec.schema.field("k").type
        self.subtasks = []
        for index in range(parallelism):
            groups = key_group_range(MAX_PARALLELISM, parallelism, index)
            backend = made.restored(handles, groups.first, groups.last)
            self.subtasks.append((groups, backend, backend.keyed_columns(spec)))
        self.all_keys = [str(key) if self.key_type == pa.string() else key for key in range(KEYS)]
        hashes = hash_arrays([pa.array(self.all_keys, self.key_type)], ["k"])
        self.group_of = dict(zip(self.all_keys, key_groups_of(hashes, MAX_PARALLELISM).tolist(), strict=True))

    @property
    def backends(self) -> list[Any]:
        return [backend for _, backend, _ in self.subtasks]

    def change(self, random: Random) -> None:
        for groups, _, state in self.subtasks:
            own = [key for key in self.all_keys if self.group_of[key] in groups]
            keys = random.sample(own, random.randrange(len(own) + 1)) if random.random() < 0.8 else own
            if not keys:
                continue
            slots, given = self.read(state, keys)
            if random.random() < 0.2:
                state.put(given, slots, None)
            else:
                self.write(state, keys, given, slots, random)
            state.compact_if_due()

    def read(self, state: Any, keys: list[Any]) -> Any:
        given = [pa.array(keys, self.key_type)]
        slots = state.slots_of(given)
        nothing = (None,) * (len(self.spec.schema) - 1)
        assert plain_rows(state.take(slots)) == [self.rows.get(key, nothing) for key in keys]
        return slots, given

    def write(self, state: Any, keys: list[Any], given: Any, slots: Any, random: Random) -> None:
        rows = [some_row(self.spec, random) for _ in keys]
        columns = [
            pa.array(column, pa.int64()).cast(field.type)
            if pa.types.is_timestamp(field.type)
            else pa.array(column, field.type)
            for column, field in zip(zip(*rows, strict=True), list(self.spec.schema)[1:], strict=True)
        ]
        living = None if random.random() < 0.4 else np.array([random.random() < 0.7 for _ in keys])
        state.put(given, slots, columns, living)
        for at, key in enumerate(keys):
            if living is None or living[at]:
                self.rows[key] = rows[at]
            else:
                self.rows.pop(key, None)

    def expire(self, bound: int) -> None:
        due = {key: row for key, row in self.rows.items() if row[0] <= bound}
        found = [row for _, _, state in self.subtasks for part in state.expired(bound) for row in plain_rows(part)]
        assert sorted(found, key=repr) == sorted(((key, *row) for key, row in due.items()), key=repr)
        self.rows = {key: row for key, row in self.rows.items() if key not in due}

    def check(self, random: Random) -> None:
        """Reads all keys, and leaves them as they are."""
        for groups, _, state in self.subtasks:
            if keys := [key for key in self.all_keys if self.group_of[key] in groups]:
                random.shuffle(keys)
                slots, given = self.read(state, keys)
                state.put(given, slots, None)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Snapshots]]:
    for module, name, value in ((keyed_columns, "_SPARE_SLOTS", 4), (keyed_columns, "_BLOCK", 4),
                                (keyed_columns, "_FIRST_CAPACITY", 2), (row_buffer, "_SPARE_ROWS", 4)):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    several = {name: Snapshots(name.replace("incremental", "hashmap"), tmp_path, **given)
               for name, given in BACKENDS.items()}  # fmt: skip
    yield several.__getitem__
    for each in several.values():
        each.close()


EVENTS = st.lists(
    st.sampled_from(["change", "change", "expire", "checkpoint", "checkpoint", "abort", "restart", "move"]),
    min_size=3,
    max_size=16,
)


@pytest.mark.parametrize(
    ("kind", "backends"),
    [
        ("fixed", ("hashmap", "incremental")),
        ("fixed", ("incremental", "rocksdb")),
        ("text", ("incremental", "rocksdb")),
        ("text key", ("incremental",)),
    ],
)
@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=EVENTS, seed=st.integers(0, 1 << 30))
def test_rows_by_key_are_those_of_a_dict_through_snapshots_restores_and_rescales(
    made: Callable[[str], Snapshots], kind: str, backends: tuple[str, ...], events: list[str], seed: int
) -> None:
    random, spec = Random(seed), spec_of(kind)
    name = backends[0]
    latest: tuple[Any, Any] = [], {}
    job = Job(made(name), spec, 2, *latest)
    for number, event in enumerate([*events, "checkpoint", "restart"], 1):
        job.change(random)
        if event == "expire":
            job.expire(random.randrange(60))
        elif event in ("checkpoint", "abort"):
            properties = CHECKPOINT if random.random() < 0.7 else NATIVE
            taken, rows = [each.snapshot(number, properties) for each in job.backends], dict(job.rows)
            job.change(random)  # the snapshot does not show it
            handles = [handle for snapshot in taken for handle in written(snapshot)]
            for backend in job.backends:
                if event == "abort":
                    backend.notify_aborted(number)
                elif not properties.is_savepoint:
                    backend.notify_complete(number)
            latest = (handles, rows) if event == "checkpoint" else latest
        elif event == "restart":
            job = Job(made(name), spec, random.randrange(1, 4), *latest)
        elif event == "move":
            rows, handles = dict(job.rows), handles_of(job.backends, CANONICAL, number)
            name, latest = random.choice(backends), (handles, rows)
            job = Job(made(name), spec, random.randrange(1, 4), *latest)
        job.check(random)


def test_columns_of_fixed_width_are_kept_by_slot_and_others_in_row_buffers(made: Callable[[str], Snapshots]) -> None:
    assert isinstance(made("hashmap").backend().keyed_columns(spec_of("fixed")), ColumnTable)
    assert not isinstance(made("hashmap").backend().keyed_columns(spec_of("text")), ColumnTable)


def test_keys_without_a_row_give_their_slots_back(made: Callable[[str], Snapshots]) -> None:
    table = ColumnTable(RowBufferSpec("c", pa.schema([("k", pa.int64()), ("n", pa.int64())]), ("k",)))
    for first in range(0, 500, 10):
        keys = [pa.array([*range(first, first + 9), 1000], pa.int64())]
        slots = table.slots_of(keys)
        assert slots.max() < 20
        table.put(keys, slots, keys, np.arange(10) == 9)
        table.compact_if_due()
    assert len(table) == 1
    kept = [pa.array([1000], pa.int64())]
    assert table.take(table.slots_of(kept))[0].equals(kept[0])


def test_a_row_that_is_removed_by_its_time_is_still_in_an_earlier_snapshot(made: Callable[[str], Snapshots]) -> None:
    backend = made("hashmap").backend()
    spec = RowBufferSpec("c", pa.schema([("k", pa.int64()), ("t", pa.int64())]), ("k",), "t")
    table = backend.keyed_columns(spec)
    keys = [pa.array([1, 2], pa.int64())]
    table.put(keys, table.slots_of(keys), [pa.array([10, 20])])
    snapshot = backend.snapshot(1, CHECKPOINT)
    assert [[column.to_pylist() for column in part] for part in table.expired(15)] == [[[1], [10]]]
    assert list(table.expired(15)) == []
    restored = made("hashmap").restored(written(snapshot)).keyed_columns(spec)
    assert restored.take(read_only(restored.slots_of(keys)))[0].to_pylist() == [10, 20]
