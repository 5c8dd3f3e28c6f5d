"""Sizes of batches."""

from __future__ import annotations

import pyarrow as pa

from ckpt_runtime.task.output import BatchSizer


def test_bytes_of_a_batch_are_those_of_its_rows_and_strings() -> None:
    batch = pa.record_batch({"a": pa.array(range(100), pa.int64()), "b": pa.array([1] * 100, pa.int32())})
    sizer = BatchSizer()
    assert sizer.of(batch) == 1200
    assert sizer.of(batch.slice(10, 5)) == 60
    batch = pa.record_batch({"a": [1, 2], "s": ["x" * 1000, "y"]})
    assert BatchSizer().of(batch) == batch.nbytes > 1000
    assert BatchSizer().of(pa.RecordBatch.from_arrays([], names=[])) == 0
