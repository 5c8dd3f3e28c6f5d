"""Seconds from ``kill -9`` of a worker or of a slot agent to the first row out of the restarted job.

The job is paced and its state small: it measures the detection of the loss, the deployment and the restore. A process
is killed when the job has completed a checkpoint since the last one and every slot has its warm spare again.
"""

from __future__ import annotations

import argparse
import random
import time

from benchmarks import harness
from benchmarks.process_tree import agent_of

NAME = "recovery"
KEYS = 1_000
ROWS_PER_S = 20_000
PARALLELISM = 2
SETTLE_TIMEOUT_S = 120.0
CONFIGURATION = {
    "execution.checkpointing.interval": "500 ms",
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1000000",
    "restart-strategy.fixed-delay.delay": "0 ms",
}


def main() -> None:
    """The command line."""
    parser = harness.parser_for(NAME, __doc__ or "")
    parser.add_argument("--kills", type=harness.positive_int, default=10, help="number of kills")
    parser.add_argument("--what", choices=("worker", "agent"), default="worker", help="which process is killed")
    options = parser.parse_args()
    times, peak_rss_mb = measure(options)
    measures = {f"{options.what}_s_p50": harness.percentile(times, 0.5), f"{options.what}_s_max": max(times)}
    harness.emit(NAME, options, measures, peak_rss_mb)


def measure(options: argparse.Namespace) -> tuple[list[float], int]:
    """The times of all kills, and the peak memory. Raises BenchmarkError when rows were lost or repeated."""
    times = []
    with harness.session(PARALLELISM) as running:
        job = running.run(NAME, [KEYS, ROWS_PER_S], PARALLELISM, CONFIGURATION)
        job.wait_for_rows()
        for number in range(options.kills):
            _settle(job)
            times.append(_kill(job, options.what))
            harness.progress(f"  kill {number + 1} of {options.what}: {times[-1]:.3f} s")
        _settle(job)
        job.drain()
        report = job.report()
        rows, counted = report.total("rows"), report.total("count_total")
        if rows != counted or report.total("violations"):
            raise harness.BenchmarkError(
                f"{rows} rows at the sink, {counted} counted, {report.total('violations')} violations"
            )
        return times, running.peak_rss_mb


def _settle(job: harness.BenchmarkJob) -> None:
    """Waits for the next completed checkpoint and for an idle spare in every slot."""
    known = len(job.completed_checkpoints())
    job.wait_for("a completed checkpoint", lambda: len(job.completed_checkpoints()) > known, SETTLE_TIMEOUT_S)
    job.wait_for_spares(SETTLE_TIMEOUT_S)


def _kill(job: harness.BenchmarkJob, what: str) -> float:
    """Seconds until every subtask of the sink has got rows again."""
    before = {index: document["attempt"] for index, document in job.report().subtasks.items()}
    victim = job.active_worker()
    if what == "agent":
        victim = agent_of(victim) or victim
    time.sleep(random.uniform(0.0, 0.5))  # anywhere between two checkpoints
    killed_ms = time.time_ns() / 1e6
    victim.kill()

    def restarted() -> bool:
        subtasks = job.report().subtasks
        return all(subtasks[index]["attempt"] > attempt for index, attempt in before.items())

    job.wait_for("rows after the kill", restarted, SETTLE_TIMEOUT_S, poll_s=0.02)
    return max(float(d["first_ms"]) - killed_ms for d in job.report().subtasks.values()) / 1000


if __name__ == "__main__":
    harness.run_main(main)
