"""Format ``verify`` and ``noop``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.expected import scattered
from ckpt_runtime.connectors.noop_sink import NoopSink
from ckpt_runtime.connectors.numbers import MAX_KEY, VerifySink
from ckpt_runtime.graph.specs import SinkSpec
from tests.unit.runtime.connectors.harness import context, opened, snapshot_of


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
