"""Rows per second and checkpoint durations of FLIP-76's topology while a slow map presses back.

``--all`` measures every policy at every sleep in one session and prints a table on stderr; with ``--plot DIR`` it also
writes the table, the figures as JSON, and two charts. Checkpoints that were triggered in the window and are not
complete ``--wait-s`` after it count with their age: ``censored`` is true then, and the durations are lower bounds.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.backpressure_plot import table, write_charts, write_table
from benchmarks.shuffle_run import PIPELINE, POLICIES, add_topology_options, drain_and_check, policy_configuration
from ckpt_runtime.client.errors import CkptClientError
from ckpt_runtime.contract.checkpoints import Checkpoint
from ckpt_runtime.contract.jobs import IoMetrics

NAME = "backpressure"
SLEEPS_MS = (0.0, 0.01, 0.1, 1.0)
WARM_UP_S = 5.0
OFF_MS = 3_600_000
"""The interval outside the window: no checkpoint falls into it, but periodic ones are on and can be hastened."""


def main() -> None:
    """The command line."""
    parser = harness.parser_for(NAME, __doc__ or "")
    add_topology_options(parser, POLICIES, SLEEPS_MS[0])
    parser.add_argument("--seconds", type=float, default=10.0, help="length of the measured window")
    parser.add_argument("--wait-s", type=harness.not_negative, default=30.0, help="wait for checkpoints of the window")
    parser.add_argument("--all", action="store_true", help="all --policies at all --sleeps")
    parser.add_argument("--policies", type=policies, default=POLICIES, help="of --all, separated by commas")
    parser.add_argument("--sleeps", type=sleeps, default=SLEEPS_MS, help="of --all, ms, separated by commas")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="of --all: where to write table, JSON and charts")
    options = parser.parse_args()
    if options.plot and not options.all:
        parser.error("--plot needs --all")
    if options.all:
        _measure_all(options)
        return
    with harness.session(options.parallelism) as running:
        measures = measure(running, options)
    harness.emit(NAME, _without(options, _OF_ALL), measures, measures.pop("peak_rss_mb"))


def policies(text: str) -> tuple[str, ...]:
    """An argument that lists policies."""
    chosen = tuple(text.split(","))
    unknown = [policy for policy in chosen if policy not in POLICIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(POLICIES)}")
    return chosen


def sleeps(text: str) -> tuple[float, ...]:
    """An argument that lists sleeps in ms."""
    return tuple(harness.not_negative(part) for part in text.split(","))


def _measure_all(options: argparse.Namespace) -> None:
    """Emits all runs, those that failed with their ``error``; raises BenchmarkError at the end when one did."""
    runs = measure_cells([(policy, sleep) for sleep in options.sleeps for policy in options.policies], options)
    harness.progress(table(runs))
    if options.plot:
        write_table(options.plot, runs)
        write_charts(options.plot, runs)
    harness.emit(
        NAME,
        _without(options, _OF_ONE_RUN),
        {"runs": runs},
        max((run.get("peak_rss_mb", 0) for run in runs), default=0),
    )
    failed = [f"{run['policy']} at {run['sleep_ms']:g} ms: {run['error']}" for run in runs if "error" in run]
    if failed:
        raise harness.BenchmarkError("; ".join(failed))


_OF_ALL = ("all", "policies", "sleeps", "plot")
_OF_ONE_RUN = ("policy", "sleep_ms", "plot")


def _without(options: argparse.Namespace, names: Sequence[str]) -> argparse.Namespace:
    return argparse.Namespace(**{name: value for name, value in vars(options).items() if name not in names})


def measure_cells(cells: Sequence[tuple[str, float]], options: argparse.Namespace) -> list[dict[str, Any]]:
    """One run for each policy and sleep, in one session; after a failed run the next ones get a new one."""
    left = deque(cells)
    runs: list[dict[str, Any]] = []
    while left:
        try:
            with harness.session(options.parallelism) as running:
                while left:
                    policy, sleep_ms = left.popleft()
                    harness.progress(f"policy {policy}, sleep {sleep_ms:g} ms")
                    run = {"policy": policy, "sleep_ms": sleep_ms}
                    runs.append(run)
                    cell = argparse.Namespace(**{**vars(options), **run})
                    run |= measure(running, cell)
                    if options.plot:
                        write_table(options.plot, runs)  # what there is, should a later run be interrupted
        except (harness.BenchmarkError, CkptClientError, OSError) as error:
            if not runs or runs[-1].keys() & {"rows_per_s", "error"}:
                raise  # of the session, not of a run
            runs[-1]["error"] = str(error).strip().splitlines()[0]
            harness.progress(f"failed: {error}")
    return runs


@dataclass
class Window:
    """The observations of a job between two moments."""

    before: harness.Report
    after: harness.Report
    started_ms: int
    ended_ms: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    queued_bytes_max: int = 0

    def measures(self) -> dict[str, Any]:
        """The keys of the JSON line. Checkpoints are those triggered in the window; failed ones do not count."""
        completed = [checkpoint for checkpoint in self.checkpoints if checkpoint.status == "COMPLETED"]
        pending = [checkpoint for checkpoint in self.checkpoints if checkpoint.status == "IN_PROGRESS"]
        durations = [checkpoint.duration_ms for checkpoint in completed]
        durations += [self.ended_ms - checkpoint.triggered_at_ms for checkpoint in pending]
        return {
            "rows_per_s": round(self.after.rows_per_s_since(self.before, idle_allowed=True)),
            "checkpoints": len(completed),
            "checkpoint_ms_p50": harness.percentile(durations, 0.5),
            "checkpoint_ms_p95": harness.percentile(durations, 0.95),
            "checkpoint_ms_max": max(durations, default=None),
            "censored": bool(pending),
            "checkpointed_bytes_p50": harness.percentile([c.checkpointed_size for c in completed], 0.5),
            "persisted_inflight_bytes_p50": harness.percentile([c.persisted_data for c in completed], 0.5),
            "queued_bytes_max": self.queued_bytes_max,
        }


def measure(running: harness.BenchmarkSession, options: argparse.Namespace) -> dict[str, Any]:
    """One checked run; its figures with ``peak_rss_mb``. Raises BenchmarkError when rows were lost or repeated."""
    configuration = {"restart-strategy.type": "none", **policy_configuration(options)}
    if options.policy != "none":
        configuration["execution.checkpointing.interval"] = f"{OFF_MS} ms"
    with running.peak_memory() as memory:
        job = running.run(PIPELINE, [options.sleep_ms, options.payload], options.parallelism, configuration)
        harness.progress("  running; warming up")
        job.wait_for_rows()
        job.wait_for_spares()
        job.let_run(min(WARM_UP_S, options.seconds))
        measures = watch(job, options).measures()
        if not measures["rows_per_s"]:
            raise harness.BenchmarkError("no rows came during the measured window")
        harness.progress(
            f"  {measures['rows_per_s']:,} rows/s, {measures['checkpoints']} checkpoints; draining and checking"
        )
        drain_and_check(job)
    return {**measures, "peak_rss_mb": round(memory.peak_mb)}


def watch(job: harness.BenchmarkJob, options: argparse.Namespace) -> Window:
    """The measured window, and the wait for the checkpoints that were triggered in it."""
    report = job.report()
    window = Window(report, report, _now_ms())
    if options.policy != "none":
        job.patch_interval(options.interval_ms)

    def sample() -> None:
        window.queued_bytes_max = max(window.queued_bytes_max, queued_bytes(job.io_metrics()))

    job.let_run(options.seconds, sample)
    window.after = job.report()
    window.ended_ms = _now_ms()
    if options.policy == "none":
        return window
    job.patch_interval(OFF_MS)
    limit = time.monotonic() + options.wait_s
    while True:
        history = job.checkpoint_statistics().history
        window.checkpoints = [
            found for found in history if found.triggered_at_ms >= window.started_ms and not found.is_savepoint
        ]
        window.ended_ms = _now_ms()
        if not any(c.status == "IN_PROGRESS" for c in window.checkpoints) or time.monotonic() >= limit:
            break
        time.sleep(0.2)
        job.check_alive()
    if not window.checkpoints:
        raise harness.BenchmarkError(f"no checkpoint was triggered in {options.seconds:g} s")
    return window


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def queued_bytes(vertices: Sequence[IoMetrics]) -> int:
    """Rows between the vertices of one chain of them, in bytes: what each has written and the next has not read.

    Each worker reports all its vertices at once, but workers report at different moments of a second: a moment's
    figure may be off by what their rates differ in that time.
    """
    total = 0.0
    for writer, reader in pairwise(vertices):
        if writer.write_records:
            rows = max(0, writer.write_records - reader.read_records)
            total += rows * writer.write_bytes / writer.write_records
    return round(total)


if __name__ == "__main__":
    harness.run_main(main)
