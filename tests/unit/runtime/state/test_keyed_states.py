"""Value, list and map state and timers: snapshots in flight, rescaling, time to live, evolution, corruption."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row

from ckpt_runtime.checkpoint.completed_checkpoint import KeyedStateHandle, StateFile
from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.state.errors import CorruptStateError, StateSchemaError
from ckpt_runtime.state.memory.keyed_state import FrozenView
from ckpt_runtime.state.states import TimeToLive
from tests.support.inline_snapshots import CHECKPOINT, InlineReader
from tests.unit.runtime.state.conftest import Snapshots

VALUE = pa.schema([("n", pa.int64()), ("s", pa.string())])
USER_KEY = pa.schema([("u", pa.string())])
ONE = pa.schema([("n", pa.int64())])


def filled(snapshots: Snapshots, int_key: pa.Schema, keys: range) -> Any:
    backend = snapshots.backend()
    values = backend.value_state("v", int_key, VALUE)
    lists = backend.list_state("l", int_key, ONE)
    maps = backend.map_state("m", int_key, USER_KEY, ONE)
    timers = backend.timers("$timers", int_key)
    for i in keys:
        values.put((i,), (i, f"s{i}"))
        lists.put((i,), [(i,), (i + 1,)])
        maps.put((i,), ("a",), (i,))
        maps.put((i,), ("b",), (-i,))
        timers.register((i,), i * 10)
        timers.register((i,), 5)
    return backend


def stored_keys(state: Any) -> set[Any]:
    """Those that have an entry, live or not."""
    return {key for chunk in FrozenView(tuple(state._entries._layers)).chunks() for key, _ in chunk}


def content(backend: Any, int_key: pa.Schema, keys: range) -> dict[int, Any]:
    values = backend.value_state("v", int_key, VALUE)
    lists = backend.list_state("l", int_key, ONE)
    maps = backend.map_state("m", int_key, USER_KEY, ONE)
    timers = backend.timers("$timers", int_key)
    return {
        i: (values.get((i,)), list(lists.get((i,))), dict(maps.get((i,))), timers.times_of((i,)))
        for i in keys
        if values.get((i,)) is not None
    }


def test_rescaling_gives_each_part_its_keys_and_back(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    keys = range(1, 300)
    whole = filled(all_snapshots, int_key, keys)
    expected = content(whole, int_key, keys)
    sources = all_snapshots.of(whole)
    parts = []
    for index in range(3):
        owned = key_group_range(128, 3, index)
        parts.append(all_snapshots.restored(sources, owned.first, owned.last))
    contents = [content(part, int_key, keys) for part in parts]
    assert sum(len(part) for part in contents) == len(expected)
    merged = all_snapshots.restored([source for part in parts for source in all_snapshots.of(part)])
    assert content(merged, int_key, keys) == expected
    assert merged.timers("$timers", int_key).next_time() == 5


def test_snapshot_shows_the_moment_it_was_taken(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    keys = range(1, 50)
    backend = filled(all_snapshots, int_key, keys)
    before = content(backend, int_key, keys)
    first = backend.snapshot(1, CHECKPOINT)
    for i in range(1, 50, 2):
        backend.value_state("v", int_key, VALUE).put((i,), (0, None))
        backend.list_state("l", int_key, ONE).append((i,), [(99,)])
        backend.map_state("m", int_key, USER_KEY, ONE).put((i,), ("c",), (7,))
        backend.map_state("m", int_key, USER_KEY, ONE).remove((i,), ("a",))
        backend.timers("$timers", int_key).delete((i,), 5)
    between = content(backend, int_key, keys)
    second = backend.snapshot(2, CHECKPOINT)
    for i in keys:
        backend.value_state("v", int_key, VALUE).clear((i,))
        backend.list_state("l", int_key, ONE).clear((i,))
    assert content(all_snapshots.restored(all_snapshots.written(second)), int_key, keys) == between
    assert content(all_snapshots.restored(all_snapshots.written(first)), int_key, keys) == before
    for _ in range(10):
        backend.maintain()
    assert content(backend, int_key, keys) == {}


def test_unused_state_is_carried_over(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    keys = range(1, 50)
    backend = filled(all_snapshots, int_key, keys)
    expected = content(backend, int_key, keys)
    passed_on = all_snapshots.restored(all_snapshots.of(all_snapshots.restored(all_snapshots.of(backend))))
    assert passed_on.restored_key_schema() == int_key
    assert content(passed_on, int_key, keys) == expected
    dropped = all_snapshots.restored(all_snapshots.of(backend))
    dropped.drop_state("v")
    assert dropped.value_state("v", int_key, VALUE).get((1,)) is None


def test_fields_may_come_go_and_widen(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    backend = all_snapshots.backend()
    backend.value_state("v", int_key, pa.schema([("n", pa.int32()), ("gone", pa.string())])).put((1,), (5, "x"))
    wanted = pa.schema([("new", pa.string()), ("n", pa.int64())])
    assert all_snapshots.restored(all_snapshots.of(backend)).value_state("v", int_key, wanted).get((1,)) == (None, 5)


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        (pa.schema([("n", pa.string())]), "'value.n' cannot change from int64 to string"),
        (pa.schema([("n", pa.int32())]), "'value.n' cannot change from int64 to int32"),
        (pa.schema([("n", pa.int64()), pa.field("m", pa.int64(), nullable=False)]), "'value.m' must be nullable"),
    ],
)
def test_unsafe_evolution_names_state_and_schemas(
    all_snapshots: Snapshots, int_key: pa.Schema, wanted: pa.Schema, reason: str
) -> None:
    backend = all_snapshots.backend()
    backend.value_state("v", int_key, ONE).put((1,), (5,))
    with pytest.raises(StateSchemaError, match=f"state 'v' of operator 'op': .*{reason}.*key.k: int64, value.n: int64"):
        all_snapshots.restored(all_snapshots.of(backend)).value_state("v", int_key, wanted)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_field_that_was_removed_comes_back_empty(all_snapshots: Snapshots, int_key: pa.Schema, parts: int) -> None:
    """Whether the entry was touched in between or not, and whether its subtask's state was put beside another's."""
    backend = all_snapshots.backend()
    state = backend.value_state("v", int_key, VALUE)
    for key in range(20):
        state.put((key,), (key, "old"))
    handles = all_snapshots.of(backend)
    for schema in (ONE, VALUE):
        written: list[Any] = []
        for index in range(parts):
            owned = key_group_range(128, parts, index)
            part = all_snapshots.restored(handles, owned.first, owned.last)
            state = part.value_state("v", int_key, schema)
            if schema is ONE and state.get((2,)) is not None:
                state.put((2,), (7,))
            written += all_snapshots.of(part)
        handles = written
    again = all_snapshots.restored(handles).value_state("v", int_key, VALUE)
    assert [again.get((key,)) for key in range(20)] == [(7 if key == 2 else key, None) for key in range(20)]


def test_key_may_not_change(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    backend = all_snapshots.backend()
    backend.value_state("v", int_key, ONE).put((1,), (5,))
    for other in (pa.schema([("k", pa.int32())]), pa.schema([("j", pa.int64())])):
        with pytest.raises(StateSchemaError, match="key"):
            all_snapshots.restored(all_snapshots.of(backend)).value_state("v", other, ONE)


def test_all_types_survive_a_snapshot(all_snapshots: Snapshots) -> None:
    struct = pa.struct([("x", pa.int32()), ("tags", pa.list_(pa.string()))])
    schema = pa.schema(
        [
            ("b", pa.bool_()), ("f", pa.float32()), ("raw", pa.binary()), ("d", pa.date32()),
            ("t", pa.timestamp("us", "UTC")), ("dec", pa.decimal128(10, 2)), ("st", struct),
            ("m", pa.map_(pa.string(), struct)), ("du", pa.duration("us")),
        ]
    )  # fmt: skip
    key = pa.schema([("a", pa.string()), ("f", pa.float64())])
    row = Row(x=1, tags=["p", None])
    value = (
        True, 1.5, b"\0\1", dt.date(2024, 2, 29), dt.datetime(2024, 1, 1, 12), Decimal("3.14"), row,
        {"one": row, "none": None}, dt.timedelta(seconds=1, microseconds=5),
    )  # fmt: skip
    backend = all_snapshots.backend()
    backend.value_state("v", key, schema).put((None, 1.0), value)
    backend.value_state("v", key, schema).put(("z", None), (None,) * len(schema))
    table = all_snapshots.restored(all_snapshots.of(backend)).value_state("v", key, schema)
    assert table.get((None, 1.0)) == value
    assert table.get((None, 1.0))[6].tags == ["p", None]
    assert table.get(("z", None)) == (None,) * len(schema)


class Clock:
    now = 1000

    def __call__(self) -> int:
        return self.now


def test_entries_expire_on_their_own_clock_and_are_removed(snapshots: Snapshots, int_key: pa.Schema) -> None:
    clock = Clock()
    ttl = TimeToLive(100, clock)
    backend = snapshots.backend()
    values = backend.value_state("v", int_key, ONE, ttl)
    lists = backend.list_state("l", int_key, ONE, ttl)
    maps = backend.map_state("m", int_key, USER_KEY, ONE, ttl)
    values.put((1,), (1,))
    lists.append((1,), [(1,)])
    maps.put((1,), ("a",), (1,))
    clock.now = 1050
    values.put((2,), (2,))
    lists.append((1,), [(2,)])
    maps.put((1,), ("b",), (2,))
    sources = snapshots.of(backend)
    clock.now = 1100
    assert (values.get((1,)), values.get((2,))) == (None, (2,))
    assert lists.get((1,)) == [(2,)]
    assert maps.get((1,)) == {("b",): (2,)}
    assert maps.get_value((1,), ("a",)) is None
    backend.maintain()
    assert stored_keys(values) == {(2,)}
    restored = snapshots.restored(sources)
    assert restored.value_state("v", int_key, ONE, ttl).get((2,)) == (2,)
    clock.now = 1200
    for again in (backend, restored):
        again.list_state("l", int_key, ONE, ttl)
        again.maintain()
        assert not stored_keys(again.value_state("v", int_key, ONE, ttl))
        assert not stored_keys(again.list_state("l", int_key, ONE, ttl))


def test_ttl_may_be_added_and_removed(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    clock = Clock()
    backend = all_snapshots.backend()
    backend.value_state("v", int_key, ONE).put((1,), (1,))
    with_ttl = all_snapshots.restored(all_snapshots.of(backend))
    values = with_ttl.value_state("v", int_key, ONE, TimeToLive(10, clock))
    assert values.get((1,)) == (1,)
    without = all_snapshots.restored(all_snapshots.of(with_ttl)).value_state("v", int_key, ONE)
    clock.now += 10
    assert values.get((1,)) is None
    assert without.get((1,)) == (1,)


def test_timers_are_a_queue_with_deletion(all_snapshots: Snapshots, int_key: pa.Schema) -> None:
    timers = all_snapshots.backend().timers("$timers", int_key)
    for key, time in [(1, 30), (1, 10), (2, 20), (1, 10), (3, 5)]:
        timers.register((key,), time)
    timers.delete((3,), 5)
    timers.delete((3,), 6)
    assert timers.times_of((1,)) == (10, 30)
    assert timers.next_time() == 10
    assert timers.due(20) == [(10, (1,)), (20, (2,))]
    timers.delete((1,), 10)
    timers.register((1,), 10)
    assert timers.due(20) == [(10, (1,))]
    assert timers.next_time() == 30


def test_damaged_bytes_are_named(snapshots: Snapshots, int_key: pa.Schema) -> None:
    (handle,) = snapshots.of(filled(snapshots, int_key, range(1, 9)))
    sections = tuple(section for section in handle.sections if section.name == "v")
    handle = KeyedStateHandle(handle.key_groups, handle.file, sections)

    class Damaged(InlineReader):
        def __init__(self, change: Any) -> None:
            self.change = change

        def read(self, file: StateFile, offset: int, length: int) -> bytes:
            return self.change(super().read(file, offset, length))

    for change in (lambda b: b[:-8] + b"", lambda b: b"\xff" * len(b), lambda b: b"", lambda b: b[:40]):
        backend = snapshots.backend()
        with pytest.raises(CorruptStateError, match="'v'"):
            backend.restore([handle], Damaged(change), owned=True)
            backend.value_state("v", int_key, VALUE)


def test_unknown_format_version_is_refused(snapshots: Snapshots, int_key: pa.Schema) -> None:
    (handle,) = snapshots.of(filled(snapshots, int_key, range(1, 3)))
    handle.sections[0].descriptor["format"] = 99
    with pytest.raises(CorruptStateError, match="stored rows of version 99, this version reads 1"):
        snapshots.restored([handle])
