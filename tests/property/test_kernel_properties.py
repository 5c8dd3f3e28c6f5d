"""Compiled kernels against their plain forms, on random columns, nulls, slices and key counts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.graph.key_groups import owner_of_key_group
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.hashing import hash_arrays, hash_columns, key_groups_of, split_by_owner
from ckpt_runtime.state.kernels.hash_kernels import order_by_group
from ckpt_runtime.state.memory.key_index import key_index
from ckpt_runtime.state.stored_rows import encode_rows
from tests.support import reference_kernels as reference

INTS = st.integers(-(2**63), 2**63 - 1)
COLUMNS = [
    (pa.int64(), INTS),
    (pa.int16(), st.integers(-(2**15), 2**15 - 1)),
    (pa.bool_(), st.booleans()),
    (pa.float64(), st.floats()),
    (pa.string(), st.text(max_size=20)),
    (pa.large_binary(), st.binary(max_size=20)),
]


@st.composite
def key_columns(draw: st.DrawFn, most: int = 3) -> tuple[list[pa.Array], list[tuple[Any, ...]]]:
    """Some columns, sliced out of longer ones, and their rows."""
    chosen = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=most))
    rows = draw(st.integers(0, 30))
    before = draw(st.integers(0, 9))
    arrays, lists = [], []
    for kind, values in chosen:
        pool = draw(st.lists(st.one_of(st.none(), values), min_size=1, max_size=8))
        cells = [pool[i % len(pool)] for i in draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows))]
        arrays.append(pa.array([None] * before + cells + [None], kind).slice(before, rows))
        lists.append(arrays[-1].to_pylist())
    return arrays, list(zip(*lists, strict=True))


def canonical(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple("nan" if isinstance(part, float) and math.isnan(part) else part for part in key)


@settings(deadline=None)  # the first call loads a kernel
@given(key_columns())
def test_hash_equals_its_reference(drawn: tuple[list[pa.Array], list[tuple[Any, ...]]]) -> None:
    arrays, rows = drawn
    names = [str(index) for index in range(len(arrays))]
    assert hash_arrays(arrays, names).tolist() == [reference.hash_key(row) for row in rows]


@settings(deadline=None)  # the first call loads a kernel
@given(st.lists(INTS, max_size=50), st.integers(1, 200), st.integers(1, 8))
def test_key_groups_and_split_equal_their_reference(keys: list[int], max_parallelism: int, parallelism: int) -> None:
    parallelism = min(parallelism, max_parallelism)
    batch = pa.record_batch({"k": pa.array(keys, pa.int64())})
    hashes = hash_columns(batch, ["k"])
    groups = reference.key_groups(hashes, max_parallelism)
    assert key_groups_of(hashes, max_parallelism).tolist() == groups.tolist()
    owners = np.array([owner_of_key_group(int(g), max_parallelism, parallelism) for g in groups], dtype=np.int64)
    expected = [[k for k, owner in zip(keys, owners, strict=True) if owner == index] for index in range(parallelism)]
    parts = split_by_owner(batch, hashes, max_parallelism, parallelism)
    assert [part["k"].to_pylist() for part in parts] == expected


@settings(deadline=None)  # the first call loads a kernel
@given(st.lists(st.integers(10, 19), max_size=60))
def test_order_by_group_is_a_stable_sort(groups: list[int]) -> None:
    array = np.array(groups, dtype=np.int32)
    ends, order = np.zeros(10, dtype=np.int64), np.empty(len(groups), dtype=np.int64)
    order_by_group(read_only(array), 10, ends, order)
    assert order.tolist() == reference.stable_order(array).tolist()
    assert ends.tolist() == [sum(g <= last for g in groups) for last in range(10, 20)]


@settings(deadline=None)  # the first call loads a kernel
@given(st.lists(key_columns(most=2), min_size=1, max_size=1), st.integers(1, 5))
def test_key_index_gives_slots_in_order_and_keys_back(drawn: list[Any], repeats: int) -> None:
    arrays, rows = drawn[0]
    names = [str(index) for index in range(len(arrays))]
    index = key_index(pa.schema([(name, array.type) for name, array in zip(names, arrays, strict=True)]))
    known: dict[Any, int] = {}
    half = [array[: len(rows) // 2] for array in arrays]
    if repeats > 1 and rows[: len(rows) // 2]:
        index.slots_of(half)
        reference.slots_of([canonical(row) for row in rows[: len(rows) // 2]], known)
        assert index.find(arrays).tolist() == [known.get(canonical(row), -1) for row in rows]
    for _ in range(repeats):
        expected = reference.slots_of([canonical(row) for row in rows], known)
        assert index.slots_of(arrays).tolist() == expected
        assert index.find(arrays).tolist() == expected
    frozen = index.freeze()
    restored = [canonical(row) for row in zip(*[array.to_pylist() for array in frozen.arrays()], strict=True)]
    assert restored == list(known)
    assert frozen.hashes().tolist() == hash_arrays(frozen.arrays(), names).tolist() if known else index.size == 0


@settings(deadline=None)  # the first call loads a kernel
@given(key_columns())
def test_encoded_keys_are_equal_exactly_when_keys_are(drawn: Any) -> None:
    arrays, rows = drawn
    offsets, data = encode_rows(arrays, [str(index) for index in range(len(arrays))], keys=True)
    encoded = [data[offsets[i] : offsets[i + 1]].tobytes() for i in range(len(rows))]
    assert len(set(encoded)) == len({canonical(row) for row in rows})
