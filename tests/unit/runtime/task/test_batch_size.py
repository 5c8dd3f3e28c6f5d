"""Sizes of batches."""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.task.output import BatchSizer


def test_rows_of_fixed_width_count_by_their_number() -> None:
    batch = pa.record_batch({"a": pa.array(range(100), pa.int64()), "b": pa.array([1] * 100, pa.int32())})
    sizer = BatchSizer()
    assert sizer.of(batch) == 1200
    assert sizer.of(batch.slice(10, 5)) == 60


def test_strings_count_their_bytes() -> None:
    batch = pa.record_batch({"a": [1, 2], "s": ["x" * 1000, "y"]})
    assert BatchSizer().of(batch) == batch.nbytes > 1000


def test_batch_without_columns_has_no_bytes() -> None:
    assert BatchSizer().of(pa.RecordBatch.from_arrays([], names=[])) == 0
