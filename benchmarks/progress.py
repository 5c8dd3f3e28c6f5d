"""Rows that count in the end, of FLIP-76's topology under back-pressure and with a worker killed again and again.

``--fail-every-s`` after all subtasks run, first and after each recovery, a worker is killed. A row counts once a
completed checkpoint covers its output: rows that a failure after the last checkpoint would undo do not count.
``positions_advanced`` says how many recoveries started from a more recent position than the one before: no split of the
source further back, and more rows out of the source or at the sink.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from benchmarks.expected import Savepoint
from benchmarks.harness import BenchmarkJob, BenchmarkSession, emit, parser_for, progress, run_main, session
from benchmarks.shuffle_run import PIPELINE, POLICIES, add_topology_options, drain_and_check, policy_configuration

NAME = "progress"
SLEEP_MS = 0.1
RECOVERY_TIMEOUT_S = 120.0
RESTARTS = {
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1000000",
    "restart-strategy.fixed-delay.delay": "0 ms",
    # The checkpoints that recoveries start from are read afterwards.
    "execution.checkpointing.num-retained": "10000",
}


@dataclass(frozen=True)
class Position:
    """The position of a checkpoint: rows that each of the source's splits has emitted, and rows at the sink."""

    emitted: dict[int, int]
    arrived: int

    @classmethod
    def of(cls, url: str) -> Position:
        checkpoint = Savepoint(url)
        return cls(checkpoint.positions("source"), checkpoint.rows("verify-sink"))

    def is_more_recent_than(self, other: Position) -> bool:
        """Whether no position has decreased and one has advanced."""
        if self.arrived < other.arrived:
            return False
        if any(self.emitted.get(split, 0) < rows for split, rows in other.emitted.items()):
            return False
        return self.arrived > other.arrived or sum(self.emitted.values()) > sum(other.emitted.values())


START = Position({}, 0)


def advanced(positions: Sequence[Position]) -> int:
    """How many positions are more recent than the one before, the first one than the start of the job."""
    return sum(later.is_more_recent_than(earlier) for earlier, later in pairwise((START, *positions)))


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    add_topology_options(parser, POLICIES[1:], SLEEP_MS)
    parser.add_argument("--fail-every-s", type=float, default=5.0, help="time from running to the next kill")
    parser.add_argument("--minutes", type=float, default=2.0, help="length of the measured window")
    options = parser.parse_args()
    with session(options.parallelism) as running:
        measures = measure(running, options)
        peak_rss_mb = running.peak_rss_mb
    emit(NAME, options, measures, peak_rss_mb)


def measure(running: BenchmarkSession, options: argparse.Namespace) -> dict[str, Any]:
    """One checked run. Raises BenchmarkError when rows were lost or repeated."""
    configuration = {
        **RESTARTS,
        "execution.checkpointing.interval": f"{options.interval_ms} ms",
        **policy_configuration(options),
    }
    job = running.run(PIPELINE, [options.sleep_ms, options.payload], options.parallelism, configuration)
    job.wait_for_rows()
    job.wait_for_spares()
    started, before = time.monotonic(), _latest(job)
    completed = job.checkpoint_statistics().counts.completed
    restored: list[Position] = []
    end = started + options.minutes * 60
    failure_at = started + options.fail_every_s
    while failure_at < end:
        job.let_run(max(0.0, failure_at - time.monotonic()))
        restored.append(_fail(job))
        progress(f"  recovery {len(restored)}: {restored[-1].arrived:,} rows stand")
        failure_at = time.monotonic() + options.fail_every_s
    job.let_run(max(0.0, end - time.monotonic()))
    minutes = (time.monotonic() - started) / 60
    completed = job.checkpoint_statistics().counts.completed - completed
    useful = _latest(job).arrived - before.arrived
    progress(f"  {useful:,} rows in {minutes:.2f} minutes; draining and checking")
    drain_and_check(job)
    return {
        "useful_rows_per_min": round(useful / minutes),
        "recoveries": len(restored),
        "completed_checkpoints": completed,
        "positions_advanced": f"{advanced(restored)} of {len(restored)}",
    }


def _latest(job: BenchmarkJob) -> Position:
    """The position of the last completed checkpoint."""
    latest = job.checkpoint_statistics().latest_completed
    return START if latest is None or latest.external_path is None else Position.of(latest.external_path)


def _fail(job: BenchmarkJob) -> Position:
    """Kills a worker and waits until all subtasks run again; the position from which they do."""
    restarts = job.metric("numRestarts")
    victim = job.active_worker()
    time.sleep(random.uniform(0.0, 0.5))  # anywhere between two checkpoints
    victim.kill()

    def recovered() -> bool:
        return job.metric("numRestarts") > restarts and job.all_running()

    killed = time.monotonic()
    job.wait_for("the recovery", recovered, RECOVERY_TIMEOUT_S)
    progress(f"  all subtasks run again after {time.monotonic() - killed:.1f} s")
    found = job.checkpoint_statistics().latest_restored
    return START if found is None or found.external_path is None else Position.of(found.external_path)


if __name__ == "__main__":
    run_main(main)
