"""The cost of FLIP-571's PATCH: the time until the coordinator uses new values, and the rows that the job loses by it.

Windows with a PATCH every 200 ms alternate with windows without, in the order ABBA so that a drift of the machine hits
both alike. High availability is on: a PATCH is answered when it is stored. Each PATCH is followed by a GET of the
effective configuration, and the windows without PATCH send the same GETs: the difference is the PATCH alone.

The rates of windows scatter by far more than a PATCH costs. ``driver_cpu_percent`` does not: how much more of all
processors the driver uses while it is patched, which is what the job loses when it could use all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import BenchmarkError, BenchmarkJob, emit, parser_for, percentile, progress, run_main, session
from benchmarks.keyed_run import WARM_UP_S, check
from benchmarks.process_tree import driver_cpu_s
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.contract.configuration import CheckpointConfigPatch

NAME = "patch"
PIPELINE = "keyed_count"
KEYS = 100_000
PARALLELISM = 2
INTERVAL_MS = 1000
TIMEOUT_MS = 600_000
PATCH_EVERY_S = 0.2
WINDOW_S = 1.0
MIN_WINDOWS = 4
ORDER = (False, True, True, False)
"""Which windows of a round patch."""


@dataclass
class Measured:
    """One figure a window: ``patched`` and ``quiet`` rows per second, ``cpu_s`` processors that the driver used."""

    effective_ms: list[float] = field(default_factory=list)
    patched: list[float] = field(default_factory=list)
    quiet: list[float] = field(default_factory=list)
    cpu_s: dict[bool, list[float]] = field(default_factory=lambda: {True: [], False: []})
    peak_rss_mb: int = 0

    @property
    def dip_percent(self) -> float:
        """Of the mean rate; below 0 when the windows with PATCH were the faster ones."""
        return 100 * (1 - statistics.fmean(self.patched) / statistics.fmean(self.quiet))

    @property
    def dip_error_percent(self) -> float:
        """The standard error of the dip, from the scatter of the windows."""
        errors = (statistics.variance(rates) / len(rates) for rates in (self.patched, self.quiet))
        return float(100 * sum(errors) ** 0.5 / statistics.fmean(self.quiet))

    @property
    def driver_cpu_percent(self) -> float:
        """More of all processors, with PATCH than without."""
        more = statistics.fmean(self.cpu_s[True]) - statistics.fmean(self.cpu_s[False])
        return 100 * more / (os.cpu_count() or 1)


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of all windows together")
    options = parser.parse_args()
    measured = measure(options)
    measures = {
        "effective_ms_p50": percentile(measured.effective_ms, 0.5),
        "effective_ms_p95": percentile(measured.effective_ms, 0.95),
        "dip_percent": round(measured.dip_percent, 2),
        "dip_error_percent": round(measured.dip_error_percent, 2),
        "driver_cpu_percent": round(measured.driver_cpu_percent, 2),
        "patches": len(measured.effective_ms),
        "rows_per_s_quiet": round(statistics.fmean(measured.quiet)),
    }
    emit(NAME, options, measures, measured.peak_rss_mb)


def measure(options: argparse.Namespace) -> Measured:
    """Raises BenchmarkError when a PATCH does not hold or the job's result is wrong."""
    configuration = {
        "execution.checkpointing.interval": f"{INTERVAL_MS} ms",
        "execution.checkpointing.timeout": f"{TIMEOUT_MS} ms",
        "restart-strategy.type": "none",
    }
    measured = Measured()
    with tempfile.TemporaryDirectory(prefix="ckpt-benchmark-ha-") as directory:
        durable = {"high-availability.type": "filesystem", "high-availability.storageDir": str(Path(directory))}
        with session(PARALLELISM, durable) as running:
            job = running.run(PIPELINE, [KEYS], PARALLELISM, configuration)
            progress("running; warming up")
            job.wait_for_rows()
            job.wait_for_spares()
            job.let_run(min(WARM_UP_S, options.seconds))
            windows = max(MIN_WINDOWS, round(options.seconds / WINDOW_S))
            for number in range(windows + windows % 2):
                _window(running.client, job, running.info.pid, measured, patching=ORDER[number % len(ORDER)])
            progress("draining and checking")
            check(job, job.drain(), KEYS)
            measured.peak_rss_mb = running.peak_rss_mb
    return measured


def _window(client: CkptClient, job: BenchmarkJob, session_pid: int, measured: Measured, *, patching: bool) -> None:
    before = job.report()
    begin, cpu_before = time.monotonic(), driver_cpu_s(session_pid)
    for number in range(round(WINDOW_S / PATCH_EVERY_S)):
        time.sleep(max(0.0, begin + number * PATCH_EVERY_S - time.monotonic()))
        if patching:
            measured.effective_ms.append(_patch(client, job.id, len(measured.effective_ms)))
        else:
            client.checkpoint_config(job.id)
    time.sleep(max(0.0, begin + WINDOW_S - time.monotonic()))
    measured.cpu_s[patching].append((driver_cpu_s(session_pid) - cpu_before) / (time.monotonic() - begin))
    job.check_alive()
    rate = job.report().rows_per_s_since(before)
    (measured.patched if patching else measured.quiet).append(rate)
    progress(f"  {'with' if patching else 'without'} PATCH: {rate:,.0f} rows/s")


def _patch(client: CkptClient, job_id: str, number: int) -> float:
    """Milliseconds from sending the PATCH to the answer of a GET that shows its values.

    The interval changes by too little to change the number of checkpoints.
    """
    wanted = (INTERVAL_MS + number % 2, TIMEOUT_MS + 1 + number)
    begin = time.perf_counter()
    client.patch_checkpoint_config(job_id, CheckpointConfigPatch(interval_ms=wanted[0], timeout_ms=wanted[1]))
    shown = client.checkpoint_config(job_id)
    elapsed_ms = (time.perf_counter() - begin) * 1000
    if (shown.interval_ms, shown.timeout_ms) != wanted:
        raise BenchmarkError(f"after a PATCH of {wanted} the configuration is {shown.interval_ms}, {shown.timeout_ms}")
    return round(elapsed_ms, 3)


if __name__ == "__main__":
    run_main(main)
