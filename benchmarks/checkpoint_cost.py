"""The cost of checkpoints in throughput: one job of keyed_count whose interval is patched from window to window.

Windows with checkpoints every ``--interval-ms`` and windows without any take turns in one run, since a machine's speed
changes more from minute to minute than a checkpoint costs. ``cost_percent`` is the median over pairs of neighbours.
"""

from __future__ import annotations

import argparse
import statistics

from benchmarks import harness
from benchmarks.keyed_run import WARM_UP_S, check

NAME = "checkpoint_cost"
NEVER_MS = 86_400_000


def main() -> None:
    """The command line."""
    parser = harness.parser_for(NAME, __doc__ or "")
    harness.add_keyed_options(parser, seconds=80.0)
    parser.add_argument("--window-s", type=float, default=4.0, help="length of one window")
    options = parser.parse_args()
    configuration = {
        **harness.backend_configuration(options.backend),
        "execution.checkpointing.interval": f"{options.interval_ms} ms",
        "restart-strategy.type": "none",
    }
    with harness.session(options.parallelism) as running:
        job = running.run("keyed_count", [options.keys], options.parallelism, configuration)
        job.wait_for_rows()
        job.wait_for_spares()
        job.let_run(WARM_UP_S)
        pairs = _pairs(job, options)
        completed = len(job.completed_checkpoints())
        check(job, job.drain(), options.keys)
        peak_rss_mb = running.peak_rss_mb
    costs = [100 * (1 - with_checkpoints / without) for with_checkpoints, without in pairs]
    measures = {
        "rows_per_s_with": round(statistics.median(pair[0] for pair in pairs)),
        "rows_per_s_without": round(statistics.median(pair[1] for pair in pairs)),
        "cost_percent": round(statistics.median(costs), 2),
        "pairs": len(pairs),
        "checkpoints": completed,
    }
    harness.emit(NAME, options, measures, peak_rss_mb)


def _pairs(job: harness.BenchmarkJob, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Rows per second with and without checkpoints, in alternating windows; the order turns from pair to pair."""
    pairs = []
    for number in range(int(options.seconds / (2 * options.window_s))):
        rates: dict[bool, float] = {}
        for with_checkpoints in (True, False) if number % 2 else (False, True):
            job.patch_interval(options.interval_ms if with_checkpoints else NEVER_MS)
            before = job.report()
            job.let_run(options.window_s)
            rates[with_checkpoints] = job.report().rows_per_s_since(before)
        pairs.append((rates[True], rates[False]))
        harness.progress(f"pair {number + 1}: {rates[True]:,.0f} rows/s with, {rates[False]:,.0f} without checkpoints")
    if not pairs:
        raise harness.BenchmarkError("--seconds must be at least twice --window-s")
    return pairs


if __name__ == "__main__":
    harness.run_main(main)
