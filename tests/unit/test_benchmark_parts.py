"""What benchmarks make of their figures: percentiles, tables, lines of charts, positions, and the check of rows."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from benchmarks import backpressure, backpressure_plot, expected, peers, progress, shuffle_run
from benchmarks.backpressure_plot import Point
from benchmarks.harness import BenchmarkError, Report, not_negative, percentile
from benchmarks.pipelines import backpressure as topology
from ckpt_runtime.connectors import numbers
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.contract.jobs import IoMetrics
from ckpt_runtime.state.arrays import read_only


def run(policy: str, sleep_ms: float, **measures: Any) -> dict[str, Any]:
    return {"policy": policy, "sleep_ms": sleep_ms, "rows_per_s": 1000, "censored": False, **measures}


RUNS = [
    run("none", 1.0, checkpoint_ms_p50=None),
    run("aligned", 1.0, checkpoint_ms_p50=30_000, censored=True),
    run("aligned", 0.0, checkpoint_ms_p50=20),
    {"policy": "unaligned", "sleep_ms": 0.1, "error": "the job is FAILED | why"},
]


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.5) == 51
    assert percentile(values, 0.95) == 96
    assert percentile(values, 1.0) == 100
    assert percentile([7.0], 0.5) == 7
    assert percentile([], 0.5) is None


def test_lines_have_the_points_that_were_measured() -> None:
    assert backpressure_plot.sleeps(RUNS) == [0.0, 0.1, 1.0]
    assert backpressure_plot.lines(RUNS, "checkpoint_ms_p50") == {
        "aligned": [Point(0, 20.0, False), Point(2, 30_000.0, True)]
    }
    assert backpressure_plot.lines(RUNS, "rows_per_s") == {
        "aligned": [Point(0, 1000.0, False), Point(2, 1000.0, False)],
        "none": [Point(2, 1000.0, False)],
    }


def test_the_table_marks_lower_bounds_and_names_failures() -> None:
    head, _, none, bound, _, failed = backpressure_plot.table(RUNS).splitlines()
    assert head.startswith("| sleep ms | policy | rows_per_s | checkpoints | checkpoint_ms_p50 |")
    assert none.startswith("| 1 | none | 1,000 | - | - |")
    assert bound.startswith("| 1 | aligned | 1,000 | - | ≥ 30,000 |")
    assert failed.startswith("| 0.1 | unaligned | the job is FAILED \\| why |")


@pytest.mark.long
def test_charts_are_written_as_svg_and_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    backpressure_plot.write_table(tmp_path, RUNS)
    backpressure_plot.write_charts(tmp_path, RUNS)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "backpressure.json",
        "backpressure.md",
        "checkpoint_duration.png",
        "checkpoint_duration.svg",
        "throughput.png",
        "throughput.svg",
    ]
    assert json.loads((tmp_path / "backpressure.json").read_text()) == RUNS
    assert (tmp_path / "throughput.png").read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in (tmp_path / "checkpoint_duration.svg").read_text()


def checkpoint(number: int, status: str, triggered_at_ms: int, duration_ms: int, **fields: Any) -> Checkpoint:
    sizes = {"checkpointed_size": 10 * number, "persisted_data": number, "processed_data": 0, "state_size": 0}
    return Checkpoint(
        **{
            "id": number,
            "status": status,
            "kind": "CHECKPOINT",
            "is_savepoint": False,
            "savepoint_format": None,
            "triggered_at_ms": triggered_at_ms,
            "latest_ack_ms": -1,
            "duration_ms": duration_ms,
            "num_subtasks": 1,
            "num_acknowledged": 0,
            **sizes,
            **fields,
        }
    )


def report(**fields: int) -> Report:
    return Report({0: {"rows": 0, "last_ms": 0, **fields}})


def test_a_pending_checkpoint_counts_with_its_age() -> None:
    window = backpressure.Window(report(), report(rows=5000, last_ms=2000), 0, ended_ms=9_000)
    window.checkpoints = [checkpoint(1, "COMPLETED", 0, 40), checkpoint(2, "IN_PROGRESS", 1_000, 3)]
    assert window.measures() == {
        "rows_per_s": 2500,
        "checkpoints": 1,
        "checkpoint_ms_p50": 8_000,
        "checkpoint_ms_p95": 8_000,
        "checkpoint_ms_max": 8_000,
        "censored": True,
        "checkpointed_bytes_p50": 10,
        "persisted_inflight_bytes_p50": 1,
        "queued_bytes_max": 0,
    }


def test_without_checkpoints_there_are_no_durations() -> None:
    measures = backpressure.Window(report(), report(rows=10, last_ms=1000), 0).measures()
    assert measures["rows_per_s"] == 10
    assert measures["checkpoint_ms_p50"] is None
    assert measures["censored"] is False


def test_queued_bytes_are_those_between_the_vertices() -> None:
    chain = [
        IoMetrics(write_records=100, write_bytes=12_000),
        IoMetrics(read_records=70, write_records=70, write_bytes=8_400),
        IoMetrics(read_records=75),
    ]
    assert backpressure.queued_bytes(chain) == 30 * 120
    assert backpressure.queued_bytes([IoMetrics(), IoMetrics()]) == 0


def test_policies_are_configuration() -> None:
    options = argparse.Namespace(policy="timeout", timeout_ms=70, conf=["execution.checkpointing.timeout=1 min"])
    assert shuffle_run.policy_configuration(options) == {
        "execution.checkpointing.unaligned.enabled": "true",
        "execution.checkpointing.aligned-checkpoint-timeout": "70 ms",
        "execution.checkpointing.timeout": "1 min",
    }
    options.policy, options.conf = "unaligned", None
    assert shuffle_run.policy_configuration(options) == {"execution.checkpointing.unaligned.enabled": "true"}
    for policy in ("none", "aligned"):
        options.policy = policy
        assert shuffle_run.policy_configuration(options) == {}


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (backpressure.policies, "none,often", "'often' is not one of none, aligned, unaligned, timeout"),
        (backpressure.sleeps, "0,-1", "-1 is not a number of at least 0"),
        (not_negative, "inf", "inf is not a number of at least 0"),
        (shuffle_run.setting, "key", "'key' is not KEY=VALUE"),
    ],
)
def test_bad_arguments_are_named(parse: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)


def test_position_is_more_recent_only_if_no_source_is_further_back() -> None:
    older = progress.Position({0: 100, 1: 100}, 50)
    assert progress.Position({0: 100, 1: 101}, 50).is_more_recent_than(older)
    assert progress.Position({0: 100, 1: 100}, 51).is_more_recent_than(older)
    assert not older.is_more_recent_than(older)
    assert not progress.Position({0: 99, 1: 200}, 60).is_more_recent_than(older)
    assert not progress.Position({1: 200}, 60).is_more_recent_than(older)
    assert not progress.Position({0: 200, 1: 200}, 49).is_more_recent_than(older)


def test_advances_are_counted_from_the_start_of_the_job() -> None:
    first, second = progress.Position({0: 1}, 0), progress.Position({0: 2}, 1)
    assert progress.advanced([]) == 0
    assert progress.advanced([progress.START, first, first, second]) == 2


POSITIONS = {0: 300, 1: 256, 127: 1}


def rows_of(positions: dict[int, int]) -> list[int]:
    return [
        (place // 256 * 128 + split) * 256 + place % 256 for split, count in positions.items() for place in range(count)
    ]


def drained(rows: list[int], **fields: Any) -> Report:
    digest = int(numbers.digest(read_only(np.array(rows, dtype=np.int64))))
    return Report({0: {"rows": len(rows), "digest": f"{digest:016x}", "finished": True, **fields}})


def test_rows_that_came_once_are_right() -> None:
    rows = rows_of(POSITIONS)
    assert shuffle_run.faults(POSITIONS, len(rows), drained(rows[::-1])) == []
    assert expected.digest({}) == 0


def test_lost_repeated_and_swapped_rows_are_faults() -> None:
    rows = rows_of(POSITIONS)
    swapped = [*rows[:-1], rows[0]]
    assert [fault.partition(":")[0] for fault in shuffle_run.faults(POSITIONS, len(rows), drained(swapped))] == [
        "digest of the rows"
    ]
    lost = shuffle_run.faults(POSITIONS, len(rows) - 1, drained(rows[1:], finished=False))
    assert [fault.partition(":")[0] for fault in lost] == [
        "rows at the sink",
        "rows in the state",
        "digest of the rows",
        "unfinished subtasks of the sink",
    ]


def through(payload: int, rows: list[int]) -> pa.RecordBatch:
    """Whole rows behind both maps."""
    batches = topology.WithPayload(payload)(iter([pa.record_batch({"row": pa.array(rows, pa.int64())})]))
    (batch,) = topology.plus_one(topology.plus_one(batches))
    return batch


@pytest.mark.parametrize("payload", [0, 5, 8, 100])
def test_the_measuring_map_gives_back_the_row_numbers(payload: int) -> None:
    batch = through(payload, list(range(1000)))
    assert batch.num_columns == 3
    assert {len(value) for value in batch.column("payload").to_pylist()} == {payload}
    (measured,) = topology.measure(iter([batch.slice(10, 20)]))
    assert measured.column("row").to_pylist() == list(range(10, 30))


def test_the_measuring_map_refuses_payloads_of_other_rows() -> None:
    batch = through(100, [1, 2, 3])
    swapped = batch.set_column(0, "row", pa.array([3, 5, 4], pa.int64()))
    with pytest.raises(ValueError, match="payloads do not belong to their rows"):
        list(topology.measure(iter([swapped])))


def test_the_sleepy_map_ends_sleeping_when_it_has_to_hurry(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    sleepy = topology.Sleepy(3_600_000.0, str(hurry))
    hurry.touch()
    batch = through(0, [1, 2])
    assert [given.num_rows for given in sleepy(iter([batch, batch]))] == [2, 2]


def test_peers_of_backpressure_do_the_same_work() -> None:
    options = argparse.Namespace(
        what="backpressure", policies=("aligned", "timeout"), sleeps=(0.1,), seconds=8.0, interval_ms=500
    )
    options.java_rows = options.python_rows = 1
    options.conf = ["taskmanager.network.buffer.max-rows=256"]
    aligned, timeout = peers.contests(options)
    assert aligned.flink[:5] == ("b2/run.sh", "--mode", "aligned", "--sleep-ms", "0.1")
    assert timeout.flink[:5] == ("b2/run.sh", "--mode", "unaligned", "--aligned-timeout", "100ms")
    assert timeout.flink[timeout.flink.index("--interval") + 1] == "500ms"
    assert timeout.ours[:3] == ("backpressure", "--policy", "timeout")
    assert timeout.ours[-2:] == ("--conf", "taskmanager.network.buffer.max-rows=256")
    assert peers.rate_of({"rec_s": 5, "e2e_ms_median": 7}) == 5
    assert peers.duration_of({"rec_s": 5, "e2e_ms_median": 7}) == 7
    assert peers.duration_of({"rows_per_s": 5, "checkpoint_ms_p50": 9, "censored": True}) is None
    with pytest.raises(BenchmarkError, match="no rate in"):
        peers.rate_of({"rec_s": 0})


def test_peers_of_keyed_count_have_the_same_keys_and_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[peers.Contest] = []
    monkeypatch.setattr(peers, "compare", lambda contest, _: asked.append(contest))
    base = ["peers", "--flink-dir", "f", "--backend", "rocksdb", "--keys", "7", "--key", "string"]
    monkeypatch.setattr(sys, "argv", [*base, "--cached-keys", "4", "--what", "keyed_count"])
    peers.main()
    (contest,) = asked
    assert contest.ours[-8:] == ("--keys", "7", "--key", "string", "--backend", "rocksdb", "--cached-keys", "4")
    assert contest.flink[-6:] == ("--keys", "7", "--key", "string", "--backend", "rocksdb")
    monkeypatch.setattr(sys, "argv", base)
    with pytest.raises(SystemExit):
        peers.main()


@pytest.mark.parametrize("form", expected.KEY_FORMS)
def test_keys_of_every_form_are_found_in_the_state(form: str) -> None:
    keys = np.array([4, 0, 2])
    found: Any = keys if form == "int" else expected.scattered(keys)
    if form == "string":
        found = np.array([f"{key:016x}" for key in found.view(np.uint64).tolist()])
    savepoint = object.__new__(expected.Savepoint)
    batch = pa.record_batch([pa.array(found), pa.array([1, 2, 3]), pa.array([5, 6, 7])], ["key", "count", "sum"])
    savepoint._batches = lambda uid: iter([batch])  # type: ignore[method-assign]
    totals = savepoint.totals("state", 5, form)
    assert (totals.counts.tolist(), totals.sums.tolist()) == ([2, 0, 3, 0, 1], [6, 0, 7, 0, 5])
    with pytest.raises(KeyError if form != "int" else IndexError):
        savepoint.totals("state", 4, form)


@pytest.mark.long
def test_a_chart_of_one_run_needs_all() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.backpressure", "--plot", "somewhere"],
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": "runtime:."},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--plot needs --all" in done.stderr
