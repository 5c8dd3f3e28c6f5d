"""Format ``verify`` and ``noop``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.connectors.blackhole import BlackholeSink
from ckpt_runtime.connectors.verify import MAX_KEY, VerifySink
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
    with pytest.raises(ValueError, match="column 'count' holds nulls"):
        sink.process_batch(
            pa.RecordBatch.from_pylist([{"key": 1, "count": None, "sum": 0}, {"key": 1, "count": 1, "sum": 0}]), 0
        )


def test_noop_takes_everything() -> None:
    sink = BlackholeSink(SinkSpec("noop"))
    output = opened(sink, context())
    sink.process_batch(updates((1, 1, 1)), 0)
    sink.process_watermark(5)
    assert snapshot_of(sink, 1) == ()
    assert output.batches == []
