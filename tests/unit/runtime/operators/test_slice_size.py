"""Slices last about five milliseconds unless calls themselves are what costs."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.operators.slice_size import FIRST_ROWS, MOST_ROWS, SLICE_MS, SliceSize


def work_off(size: SliceSize, call_ms: float, row_ms: float, buffers: int = 6, rows: int = 16_384) -> list[int]:
    """Buffers in slices of the sizes asked for; returns the sizes for the last buffer."""
    slices: list[int] = []
    for _ in range(buffers):
        slices, left = [], rows
        while left:
            part = min(left, size.rows)
            size.took(part, call_ms + row_ms * part)
            slices.append(part)
            left -= part
            if len(slices) > 5_000:
                return slices
    return slices


def test_fast_operators_get_whole_buffers() -> None:
    assert work_off(SliceSize(), call_ms=0.02, row_ms=0.000_01) == [16_384]


@pytest.mark.parametrize("row_ms", [0.01, 0.1, 1.0])
def test_slow_rows_make_slices_of_five_milliseconds(row_ms: float) -> None:
    slices = work_off(SliceSize(), call_ms=0.01, row_ms=row_ms)
    assert all(part * row_ms <= SLICE_MS * 1.1 for part in slices)
    assert all(part * row_ms >= SLICE_MS * 0.5 for part in slices[:-1])


def test_rows_slower_than_a_slice_come_one_by_one() -> None:
    assert set(work_off(SliceSize(), call_ms=0, row_ms=50, rows=20)) == {1}


@pytest.mark.parametrize("row_ms", [0.0, 0.001])
def test_slow_calls_keep_their_batches(row_ms: float) -> None:
    """A call that takes 50 ms whatever it is given: in slices it would take a hundred times as long."""
    slices = work_off(SliceSize(), call_ms=50, row_ms=row_ms)
    assert slices == [16_384]


@pytest.mark.parametrize("call_ms", [3.5, 4.5, 5.5, 6.5, 8.0])
def test_slice_size_is_found_for_a_large_fixed_cost_from_any_first_size(call_ms: float) -> None:
    for first in (1, 2, 4, 16, 1024):
        assert work_off(SliceSize(first), call_ms, row_ms=0.000_1, buffers=3) == [16_384]


def test_calls_cost_a_tenth_at_most() -> None:
    slices = work_off(SliceSize(), call_ms=1, row_ms=0.1)
    assert min(slices[:-1]) >= 85


def test_slice_size_follows_an_operator_that_becomes_slower_or_faster() -> None:
    size = SliceSize()
    assert work_off(size, 0.02, 0.000_01) == [16_384]
    assert max(work_off(size, 0.02, 1.0, rows=2_000)) * 1.0 <= SLICE_MS * 1.1
    assert work_off(size, 0.02, 0.000_01) == [16_384]
    size = SliceSize()
    work_off(size, 0.01, 0.1)
    assert max(work_off(size, 0.01, 0.2)[:-1]) * 0.2 <= SLICE_MS * 1.1


def fluctuating(call_ms: float, row_ms: float, seed: int) -> list[float]:
    """The duration of each slice of 20,000 rows in buffers of 1,000, on a machine on which others work, too."""
    size, noise, durations = SliceSize(), random.Random(seed), []
    for _ in range(20):
        left = 1_000
        while left:
            rows = min(left, size.rows)
            durations.append((call_ms + row_ms * rows) * math.exp(noise.gauss(0, 0.6)))
            size.took(rows, durations[-1])
            left -= rows
    return sorted(durations)


@pytest.mark.parametrize("seed", range(20))
def test_slices_stay_long_for_expensive_calls_and_short_for_slow_rows_although_times_fluctuate(seed: int) -> None:
    assert len(fluctuating(30, 0.02, seed)) < 400
    durations = fluctuating(0.05, 0.5, seed)
    assert durations[len(durations) * 9 // 10] < 10 * SLICE_MS


def test_fixed_cost_is_found_although_the_first_slices_of_one_size_take_different_times() -> None:
    size = SliceSize()
    for rows, ms in ((4, 30.0), (1, 60.0), (1, 30.0), (1, 35.0)):
        size.took(min(rows, size.rows), ms)
    assert len(work_off(size, call_ms=30, row_ms=0, buffers=1, rows=1_000)) < 20


@given(st.floats(0, 100), st.floats(0, 10), st.integers(0, 2**32))
def test_every_size_is_one_that_can_be_taken(call_ms: float, row_ms: float, seed: int) -> None:
    size, noise = SliceSize(), random.Random(seed)
    assert size.rows == FIRST_ROWS
    for _ in range(50):
        rows = min(size.rows, noise.randrange(1, 20_000))
        size.took(rows, (call_ms + row_ms * rows) * noise.uniform(0.5, 2))
        assert 1 <= size.rows <= MOST_ROWS
