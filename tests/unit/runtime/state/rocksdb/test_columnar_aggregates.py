"""The write-back cache of aggregates: what it may forget, when it writes, and what a snapshot takes out of it."""

from __future__ import annotations

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
