"""Time to live in the database: what has ended is never returned, and is removed even if it is never read."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.state.states import TimeToLive
from tests.unit.runtime.state.conftest import Snapshots

KEYS = range(250)
KEY = pa.schema([("k", pa.int64())])
NAME = pa.schema([("u", pa.string())])
ONE = pa.schema([("n", pa.int64())])


class Clock:
    now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def rocksdb(tmp_path: Any) -> Any:
    made = Snapshots("rocksdb", tmp_path, **{"state.backend.rocksdb.cache.max-keys": "8"})
    yield made
    made.close()


def stored(state: Any) -> dict[int, Any]:
    return {key: entry for (key,), entry in state.stored_entries()}


def sweep(backend: Any) -> None:
    """Housekeeping for one pass, and until the database has what came of it."""
    for _ in range(2 * 128 + 4 * len(KEYS)):
        backend.maintain()


def test_entries_that_have_ended_leave_the_database(rocksdb: Snapshots) -> None:
    clock = Clock()
    backend = rocksdb.backend()
    values = backend.value_state("v", KEY, ONE, TimeToLive(100, clock))
    lists = backend.list_state("l", KEY, ONE, TimeToLive(100, clock))
    maps = backend.map_state("m", KEY, NAME, ONE, TimeToLive(100, clock))
    for key in KEYS:
        values.put((key,), (key,))
        lists.append((key,), [(1,)])
        maps.put((key,), ("old",), (1,))
    clock.now = 1050
    for key in KEYS[::2]:
        values.put((key,), (-key,))
        lists.append((key,), [(2,)])
        maps.put((key,), ("new",), (2,))
    rocksdb.of(backend)
    clock.now = 1100
    assert (values.get((1,)), lists.get((1,)), maps.get((1,))) == (None, [], {})
    assert (values.get((2,)), lists.get((2,)), maps.get((2,))) == ((-2,), [(2,)], {("new",): (2,)})
    sweep(backend)
    rocksdb.of(backend)
    assert stored(values) == {key: (-key, 1150) for key in KEYS[::2]}
    assert stored(lists) == {key: [(2, 1150)] for key in KEYS[::2]}
    assert stored(maps) == {key: {("new",): (2, 1150)} for key in KEYS[::2]}
    clock.now = 1201
    sweep(backend)
    rocksdb.of(backend)
    assert stored(values) == stored(lists) == stored(maps) == {}


def test_unread_entries_without_an_expiry_get_one(rocksdb: Snapshots) -> None:
    clock = Clock()
    before = rocksdb.backend()
    values = before.value_state("v", KEY, ONE)
    for key in KEYS:
        values.put((key,), (key,))
    backend = rocksdb.restored(rocksdb.of(before))
    values = backend.value_state("v", KEY, ONE, TimeToLive(100, clock))
    sweep(backend)
    handles = rocksdb.of(backend)
    clock.now = 1101
    again = rocksdb.restored(handles).value_state("v", KEY, ONE, TimeToLive(100, clock))
    assert {again.get((key,)) for key in KEYS} == {None}
