"""The write-back cache of aggregates: what it may forget, when it writes, and what a snapshot takes out of it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.state.backend import BackendParameters, KeyedStateBackend
from ckpt_runtime.state.registry import create_backend
from ckpt_runtime.state.states import AggregateColumn
from tests.support.inline_snapshots import CHECKPOINT, restore, written

KEY = pa.schema([("k", pa.int64())])
COLUMNS = [AggregateColumn("sum", "v", "sum", pa.int64(), pa.int64())]


def test_a_state_without_keys_has_none_to_learn(tmp_path: Path) -> None:
    empty: Any = create_backend("rocksdb", parameters(tmp_path))
    add(empty, 0, 0)
    again: Any = create_backend("rocksdb", parameters(tmp_path))
    restore(again, written(empty.snapshot(1, CHECKPOINT)))
    assert add(again, 0, 90) == [1] * 90
    assert add(again, 90, 400) == [1] * 310
    assert again.aggregate_table("a", KEY, COLUMNS)._unknown is None
    for made in (empty, again):
        made.close()


@pytest.fixture
def backend(tmp_path: Path) -> Any:
    made = create_backend("rocksdb", parameters(tmp_path))
    yield made
    made.close()


def parameters(directory: Path) -> BackendParameters:
    groups = KeyGroupRange(0, 127)
    configuration = {"state.backend.rocksdb.cache.max-keys": "100"}
    return BackendParameters("op", groups, 128, lambda: tempfile.mkdtemp(dir=directory), configuration)


def add(backend: KeyedStateBackend, first: int, last: int) -> list[Any]:
    """Adds 1 to each of these keys."""
    keys = np.arange(first, last)
    batch = pa.record_batch({"k": keys, "v": np.ones(last - first, dtype=np.int64)})
    (sums,) = backend.aggregate_table("a", KEY, COLUMNS).update(batch)
    return list(sums.to_pylist())


FORMS = {
    "close together": lambda numbers: {"k": numbers},
    "far apart": lambda numbers: {"k": numbers << 40},
    "null": lambda numbers: {"k": pa.array(numbers.tolist(), mask=numbers == 7)},
    "text": lambda numbers: {"k": [f"key {number}" for number in numbers.tolist()]},
    "two columns": lambda numbers: {"k": numbers % 3, "t": [f"{number}" for number in numbers.tolist()]},
}
EVERY_KIND = [
    AggregateColumn("count", None, "count", None, pa.int64()),
    AggregateColumn("sum", "v", "sum", pa.int64(), pa.int64()),
    AggregateColumn("avg", "v", "mean", pa.int64(), pa.float64()),
    AggregateColumn("min", "s", "first", pa.string(), pa.string()),
]


@pytest.mark.parametrize("form", FORMS)
def test_keys_that_left_memory_come_from_files_that_hold_their_latest_rows_and_then_from_the_database(
    backend: Any, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    def added(first: int, last: int, value: int) -> list[list[Any]]:
        """The running values of these keys, to each of which a row is added."""
        numbers = np.arange(first, last)
        values = {"v": numbers + value, "s": [None if n % 5 == value else f"{9 - value} {n}" for n in numbers.tolist()]}
        batch = pa.record_batch(FORMS[form](numbers) | values)
        keys = batch.schema.names[:-2]
        found = backend.aggregate_table("a", pa.schema([batch.schema.field(key) for key in keys]), EVERY_KIND)
        return [column.to_pylist() for column in found.update(batch)]

    reads: list[int] = []
    read = backend._database.multi_get
    monkeypatch.setattr(backend._database, "multi_get", lambda keys: (reads.append(len(keys)), read(keys))[1])
    for times in range(1, 5):  # 12 files hold what is no longer in memory
        for first in range(0, 1200, 100):
            numbers = range(first, first + 100)
            values = range(times)
            assert added(first, first + 100, times - 1) == [
                [times] * 100,
                [sum(n + value for value in values) for n in numbers],
                [sum(n + value for value in values) / times for n in numbers],
                [min((f"{9 - v} {n}" for v in values if n % 5 != v), default=None) for n in numbers],
            ]
    assert sum(reads) < 50  # new keys that the filter has by mistake
    for first in range(5000, 7000, 100):  # the files of all earlier keys are gone
        added(first, first + 100, 0)
    reads.clear()
    assert [added(first, first + 100, 4)[0] for first in range(0, 1000, 100)] == [[5] * 100] * 10
    assert sum(reads) == 1000


def test_a_disk_without_room_for_evicted_rows_is_an_error_of_the_update(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    add(backend, 0, 100)
    add(backend, 100, 200)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        add(backend, 200, 300)


def test_rows_in_an_unwritten_snapshot_are_kept(backend: KeyedStateBackend) -> None:
    add(backend, 0, 100)
    frozen = backend.snapshot(1, CHECKPOINT)
    add(backend, 1000, 1100)
    add(backend, 2000, 2100)
    assert add(backend, 0, 100) == [2] * 100
    frozen.release()


def test_snapshot_has_the_state_of_its_moment_after_later_writes_of_the_cache(
    backend: KeyedStateBackend, tmp_path: Path
) -> None:
    add(backend, 0, 80)
    frozen = backend.snapshot(1, CHECKPOINT)
    for first in (0, 1000, 2000, 0, 3000):
        add(backend, first, first + 90)
    again = create_backend("rocksdb", parameters(tmp_path))
    restore(again, written(frozen))
    assert add(again, 0, 90) == [2] * 80 + [1] * 10
    assert add(again, 1000, 1090) == [1] * 90
    again.close()


def test_rows_that_are_used_stay_at_hand_and_nothing_is_written(
    backend: KeyedStateBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(backend, 0, 90)
    table: Any = backend.aggregate_table("a", KEY, COLUMNS)
    monkeypatch.setattr(table, "_database", None)
    assert [add(backend, 0, 90)[0] for _ in range(5)] == [2, 3, 4, 5, 6]


def test_batch_writes_only_as_much_as_its_new_keys_require(
    backend: KeyedStateBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: Any = backend.aggregate_table("a", KEY, COLUMNS)
    written: list[int] = []
    original = table._database.write
    monkeypatch.setattr(
        table._database, "write", lambda puts: (written.append(len(rows := list(puts))), original(rows))[1]
    )
    for first in range(0, 1000, 10):
        add(backend, first, first + 10)
    assert sum(written) == 900
    assert max(written) == 20


def test_new_keys_are_not_read_for_ever_after_a_restore(
    backend: KeyedStateBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(backend, 0, 3000)
    again: Any = create_backend("rocksdb", parameters(tmp_path))
    restore(again, written(backend.snapshot(1, CHECKPOINT)))
    table: Any = again.aggregate_table("a", KEY, COLUMNS)
    reads: list[int] = []
    original = table._database.multi_get
    monkeypatch.setattr(table._database, "multi_get", lambda keys: (reads.append(len(keys)), original(keys))[1])
    for first in range(0, 3000, 100):
        assert add(again, first, first + 100) == [2] * 100
    assert table._unknown is not None
    assert sum(reads) == 3000  # without new keys there is nothing to learn
    reads.clear()
    for first in range(5000, 9000, 100):
        assert add(again, first, first + 100) == [1] * 100
    assert table._unknown is None
    assert 1500 <= sum(reads) < 2200
    reads.clear()
    for first in range(0, 9000, 100):
        before = 2 if first < 3000 else 0 if first < 5000 else 1
        assert add(again, first, first + 100) == [before + 1] * 100
    assert 6900 <= sum(reads) < 7200
    again.close()


def test_a_key_that_leaves_the_cache_while_a_snapshot_s_keys_are_learned_is_not_taken_for_new(
    backend: KeyedStateBackend, tmp_path: Path
) -> None:
    add(backend, 0, 2000)
    again: Any = create_backend("rocksdb", parameters(tmp_path))
    restore(again, written(backend.snapshot(1, CHECKPOINT)))
    for first in (*range(5000, 7000, 50), *range(0, 2000, 50)):
        assert set(add(again, first, first + 50)) == {1 if first >= 5000 else 2}
    assert again.aggregate_table("a", KEY, COLUMNS)._unknown is None
    for first in (*range(5000, 7000, 50), *range(0, 2000, 50)):
        assert set(add(again, first, first + 50)) == {2 if first >= 5000 else 3}
    again.close()


def test_a_snapshot_of_nothing_new_has_nothing_to_write(backend: KeyedStateBackend) -> None:
    table: Any = backend.aggregate_table("a", KEY, COLUMNS)
    assert table.changes() == []
    add(backend, 0, 10)
    assert len(list(table.changes()[0].puts())) == 10
    assert table.changes() == []
