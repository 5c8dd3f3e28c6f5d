"""What follows the end of the data: seconds until FINISHED, with and without checkpoints after tasks finish.

A bounded source writes to a sink behind a shuffle, exactly once with a checkpoint per interval. With FLIP-147 the
source's subtasks end with their data, and the sink's last checkpoint is taken without them; without, all subtasks wait
for each other. A third run, in mode ``AT_LEAST_ONCE``, gives the rate to compare with. The sides run in turns. A rate
is from the first RUNNING to FINISHED, the last commit included. The data ends when the last batch of rows has left the
source. Afterwards the target is read by another library: it has to hold each row once.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import PIPELINES, measure_here, parser_for, positive_int, progress, run_main
from benchmarks.sink import Target, target_of
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster

NAME = "end_of_data"
ROWS = {"parquet": 6_000_000, "postgresql": 300_000}
SIDES = {
    "with": {},
    "without": {CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH.key: "false"},
    "at_least_once": {CheckpointingOptions.MODE.key: "AT_LEAST_ONCE"},
}
"""The options by which the sides differ."""


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--sink", choices=(*ROWS, "postgres"), default="parquet", help="postgres is postgresql")
    parser.add_argument("--rows", type=positive_int, help="rows of one run; the default differs by sink")
    parser.add_argument("--rounds", type=positive_int, default=3, help="runs of each side")
    parser.add_argument("--interval-ms", type=positive_int, default=1000, help="checkpoint interval")
    parser.add_argument("--parallelism", type=positive_int, default=2, help="subtasks of each vertex")
    options = parser.parse_args()
    options.sink = options.sink.replace("postgresql", "postgres").replace("postgres", "postgresql")
    options.rows = options.rows or ROWS[options.sink]
    measure_here(NAME, options, _measured)


def _measured(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All sides in turns, after one run that warms up."""
    tails: dict[str, list[float]] = {side: [] for side in SIDES}
    rates: dict[str, list[float]] = {side: [] for side in SIDES}
    with target_of(options.sink, directory) as target, MiniCluster() as cluster:
        _run(cluster, target, options, directory, SIDES["with"])
        for number in range(options.rounds):
            for side in list(SIDES)[:: 1 if number % 2 else -1]:
                took, tail = _run(cluster, target, options, directory, SIDES[side])
                tails[side].append(tail)
                rates[side].append(options.rows / took)
                progress(f"{side}: {tail:.3f} s from the end of the data, {rates[side][-1]:,.0f} rows/s")
    return {
        "tail_s_with": round(median(tails["with"]), 3),
        "tail_s_without": round(median(tails["without"]), 3),
        "exactly_once_rows_per_s": round(median(rates["with"])),
        "at_least_once_rows_per_s": round(median(rates["at_least_once"])),
    }


def _run(
    cluster: MiniCluster, target: Target, options: argparse.Namespace, directory: Path, side: dict[str, str]
) -> tuple[float, float]:
    """The seconds of a job from RUNNING, and from the end of its data, to FINISHED. Raises BenchmarkError."""
    given, end = target.new(), directory / "end"
    job = cluster.submit(
        PIPELINES / "sink.py",
        entry="sink:ending",
        arguments=[options.sink, target.place, json.dumps(given), str(options.rows), str(end)],
        configuration={
            CheckpointingOptions.INTERVAL.key: f"{options.interval_ms} ms",
            CheckpointingOptions.CHECKPOINTS_DIRECTORY.key: f"{directory}/checkpoints",
            "restart-strategy.type": "none",
            **side,
        },
        parallelism=options.parallelism,
    )
    cluster.wait_for_status(job, JobStatus.FINISHED, timeout_s=900)
    target.check(options.rows)
    times = cluster.of_job(job, lambda ended: ended.details()).state_timestamps_ms
    finished_s = times[JobStatus.FINISHED] / 1000
    return finished_s - times[JobStatus.RUNNING] / 1000, finished_s - end.stat().st_mtime


if __name__ == "__main__":
    run_main(main)
