"""A canonical savepoint carries every kind of state from each backend to each, also state that no operator requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.errors import UnsupportedBackendError
from ckpt_runtime.state.states import AggregateColumn, RowBufferSpec, TimeToLive
from tests.support.inline_snapshots import CANONICAL, CHECKPOINT, handles_of
from tests.unit.runtime.state.conftest import MAX_PARALLELISM, Snapshots, small_cache

KEYS = range(300)
KEY = pa.schema([("k", pa.int64())])
VALUE = pa.schema([("n", pa.int64()), ("t", pa.timestamp("us", "UTC")), ("s", pa.struct([("x", pa.int32())]))])
NAME = pa.schema([("u", pa.string())])
ONE = pa.schema([("n", pa.int64())])
COUNT = AggregateColumn("count", None, "c", None, pa.int64())
ROWS = RowBufferSpec(
    "r", pa.schema([("k", pa.int64()), ("t", pa.timestamp("ms")), ("v", pa.list_(pa.int64()))]), ("k",), "t"
)
AVG = AggregateColumn("avg", "k", "a", pa.int64(), pa.float64())
EVERY_NEUTRAL = [
    AggregateColumn("sum", "k", "s", pa.int64(), pa.int64()),
    AggregateColumn("min", "k", "lo", pa.int64(), pa.int64()),
    AggregateColumn("max", "k", "hi", pa.int64(), pa.int64()),
]
SUM_IN_PLACE_OF_AVG = AggregateColumn("sum", "k", "a", pa.int64(), pa.int64())
TTL = TimeToLive(10**12, lambda: 5)
BACKENDS = ["hashmap", "rocksdb"]


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[[str], Snapshots]]:
    all_made = []

    def make(name: str) -> Snapshots:
        all_made.append(Snapshots(name, tmp_path, **small_cache()))
        return all_made[-1]

    yield make
    for snapshots in all_made:
        snapshots.close()
    assert list(tmp_path.iterdir()) == []


def batch(keys: range) -> pa.RecordBatch:
    return pa.record_batch({"k": np.array(keys, dtype=np.int64)})


def fill(backend: Any) -> Any:
    """Gives the buffered rows, which can be asked for once."""
    from pyspark.sql import Row

    values, lists = backend.value_state("v", KEY, VALUE), backend.list_state("l", KEY, ONE, TTL)
    maps, timers = backend.map_state("m", KEY, NAME, ONE), backend.timers("$timers", KEY)
    for key in KEYS:
        values.put((key,), (key, None, Row(x=key)))
        lists.put((key,), [(9 - number,) for number in range(10)])
        maps.put((key,), ("b",), (key,))
        maps.put((key,), ("a",), (-key,))
        timers.register((key,), key * 10)
        timers.register((key,), 5)
        if key % 50 == 0:
            backend.maintain()
    backend.aggregate_table("a", KEY, [COUNT, AVG]).update(batch(KEYS))
    buffers = backend.row_buffers([ROWS])
    for number in range(3):
        came = rows(number)
        matched = np.full(came.num_rows, number % 2, dtype=np.uint8)
        buffers.sides[0].append(came, buffers.slots_of([came["k"]]), read_only(matched))
        backend.snapshot(number, CHECKPOINT).release()
    buffers.sides[0].expire(len(KEYS) // 3)
    return buffers


def rows(number: int) -> pa.RecordBatch:
    keys = np.array(KEYS, dtype=np.int64)
    return pa.record_batch({"k": keys, "t": pa.array(keys).cast(pa.timestamp("ms")), "v": [[number]] * len(keys)})


def content(backend: Any, buffers: Any = None) -> Any:
    """What each key has, and the aggregates after one row more for each key."""
    values, lists = backend.value_state("v", KEY, VALUE), backend.list_state("l", KEY, ONE, TTL)
    maps, timers = backend.map_state("m", KEY, NAME, ONE), backend.timers("$timers", KEY)
    buffered: dict[int, list[Any]] = {}
    for found, matched in (buffers or backend.row_buffers([ROWS])).sides[0].living():
        for row, flag in zip(found.to_pylist(), matched.tolist(), strict=True):
            buffered.setdefault(row["k"], []).append((row["v"], flag))
    own = [key for key in KEYS if values.get((key,)) is not None]
    return {
        key: (
            values.get((key,)),
            list(lists.get((key,))),
            dict(maps.get((key,))),
            timers.times_of((key,)),
            buffered.get(key, []),
            *(column.to_pylist() for column in backend.aggregate_table("a", KEY, [COUNT, AVG]).update(
                batch(range(key, key + 1))
            )),
        )
        for key in own
    }  # fmt: skip


@pytest.mark.row("203.5")
@pytest.mark.parametrize("target", BACKENDS)
@pytest.mark.parametrize("source", BACKENDS)
def test_every_kind_of_state_goes_to_every_backend(made: Callable[[str], Snapshots], source: str, target: str) -> None:
    before = made(source).backend()
    buffers = fill(before)
    handles = handles_of([before], CANONICAL)
    expected = content(before, buffers)
    assert sorted(expected) == list(KEYS)
    after = made(target)
    parts = [key_group_range(MAX_PARALLELISM, 3, index) for index in range(3)]
    unclaimed = [after.restored(handles, groups.first, groups.last) for groups in parts]
    again = handles_of(unclaimed, CANONICAL)
    assert [handle.name for handle in again].count("v") == 3
    found = [content(after.restored(again, groups.first, groups.last)) for groups in parts]
    assert {key: entry for part in found for key, entry in part.items()} == expected
    assert sum(map(len, found)) == len(expected)


@pytest.mark.parametrize(("source", "target"), [("hashmap", "rocksdb"), ("rocksdb", "hashmap")])
def test_the_files_of_a_backend_are_private(made: Callable[[str], Snapshots], source: str, target: str) -> None:
    before = made(source)
    backend = before.backend()
    fill(backend)
    with pytest.raises(UnsupportedBackendError, match=r"operator 'op'.*state\.backend\.type"):
        made(target).restored(before.of(backend))


def test_added_aggregates_are_neutral_in_unread_rows(made: Callable[[str], Snapshots]) -> None:
    rocksdb = made("rocksdb")
    before = rocksdb.backend()
    before.aggregate_table("a", KEY, [COUNT]).update(batch(KEYS))
    now = rocksdb.restored(rocksdb.of(before))
    table = now.aggregate_table("a", KEY, [COUNT, AVG])
    table.update(batch(range(10)))
    for target in BACKENDS:
        moved = made(target).restored(handles_of([now], CANONICAL)).aggregate_table("a", KEY, [COUNT, AVG])
        counts, averages = moved.update(batch(range(20)))
        assert counts.to_pylist() == [3] * 10 + [2] * 10
        assert averages.to_pylist() == [float(key) for key in range(20)]


@pytest.mark.row("203.5")
@pytest.mark.parametrize("target", BACKENDS)
def test_unused_aggregates_of_several_schemas_are_carried_over(made: Callable[[str], Snapshots], target: str) -> None:
    every = [COUNT, AVG, *EVERY_NEUTRAL]
    rocksdb = made("rocksdb")
    before = rocksdb.backend()
    before.aggregate_table("a", KEY, [COUNT]).update(batch(KEYS))
    added = rocksdb.restored(rocksdb.of(before))
    added.aggregate_table("a", KEY, every).update(batch(range(10)))
    unclaimed = rocksdb.restored(rocksdb.of(added))
    handles = handles_of([unclaimed], CANONICAL)
    moved = made(target).restored(handles)
    again = made(target).restored(handles_of([moved], CANONICAL))
    counts, averages, *others = again.aggregate_table("a", KEY, every).update(batch(KEYS))
    assert counts.to_pylist() == [3] * 10 + [2] * 290
    assert averages.to_pylist() == [float(key) for key in KEYS]
    assert [column.to_pylist() for column in others] == [
        [*(2 * key for key in range(10)), *range(10, 300)],
        list(KEYS),
        list(KEYS),
    ]


@pytest.mark.parametrize("target", BACKENDS)
def test_unused_rows_of_several_schemas_are_carried_over(made: Callable[[str], Snapshots], target: str) -> None:
    wider = pa.schema([*ONE, ("note", pa.string())])
    buffered = RowBufferSpec("r", pa.schema([*ROWS.schema, ("note", pa.string())]), ("k",), "t")
    rocksdb = made("rocksdb")
    before = rocksdb.backend()
    fill_rows(before, ONE, ROWS, range(10))
    added = rocksdb.restored(rocksdb.of(before))
    fill_rows(added, wider, buffered, range(5, 15), "new")
    unclaimed = rocksdb.restored(rocksdb.of(added))
    moved = made(target).restored(handles_of([unclaimed], CANONICAL))
    values, maps = moved.value_state("v", KEY, wider), moved.map_state("m", KEY, NAME, wider)
    side = moved.row_buffers([buffered]).sides[0]
    expected = {key: (key, "new" if key >= 5 else None) for key in range(15)}
    assert {key: values.get((key,)) for key in range(15)} == expected
    assert {key: dict(maps.get((key,)))[("a",)] for key in range(15)} == expected
    notes = [(row["k"], row["note"]) for found, _ in side.living() for row in found.to_pylist()]
    assert sorted(notes, key=str) == sorted(
        [*((key, None) for key in range(10)), *((key, "new") for key in range(5, 15))], key=str
    )


def fill_rows(backend: Any, schema: pa.Schema, spec: RowBufferSpec, keys: range, *more: str) -> None:
    values, maps = backend.value_state("v", KEY, schema), backend.map_state("m", KEY, NAME, schema)
    for key in keys:
        values.put((key,), (key, *more))
        maps.put((key,), ("a",), (key, *more))
    columns = rows(0).slice(keys.start, len(keys)).to_pydict() | ({"note": [*more] * len(keys)} if more else {})
    came = pa.record_batch(columns, schema=spec.schema)
    buffers = backend.row_buffers([spec])
    buffers.sides[0].append(came, buffers.slots_of([came["k"]]), read_only(np.zeros(len(keys), dtype=np.uint8)))


def test_an_aggregate_that_is_removed_and_added_again_starts_empty(made: Callable[[str], Snapshots]) -> None:
    rocksdb = made("rocksdb")
    before = rocksdb.backend()
    before.aggregate_table("a", KEY, [COUNT, AVG]).update(batch(KEYS))
    without = rocksdb.restored(rocksdb.of(before))
    without.aggregate_table("a", KEY, [COUNT])
    handles = rocksdb.of(without)
    assert rocksdb.restored(handles).aggregate_table("a", KEY, [COUNT, SUM_IN_PLACE_OF_AVG]).update(batch(range(2)))[
        1
    ].to_pylist() == [0, 1]
    back = rocksdb.restored(handles)
    counts, averages = back.aggregate_table("a", KEY, [COUNT, AVG]).update(batch(range(10)))
    assert counts.to_pylist() == [2] * 10
    assert averages.to_pylist() == [float(key) for key in range(10)]
    for target in BACKENDS:
        moved = made(target).restored(handles_of([back], CANONICAL)).aggregate_table("a", KEY, [COUNT, AVG])
        counts, averages = moved.update(batch(range(20)))
        assert counts.to_pylist() == [3] * 10 + [2] * 10
        assert averages.to_pylist() == [float(key) for key in range(20)]


def test_a_time_to_live_begins_when_the_state_is_used(made: Callable[[str], Snapshots]) -> None:
    rocksdb = made("rocksdb")
    before = rocksdb.backend()
    before.value_state("v", KEY, ONE).put((1,), (1,))
    added = rocksdb.restored(rocksdb.of(before))
    added.value_state("v", KEY, ONE, TimeToLive(10, lambda: 100))
    now = 200
    for target in BACKENDS:
        moved = made(target).restored(handles_of([added], CANONICAL))
        assert moved.value_state("v", KEY, ONE, TimeToLive(10, lambda: now)).get((1,)) == (1,)
