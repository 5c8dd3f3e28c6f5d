"""The stable hash: fixed values (key groups of savepoints depend on them), equal values in any layout, the split."""

from __future__ import annotations

from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.graph.key_groups import key_group_range
from ckpt_runtime.state.errors import UnsupportedKeyTypeError
from ckpt_runtime.state.hashing import check_key_types, hash_arrays, hash_columns, key_groups_of, split_by_owner
from tests.support import reference_kernels as reference


def hashes(values: object, kind: pa.DataType | None = None) -> list[int]:
    array = values if isinstance(values, pa.Array) else pa.array(values, kind)
    return hash_arrays([array], ["k"]).tolist()


def test_hash_never_changes() -> None:
    assert hashes([0, 1, -1, None], pa.int64()) == [
        16294208416658607535, 10451216379200822465, 16490336266968443936, 15485907386658061715,
    ]  # fmt: skip
    assert hashes(["", "a", "key-123456"]) == [reference.hash_key([text]) for text in ("", "a", "key-123456")]
    assert hash_columns(pa.record_batch({"a": [7], "b": ["x"]}), ["a", "b"]).tolist() == [reference.hash_key([7, "x"])]


def test_width_of_integers_does_not_matter() -> None:
    kinds = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint64(), pa.date32(), pa.timestamp("us")]
    plain = hashes([5, 100], pa.int64())
    for kind in kinds:
        storage = pa.int32() if kind == pa.date32() else pa.int64()
        array = pa.array([5, 100], storage)
        assert hashes(array.view(kind) if kind in (pa.date32(), pa.timestamp("us")) else array.cast(kind)) == plain


def test_equal_floats_hash_equal() -> None:
    other_nan = np.array([0x7FF8000000000001], dtype=np.uint64).view(np.float64)[0]
    zero, minus_zero, nan, odd_nan, single = hashes(pa.array([0.0, -0.0, float("nan"), other_nan, 1.5]))
    assert zero == minus_zero
    assert nan == odd_nan
    assert hashes([1.5], pa.float32()) == [single]


def test_slices_offsets_and_encodings_do_not_matter() -> None:
    texts = ["alpha", None, "beta", "", "gamma with more than eight bytes", "beta"]
    plain = hashes(texts)
    array = pa.array(["x", None, *texts, "y"])
    assert hashes(array.slice(2, 6)) == plain
    assert hashes(array.cast(pa.large_string()).slice(2, 6)) == plain
    assert hashes(pa.array(texts).dictionary_encode()) == plain
    assert hashes(pa.array(texts, pa.string_view())) == plain
    assert hashes(pa.array([True, None, False, True]).slice(1, 3)) == [reference.hash_value(v) for v in (None, 0, 1)]
    numbers = pa.array([1, None, 3, 4], pa.int32())
    assert hashes(numbers.slice(1, 3)) == [reference.hash_value(v) for v in (None, 3, 4)]


def test_decimals_hash_by_unscaled_value() -> None:
    value = [Decimal("12.34"), None]
    expected = [reference.hash_bytes((1234).to_bytes(16, "little", signed=True)), reference.NULL_HASH]
    assert hashes(value, pa.decimal128(10, 2)) == expected
    assert hashes(value, pa.decimal32(6, 2)) == expected


def test_nested_keys_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedKeyTypeError, match="'tags' has type list"):
        hash_columns(pa.record_batch({"tags": [["a"]]}), ["tags"])
    with pytest.raises(UnsupportedKeyTypeError, match="'tags'"):
        check_key_types(pa.schema([("tags", pa.list_(pa.string()))]), ["tags"])
    with pytest.raises(KeyError, match="missing"):
        check_key_types(pa.schema([("tags", pa.string())]), ["missing"])


@pytest.mark.parametrize("max_parallelism", [1, 7, 128, 32_768])
def test_key_groups_follow_the_scalar_form(max_parallelism: int) -> None:
    all_hashes = np.array([0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 1], dtype=np.uint64)
    expected = [reference.key_group_of_hash(int(value), max_parallelism) for value in all_hashes]
    assert key_groups_of(all_hashes, max_parallelism).tolist() == expected


@pytest.mark.parametrize("parallelism", [1, 2, 3, 7])
def test_split_gives_each_subtask_its_key_groups_in_order(parallelism: int) -> None:
    batch = pa.record_batch({"k": list(range(1000)), "text": [f"t{i}" for i in range(1000)]})
    key_hashes = hash_columns(batch, ["k"])
    parts = split_by_owner(batch, key_hashes, 128, parallelism)
    assert len(parts) == parallelism
    assert sorted(key for part in parts for key in part["k"].to_pylist()) == list(range(1000))
    for index, part in enumerate(parts):
        owned = key_group_range(128, parallelism, index)
        assert all(group in owned for group in key_groups_of(hash_columns(part, ["k"]), 128).tolist())
        assert part["k"].to_pylist() == sorted(part["k"].to_pylist())
        assert part["text"].to_pylist() == [f"t{key}" for key in part["k"].to_pylist()]


def test_split_moves_columns_of_every_width_together() -> None:
    numbers = list(range(100, 200))
    batch = pa.record_batch(
        {
            "k": numbers,
            "i8": pa.array([n - 100 for n in numbers], pa.int8()),
            "u16": pa.array(numbers, pa.uint16()),
            "f32": pa.array(numbers, pa.float32()),
            "f16": pa.array(np.array(numbers, dtype=np.float16)),
            "at": pa.array(numbers, pa.timestamp("us", "UTC")),
            "flag": [n % 3 == 0 for n in numbers],
            "hole": [None if n % 5 == 0 else n for n in numbers],
            "list": [[n] for n in numbers],
        }
    ).slice(3, 90)
    parts = split_by_owner(batch, hash_columns(batch, ["k"]), 128, 3)
    rows = [row for part in parts for row in part.to_pylist()]
    assert sorted(rows, key=lambda row: row["k"]) == batch.to_pylist()
    assert all(part.schema == batch.schema for part in parts)


def test_split_of_one_owner_and_of_nothing() -> None:
    batch = pa.record_batch({"k": [5, 5, 5]})
    parts = split_by_owner(batch, hash_columns(batch, ["k"]), 128, 4)
    assert sorted(part.num_rows for part in parts) == [0, 0, 0, 3]
    empty = batch.slice(0, 0)
    assert [part.num_rows for part in split_by_owner(empty, hash_columns(empty, ["k"]), 128, 4)] == [0, 0, 0, 0]
