"""The filter of keys that the database may hold: it forgets none, and seldom takes one for another."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.state.hashing import hash_arrays
from ckpt_runtime.state.rocksdb.database import KeyFilter
from tests.support.held_memory import bytes_held


def hashes(first: int, last: int) -> np.ndarray:
    return hash_arrays([pa.array(range(first, last))], ["key"])


@pytest.mark.parametrize("size", [1, 64, 1000, 1 << 20])
def test_filter_forgets_no_added_key_at_any_number_of_keys(size: int) -> None:
    known = KeyFilter(size)
    for first in range(0, 40_000, 10_000):
        known.add(hashes(first, first + 10_000))
        assert known.may_hold(hashes(0, first + 10_000)).all()
    assert bytes_held(known) < size + 1000


def test_few_keys_are_taken_for_others() -> None:
    known = KeyFilter(125_000)  # ten bits for each of these
    known.add(hashes(0, 100_000))
    assert known.may_hold(hashes(100_000, 200_000)).mean() < 0.03


def test_an_empty_one_holds_nothing_and_has_no_memory() -> None:
    known = KeyFilter(1 << 30)
    assert not known.may_hold(hashes(0, 1000)).any()
    assert bytes_held(known) < 1000
