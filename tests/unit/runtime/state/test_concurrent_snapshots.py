"""A snapshot that another thread writes while the owner continues shows the moment it was taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.states import AggregateColumn
from tests.support.inline_snapshots import CHECKPOINT
from tests.unit.runtime.state.conftest import Snapshots

COLUMNS = [
    AggregateColumn("count", None, "n", None, pa.int64()),
    AggregateColumn("sum", "v", "s", pa.int64(), pa.int64()),
    AggregateColumn("max", "t", "t", pa.string(), pa.string()),
]
VALUE = pa.schema([("n", pa.int64())])


def batch(seed: int) -> pa.RecordBatch:
    numbers = np.random.default_rng(seed).integers(0, 500 + 100 * seed, 2000)
    return pa.record_batch({"k": numbers, "v": numbers + seed, "t": [f"{seed:03d}{n}" for n in numbers.tolist()]})


def update(backend: MemoryKeyedStateBackend, int_key: pa.Schema, seed: int) -> None:
    part = batch(seed)
    backend.aggregate_table("a", int_key, COLUMNS).update(part)
    values = backend.value_state("v", int_key, VALUE)
    lists = backend.list_state("l", int_key, VALUE)
    for key in part["k"].to_pylist():
        values.put((key,), ((values.get((key,)) or (0,))[0] + 1,))
        lists.append((key,), [(seed,)])
    backend.maintain()


def content(backend: MemoryKeyedStateBackend, int_key: pa.Schema) -> Any:
    probe = pa.record_batch({"k": np.arange(3000), "v": np.zeros(3000, dtype=np.int64), "t": [""] * 3000})
    table = [array.to_pylist() for array in backend.aggregate_table("a", int_key, COLUMNS).update(probe)]
    values = backend.value_state("v", int_key, VALUE)
    lists = backend.list_state("l", int_key, VALUE)
    return table, [(values.get((k,)), list(lists.get((k,)))) for k in range(3000)]


@pytest.mark.parametrize("overlapping", [1, 3, 6])
def test_snapshot_is_written_while_state_is_updated(snapshots: Snapshots, int_key: pa.Schema, overlapping: int) -> None:
    backend = snapshots.backend()
    pending: list[tuple[int, Any]] = []
    with ThreadPoolExecutor(2) as pool:
        for seed in range(18):
            update(backend, int_key, seed)
            if seed % 3 == 0:
                pending.append((seed, pool.submit(snapshots.written, backend.snapshot(seed, CHECKPOINT))))
            if len(pending) >= overlapping:
                taken_at, sources = pending.pop(0)
                self_made = snapshots.backend()
                for earlier in range(taken_at + 1):
                    update(self_made, int_key, earlier)
                expected = content(self_made, int_key)
                assert content(snapshots.restored(sources.result()), int_key) == expected
