"""One measured run of a keyed pipeline, with the check of its result. Used by keyed_count, keyed_process and patch."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from benchmarks import expected
from benchmarks.harness import BenchmarkError, BenchmarkJob, backend_configuration, progress, session
from ckpt_runtime.contract.checkpoints import Checkpoint

WARM_UP_S = 5.0


@dataclass
class KeyedRun:
    """The measures of one run; ``checkpoints`` are those triggered and completed in the window."""

    rows_per_s: float
    peak_rss_mb: int = 0
    checkpoints: list[Checkpoint] = field(default_factory=list)
    sync_ms: list[float] = field(default_factory=list)


def measure(pipeline: str, options: argparse.Namespace, more: Mapping[str, str] | None = None) -> KeyedRun:
    """Starts a session and the pipeline, warms up, measures, drains and checks. Raises BenchmarkError.

    ``more`` are options of the job.
    """
    interval = options.interval_ms
    configuration = {"execution.checkpointing.interval": f"{interval} ms"} if interval else {}
    configuration |= {"restart-strategy.type": "none", **backend_configuration(options.backend), **(more or {})}
    with session(options.parallelism) as running:
        form = getattr(options, "key", "int")
        arguments = [options.keys] if form == "int" else [options.keys, form]
        job = running.run(pipeline, arguments, options.parallelism, configuration)
        progress("running; warming up")
        job.wait_for_rows()
        job.wait_for_spares()
        job.let_run(min(WARM_UP_S, options.seconds))
        run = _measured(job, options.seconds)
        progress(f"{run.rows_per_s:,.0f} rows/s; draining and checking")
        check(job, job.drain(), options.keys, form)
        run.peak_rss_mb = running.peak_rss_mb
    return run


def _measured(job: BenchmarkJob, seconds: float) -> KeyedRun:
    before = job.report()
    job.let_run(seconds)
    after = job.report()
    start = max(document["last_ms"] for document in before.subtasks.values())
    end = max(document["last_ms"] for document in after.subtasks.values())
    inside = [
        checkpoint
        for checkpoint in job.completed_checkpoints()
        if start <= checkpoint.triggered_at_ms and checkpoint.triggered_at_ms + checkpoint.duration_ms <= end
    ]
    sync = [time for checkpoint in inside for time in job.sync_times_ms(checkpoint)]
    return KeyedRun(after.rows_per_s_since(before), checkpoints=inside, sync_ms=sync)


def check(job: BenchmarkJob, savepoint_url: str, keys: int, form: str = "int") -> None:
    """The sink received every row once, and the state equals the generator's definition. Raises BenchmarkError."""
    report = job.report()
    savepoint = expected.Savepoint(savepoint_url)
    positions = savepoint.positions("source")
    state = savepoint.totals("state", keys, form)
    wanted = expected.computed(positions, keys)
    rows = sum(positions.values())
    facts = {
        "rows at the sink": (report.total("rows"), rows),
        "violations of the order of updates": (report.total("violations"), 0),
        "keys at the sink": (report.total("keys"), int(np.count_nonzero(wanted.counts))),
        "sum of the last counts": (report.total("count_total"), rows),
        "sum of the last sums": (report.total("sum_total"), int(wanted.sums.sum())),
        "rows in the state": (state.rows, rows),
        "keys with a wrong count or sum": (
            int(np.count_nonzero((state.counts != wanted.counts) | (state.sums != wanted.sums))),
            0,
        ),
    }
    wrong = [f"{what}: {found}, expected {right}" for what, (found, right) in facts.items() if found != right]
    if wrong:
        raise BenchmarkError("; ".join(wrong))
    progress(f"checked {rows:,} rows: every count and sum is right")
