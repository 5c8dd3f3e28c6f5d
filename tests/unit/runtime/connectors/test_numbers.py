"""Formats ``numbers``, ``verify`` and ``noop``: each row exactly once, through any splits, stops and rescales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.expected import scattered
from ckpt_runtime.connectors.noop_sink import NoopSink
from ckpt_runtime.connectors.numbers import BLOCK, MAX_KEY, NumbersSource, VerifySink
from ckpt_runtime.connectors.splits import SPLITS
from ckpt_runtime.graph.specs import SinkSpec, SourceSpec
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


def updates(*rows: tuple[int, int, int]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([{"key": k, "count": c, "sum": s} for k, c, s in rows])


def verify(path: Path) -> VerifySink:
    return VerifySink(SinkSpec("verify", {"report": str(path), "sum": "sum"}))


def report(path: Path, subtask: int = 0) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((path / f"subtask-{subtask}.json").read_text())
    return document


def test_totals_are_those_of_the_last_update_of_each_key(tmp_path: Path) -> None:
    sink = verify(tmp_path)
    opened(sink, context())
    sink.process_batch(updates((3, 1, 10), (5000, 1, 7), (3, 2, 30)), 0)
    sink.finish()
    found = report(tmp_path)
    assert (found["rows"], found["keys"], found["count_total"], found["sum_total"]) == (3, 2, 3, 37)
    assert (found["violations"], found["finished"]) == (0, True)


@pytest.mark.parametrize("form", ["scattered", "string"])
def test_keys_in_another_form_are_those_that_it_was_made_of(tmp_path: Path, form: str) -> None:
    sink = VerifySink(SinkSpec("verify", {"report": str(tmp_path), "sum": "sum", "keyForm": form}))
    opened(sink, context(uid="check"))
    keys = scattered(np.array([3, MAX_KEY - 1, 3, 3]))
    column = pa.array([f"{key:016x}" for key in keys.view(np.uint64).tolist()] if form == "string" else keys)
    numbers = [pa.array([1, 4, 2, 4]), pa.array([10, 7, 30, 40])]
    sink.process_batch(pa.record_batch([column, *numbers], ["key", "count", "sum"]), 0)
    sink.finish()
    found = report(tmp_path)
    assert (found["keys"], found["count_total"], found["sum_total"], found["violations"]) == (2, 8, 47, 1)
    with pytest.raises(ValueError, match="is not between 0 and"):
        other = ["0123456789abcdef"] if form == "string" else [5]
        sink.process_batch(pa.record_batch([other, [1], [1]], ["key", "count", "sum"]), 0)


@pytest.mark.parametrize("text", ["", "0123456789abcde", "0123456789abcdeF", "0123456789abcdef0", None])
def test_text_that_is_not_a_key_is_refused(tmp_path: Path, text: str | None) -> None:
    sink = VerifySink(SinkSpec("verify", {"report": str(tmp_path), "keyForm": "string"}))
    opened(sink, context(uid="check"))
    batch = pa.record_batch([pa.array(["0123456789abcdef", text]), [1, 1]], ["key", "count"])
    with pytest.raises(ValueError, match="column 'key' contains texts that are not 16 hexadecimal digits"):
        sink.process_batch(batch, 0)


def test_a_repeated_or_skipped_count_is_a_violation(tmp_path: Path) -> None:
    sink = verify(tmp_path)
    opened(sink, context())
    sink.process_batch(updates((1, 4, 0), (1, 5, 0), (1, 5, 0), (1, 7, 0), (2, 1, 0)), 0)
    sink.notify_complete(1)
    assert report(tmp_path)["violations"] == 2


def test_rows_are_counted_over_restores(tmp_path: Path) -> None:
    sink = verify(tmp_path)
    opened(sink, context())
    sink.process_batch(updates((1, 1, 0), (2, 1, 0)), 0)
    state = snapshot_of(sink, 1)
    sink.process_batch(updates((1, 2, 0)), 0)
    again = verify(tmp_path)
    opened(again, context(attempt=1, state=state, restored=1))
    again.process_batch(updates((1, 2, 0)), 0)
    again.close()
    found = report(tmp_path)
    assert (found["rows"], found["attempt"], found["violations"], found["finished"]) == (3, 1, 0, False)


def test_keys_out_of_range_and_nulls_are_named(tmp_path: Path) -> None:
    sink = verify(tmp_path)
    opened(sink, context(uid="check"))
    for key in (-1, MAX_KEY):
        with pytest.raises(ValueError, match=f"sink 'check': key {key} is not between 0 and"):
            sink.process_batch(updates((key, 1, 0)), 0)
    with pytest.raises(ValueError, match="column 'count' contains nulls"):
        sink.process_batch(
            pa.RecordBatch.from_pylist([{"key": 1, "count": None, "sum": 0}, {"key": 1, "count": 1, "sum": 0}]), 0
        )


def numbered(path: Path) -> VerifySink:
    return VerifySink(SinkSpec("verify", {"report": str(path), "row": "row"}))


def rows(*numbers: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"row": pa.array(numbers, pa.int64())})


def test_the_digest_of_rows_does_not_depend_on_their_order_but_on_each_of_them(tmp_path: Path) -> None:
    digests = []
    for name, numbers in {
        "a": (1, 2, 3),
        "b": (3, 1, 2),
        "lost": (1, 2),
        "twice": (1, 2, 3, 3),
        "wrong": (1, 2, 4),
    }.items():
        sink = numbered(tmp_path / name)
        opened(sink, context())
        for number in numbers:
            sink.process_batch(rows(number), 0)
        sink.finish()
        digests.append(report(tmp_path / name)["digest"])
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert set(report(tmp_path / "a")) == {"subtask", "attempt", "rows", "digest", "first_ms", "last_ms", "finished"}


def test_the_digest_is_kept_over_restores(tmp_path: Path) -> None:
    sink = numbered(tmp_path)
    opened(sink, context())
    sink.process_batch(rows(7, 8), 0)
    state = snapshot_of(sink, 1)
    sink.process_batch(rows(9), 0)
    sink.finish()
    undisturbed = report(tmp_path)
    again = numbered(tmp_path)
    opened(again, context(attempt=1, state=state, restored=1))
    again.process_batch(rows(9), 0)
    again.finish()
    assert report(tmp_path)["rows"] == undisturbed["rows"] == 3
    assert report(tmp_path)["digest"] == undisturbed["digest"]


def test_noop_takes_everything() -> None:
    sink = NoopSink(SinkSpec("noop"))
    output = opened(sink, context())
    sink.process_batch(updates((1, 1, 1)), 0)
    sink.process_watermark(5)
    assert snapshot_of(sink, 1) == ()
    assert output.batches == []
