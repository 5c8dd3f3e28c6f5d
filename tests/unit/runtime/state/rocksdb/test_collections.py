"""Lists and maps that are larger than one entry: what they keep in memory, and what earlier versions wrote as one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.errors import CorruptStateError
from ckpt_runtime.state.rocksdb import keyed_collections
from ckpt_runtime.state.rocksdb.codec import SPLIT, KeyCodec, RowsCodec, SplitList, number_tail
from ckpt_runtime.state.rocksdb.database import Database
from ckpt_runtime.state.rocksdb.keyed_collections import ElementTable
from ckpt_runtime.state.states import TimeToLive
from ckpt_runtime.state.values import user_key_maker, user_key_reader
from tests.unit.runtime.state.conftest import Snapshots

KEY = pa.schema([("k", pa.int64())])
ONE = pa.schema([("n", pa.int64())])
NUMBERS = [(number,) for number in range(2_000)]


@pytest.fixture
def rocksdb(tmp_path: Path) -> Iterator[Snapshots]:
    made = Snapshots("rocksdb", tmp_path, **{"state.backend.rocksdb.cache.max-keys": "200"})
    yield made
    made.close()


def at_hand(state: Any) -> int:
    """Rows in memory."""
    known = (state._elements._young, state._elements._old, state._elements._changed)
    places = {place: rows for layer in known for place, rows in layer.items()}
    return sum(len(rows) for rows in places.values() if rows is not None)


def test_collection_of_one_key_may_be_larger_than_the_cache(rocksdb: Snapshots) -> None:
    backend = rocksdb.backend()
    values, entries = backend.list_state("l", KEY, ONE), backend.map_state("m", KEY, ONE, ONE)
    for number in NUMBERS:
        values.append((1,), [number])
        entries.put((1,), number, number)
        backend.maintain()
        assert at_hand(values) <= 2 * 200
        assert at_hand(entries) <= 2 * 200
    assert values.get((1,)) == NUMBERS
    assert entries.get((1,)) == dict(zip(NUMBERS, NUMBERS, strict=True))
    assert at_hand(values) + at_hand(entries) <= 4 * 200, "reading brings nothing into the cache"


def test_long_entries_of_earlier_versions_are_split_when_they_change(
    rocksdb: Snapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rocksdb.backend()
    with monkeypatch.context() as patch:
        patch.setattr(keyed_collections, "MOST_ROWS", 1 << 60)
        before.list_state("l", KEY, ONE).put((1,), NUMBERS)
        for number in NUMBERS:
            before.map_state("m", KEY, ONE, ONE).put((1,), number, number)
        handles = rocksdb.of(before)
    backend = rocksdb.restored(handles)
    values, entries = backend.list_state("l", KEY, ONE), backend.map_state("m", KEY, ONE, ONE)
    assert values.get((1,)) == NUMBERS
    values.append((1,), [(-1,)])
    entries.remove((1,), NUMBERS[0])
    entries.put((1,), NUMBERS[1], (-1,))
    again = rocksdb.restored(rocksdb.of(backend))
    values, entries = again.list_state("l", KEY, ONE), again.map_state("m", KEY, ONE, ONE)
    assert type(values._entries.get((1,))) is type(entries._entries.get((1,))) is SplitList
    assert values.get((1,)) == [*NUMBERS, (-1,)]
    assert entries.get((1,)) == {name: (-1,) if name == (1,) else name for name in NUMBERS[1:]}


def test_collection_removed_in_parts_leaves_no_entries(rocksdb: Snapshots) -> None:
    backend = rocksdb.backend()
    entries = backend.map_state("m", KEY, ONE, ONE)
    for number in NUMBERS[:200]:
        entries.put((1,), number, number)
    rocksdb.of(backend)
    for number in NUMBERS[:200]:
        entries.remove((1,), number)
    rocksdb.of(backend)
    assert [entry for group in range(128) for entry in entries._entries.table.scan(group)] == []


def test_long_lists_and_large_maps_that_have_ended_leave_the_database(rocksdb: Snapshots) -> None:
    now = 1000
    backend = rocksdb.backend()
    values = backend.list_state("l", KEY, ONE, TimeToLive(100, lambda: now))
    entries = backend.map_state("m", KEY, ONE, ONE, TimeToLive(100, lambda: now))
    for number in NUMBERS[:300]:
        now += number[0] == 150 and 50
        values.append((1,), [number])
        entries.put((1,), number, number)
    rocksdb.of(backend)
    for now, left in ((1100, NUMBERS[150:300]), (1200, [])):  # noqa: B007
        assert values.get((1,)) == left
        assert entries.get((1,)) == dict(zip(left, left, strict=True))
        assert (values.exists((1,)), entries.exists((1,))) == (bool(left), bool(left))
        for _ in range(300):
            backend.maintain()
        rocksdb.of(backend)
        found = dict(values.stored_entries())
        assert found == ({(1,): [(*number, 1150) for number in left]} if left else {})
        assert len(dict(entries.stored_entries()).get((1,), ())) == len(left)


def test_damaged_elements_are_errors() -> None:
    for encoded in (
        SPLIT,
        SPLIT + b"\x92\x01",
        SPLIT + b"\x92\x01\xff",
        SPLIT + b"\x91\x01",
        SplitList(1, 1 << 62).encode(),
    ):
        with pytest.raises(CorruptStateError):
            SplitList.decode(encoded)
    assert SplitList.decode(SplitList(3, 4).encode()) == (3, 4)
    keys = KeyCodec(KEY, KeyGroupRange(0, 127), 128)
    (key,) = keys.encode(7, [(5,)])
    assert keys.decode_element(key) == ((5,), b"")
    assert keys.decode_element(key + number_tail(9)) == ((5,), number_tail(9))
    for damaged in (key[:-1], key + b"\xcf", key + number_tail(9) + b"\1"):
        with pytest.raises(CorruptStateError):
            keys.decode_element(damaged)
    rows = RowsCodec({0: ONE}, 0, lambda: None)
    table = ElementTable(cast(Database, None), 7, keys, rows)
    assert table.from_bytes(rows.encode([(1,)])) == [(1,)]
    with pytest.raises(CorruptStateError, match="no rows"):
        table.from_bytes(rows.encode([]))


@pytest.mark.parametrize("more", [0, 200])
def test_the_two_zeros_are_two_keys_of_a_map_across_a_restore(rocksdb: Snapshots, more: int) -> None:
    """In one entry for the whole map, and in one for each of its keys."""
    names = pa.schema([("f", pa.float64())])
    make_key, read_key = user_key_maker(names), user_key_reader(names)
    zeros = [make_key((number,)) for number in (0.0, -0.0)]
    backend = rocksdb.backend()
    entries = backend.map_state("m", KEY, names, ONE)
    for number, name in enumerate([*zeros, *((float(n),) for n in range(1, more))]):
        entries.put((1,), name, (number,))
    backend = rocksdb.restored(rocksdb.of(backend))
    entries = backend.map_state("m", KEY, names, ONE)
    assert [entries.get_value((1,), name) for name in zeros] == [(0,), (1,)]
    signs = sorted(math.copysign(1, number) for (number,) in map(read_key, entries.get((1,))) if number == 0)
    assert signs == [-1, 1]
    entries.remove((1,), zeros[1])
    assert [entries.get_value((1,), name) for name in zeros] == [(0,), None]
