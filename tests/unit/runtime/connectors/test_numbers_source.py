"""Format ``numbers``: the rows themselves, and each exactly once however it is split, stopped and rescaled."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_runtime.connectors.numbers import BLOCK, NumbersSource
from ckpt_runtime.connectors.splits import SPLITS
from ckpt_runtime.graph.specs import SourceSpec
from ckpt_runtime.operators.operator import SourceStatus
from tests.support.effort import examples
from tests.unit.runtime.connectors.harness import Clock, Collector, context, drain, opened, redistributed, snapshot_of

MASK = (1 << 64) - 1


def source(**options: object) -> NumbersSource:
    return NumbersSource(SourceSpec("numbers", {key: str(value) for key, value in options.items()}))


def splitmix64(row: int) -> int:
    """The reference, in whole numbers."""
    z = (row + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


@pytest.mark.parametrize("keys", [1, 7, 100_000, (1 << 62) + 1])
def test_rows_are_the_documented_function_of_their_number(keys: int) -> None:
    numbers = source(rows=1000, keys=keys, rowNumber="true")
    output = opened(numbers, context())
    assert drain(numbers)
    assert sorted(output.column("row")) == list(range(1000))
    for row in output.rows:
        mixed = splitmix64(row["row"])
        assert (row["key"], row["value"]) == (mixed % keys, mixed & 1023)


@pytest.mark.parametrize("keys", [1, 100_000])
def test_keys_are_spread_over_a_wide_range_as_numbers_or_as_text(keys: int) -> None:
    plain, far, text = (source(rows=1000, keys=keys, keyForm=form) for form in ("int", "scattered", "string"))
    outputs = [opened(numbers, context()) for numbers in (plain, far, text)]
    assert all(drain(numbers) for numbers in (plain, far, text))
    keys_of, values_of = ([output.column(name) for output in outputs] for name in ("key", "value"))
    assert keys_of[2] == [f"{splitmix64(key):016x}" for key in keys_of[0]]
    assert [key & MASK for key in keys_of[1]] == [int(digits, 16) for digits in keys_of[2]]
    assert values_of[0] == values_of[1] == values_of[2]


def test_batches_have_the_asked_size_and_share_no_memory() -> None:
    numbers = source(rows=0, batchRows=1000)
    output = opened(numbers, context())
    drain(numbers, 3)
    assert [batch.num_rows for batch in output.batches] == [1000] * 3
    keys = [np.array(batch.column("key").to_pylist()) for batch in output.batches]
    assert not np.array_equal(keys[0], keys[1])
    assert [batch.column("key").to_pylist() for batch in output.batches] == [list(k) for k in keys]


def test_sequence_numbers_have_no_gaps_within_a_split() -> None:
    seen: dict[int, list[int]] = {}
    for subtask in range(3):
        numbers = source(rows=BLOCK * SPLITS * 2 + 300, sequence="true", batchRows=777)
        output = opened(numbers, context(subtask, 3))
        drain(numbers)
        for row in output.rows:
            seen.setdefault(row["source"], []).append(row["n"])
    assert sum(map(len, seen.values())) == BLOCK * SPLITS * 2 + 300
    assert all(numbers == list(range(len(numbers))) for numbers in seen.values())


@settings(max_examples=examples(60), deadline=None)
@given(
    rows=st.integers(0, 70_000),
    stages=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 8)), min_size=1, max_size=4),
    batch_rows=st.integers(1, 6_000).filter(lambda n: n > 200),
)
def test_every_row_comes_exactly_once_through_any_stops_and_rescales(
    rows: int, stages: list[tuple[int, int]], batch_rows: int
) -> None:
    """Each stage restores the last one's snapshot at its own parallelism, and is stopped after some polls."""
    seen: list[int] = []
    snapshots: list[tuple] = []
    for number, (parallelism, polls) in enumerate([*stages, (2, None)]):
        restored = redistributed(snapshots, parallelism) if snapshots else [[] for _ in range(parallelism)]
        snapshots = []
        for subtask in range(parallelism):
            numbers = (
                source(rows=rows, rowNumber="true", batchRows=batch_rows) if rows else source(rows=1, rowNumber="true")
            )
            output = opened(numbers, context(subtask, parallelism, state=restored[subtask], restored=number or None))
            drain(numbers, polls)
            seen += output.column("row")
            snapshots.append(snapshot_of(numbers, number + 1))
    assert sorted(seen) == list(range(rows or 1))


def test_a_subtask_that_gets_no_split_back_ends_instead_of_starting_over() -> None:
    numbers = source(rows=1000)
    opened(numbers, context())
    drain(numbers)
    states = [state for state in snapshot_of(numbers, 1) if state.name != "positions"]
    again = source(rows=1000)
    output = opened(again, context(1, 2, state=states, restored=1))
    assert again.poll() is SourceStatus.END_OF_INPUT
    assert output.batches == []


def test_a_source_that_is_new_in_a_restored_job_starts_at_the_beginning() -> None:
    numbers = source(rows=100, rowNumber="true")
    output = opened(numbers, context(restored=7))
    drain(numbers)
    assert len(output.rows) == 100


def test_the_rate_is_shared_by_the_subtasks_and_kept_while_the_clock_is_set_back() -> None:
    clock = Clock()
    outputs: list[Collector] = []
    sources = [source(rows=0, rowsPerSecond=1000) for _ in range(4)]
    for subtask, numbers in enumerate(sources):
        outputs.append(opened(numbers, context(subtask, 4, now_ms=lambda: -clock(), monotonic_ms=clock)))
    for _ in range(100):
        clock.ms += 50
        for numbers in sources:
            while numbers.poll() is SourceStatus.MORE_AVAILABLE:
                pass
            assert numbers.idle_ms() >= 10
    assert [len(output.rows) for output in outputs] == [1250] * 4
