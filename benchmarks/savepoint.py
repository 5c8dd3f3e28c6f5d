"""What checkpoints and savepoints of large state cost, and what it takes to go on from them.

A job fills its state and then changes it at a pace. Each snapshot is taken when about ``--change`` of the keys have
changed since the last checkpoint: incremental checkpoints, native savepoints, a canonical one. The job is then started
from one of each: the time is that of the slowest subtask's deployment, which reads the state. Every update checks that
the state is what the update before it wrote.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

import psutil  # type: ignore[import-untyped, unused-ignore]

from benchmarks import harness
from benchmarks.process_tree import processes_of
from ckpt_runtime.configuration.state_options import RocksDBOptions
from ckpt_runtime.contract.checkpoints import Checkpoint

NAME = "savepoint"
PARALLELISM = 2
ROUNDS = 5
ROUND_S = 2.0
"""Until enough has changed for the next snapshot; what changes while one is taken is small beside that."""
FILL_S = 10
FILL_TIMEOUT_S = 600.0
NEVER = "1 d"
NEVER_MS = 24 * 3600 * 1000
WINDOWS = 2
"""Of each kind, in turn."""


@dataclass(frozen=True)
class Pace:
    """``rows_per_s`` changes, 0 for as many as there can be; before, a row writes ``spread`` of the ``keys``."""

    keys: int
    rows_per_s: int
    spread: int

    @classmethod
    def of(cls, keys: int, changed: int) -> Pace:
        """To change so many of the keys in :data:`ROUND_S`, and to write all of them in :data:`FILL_S`."""
        rows_per_s = max(1, round(changed / ROUND_S))
        return cls(keys, rows_per_s, max(1, round(keys / (rows_per_s * FILL_S))))


def main() -> None:
    """The command line."""
    parser = harness.parser_for(NAME, __doc__ or "")
    parser.add_argument("--state-mb", type=sizes, default=[1000], help="size of the state; several: one line for each")
    parser.add_argument("--change", type=float, default=0.01, help="share of the keys changed between two snapshots")
    parser.add_argument("--value-bytes", type=harness.positive_int, default=500, help="size of one value")
    parser.add_argument(
        "--window-s", type=float, default=20.0, help="length of each window of throughput: merges come every 20 files"
    )
    parser.add_argument("--copies", action="store_true", help="savepoints copy files, though they could link them")
    harness.add_backend_option(parser, default="rocksdb")
    options = parser.parse_args()
    for state_mb in options.state_mb:
        chosen = argparse.Namespace(**{**vars(options), "state_mb": state_mb})
        with harness.session(PARALLELISM) as running:
            measures = measure(running, chosen)
            peak_rss_mb = running.peak_rss_mb
        harness.emit(NAME, chosen, measures, peak_rss_mb)


def sizes(text: str) -> list[int]:
    """Numbers with commas in between."""
    return [harness.positive_int(part) for part in text.split(",")]


def measure(running: harness.BenchmarkSession, options: argparse.Namespace) -> dict[str, Any]:
    """One state size. Raises BenchmarkError."""
    keys = options.state_mb * 1_000_000 // options.value_bytes
    changed = max(1, round(keys * options.change))
    pace = Pace.of(keys, changed)
    job = start(running, options, pace)
    harness.progress(f"filling {keys:,} keys")
    job.wait_for("the state to be full", lambda: job.report().total("rows") >= keys, FILL_TIMEOUT_S)
    job.checkpoint()
    taken = {
        "incremental": _repeated(job, changed, job.checkpoint),
        "native": _repeated(job, changed, lambda: job.savepoint("NATIVE"), before=job.checkpoint),
        "canonical": _repeated(job, changed, lambda: job.savepoint("CANONICAL"), rounds=1),
    }
    sync_ms = [time for kind in ("incremental", "native") for one in taken[kind] for time in job.sync_times_ms(one)]
    last = {kind: one[-1] for kind, one in taken.items()}
    files = Path(url2pathname(urlparse(last["canonical"].external_path or "").path)).rglob("*")
    return {
        **_costs(taken),
        "canonical_bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "sync_ms_p99": harness.percentile(sync_ms, 0.99),
        **_restores(running, options, pace, job, last),
        **_throughput(running, options, pace, last["native"]),
    }


def start(
    running: harness.BenchmarkSession, options: argparse.Namespace, pace: Pace, snapshot: str | None = None
) -> harness.BenchmarkJob:
    """The job, once all subtasks of its sink have rows; with a ``snapshot`` it continues from there."""
    configuration = {
        **harness.backend_configuration(options.backend),
        "execution.checkpointing.interval": NEVER,
        "execution.checkpointing.incremental": "true",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
        "execution.checkpointing.savepoint-duplication": "COPY" if options.copies else "FASTEST",
        "restart-strategy.type": "none",
    }
    arguments = [pace.keys, options.value_bytes, pace.rows_per_s, pace.spread]
    job = running.run(NAME, arguments, PARALLELISM, configuration, snapshot)
    job.wait_for_rows()
    return job


def _repeated(
    job: harness.BenchmarkJob,
    changed: int,
    take: Callable[[], Checkpoint],
    *,
    before: Callable[[], object] = lambda: None,
    rounds: int = ROUNDS,
) -> list[Checkpoint]:
    """``before`` the changes something may be taken that does not count."""
    taken = []
    for _ in range(rounds):
        before()
        wanted = job.report().total("rows") + changed
        job.wait_for("changes", lambda wanted=wanted: job.report().total("rows") >= wanted, FILL_TIMEOUT_S)  # type: ignore[misc]
        taken.append(take())
        harness.progress(
            f"  {taken[-1].kind.lower()}: {taken[-1].duration_ms} ms, {taken[-1].checkpointed_size:,} bytes"
        )
    return taken


def _costs(taken: Mapping[str, list[Checkpoint]]) -> dict[str, Any]:
    def median(kind: str, field: str) -> float:
        return statistics.median(getattr(one, field) for one in taken[kind])

    return {
        "incremental_s": median("incremental", "duration_ms") / 1000,
        "incremental_bytes": median("incremental", "checkpointed_size"),
        "native_s": median("native", "duration_ms") / 1000,
        "native_bytes_written": median("native", "checkpointed_size"),
        "canonical_s": median("canonical", "duration_ms") / 1000,
    }


def _restores(
    running: harness.BenchmarkSession,
    options: argparse.Namespace,
    pace: Pace,
    job: harness.BenchmarkJob,
    last: Mapping[str, Checkpoint],
) -> dict[str, float]:
    final = job.checkpoint()
    job.cancel()
    found = {}
    for kind, snapshot in (("native", last["native"]), ("canonical", last["canonical"]), ("checkpoint", final)):
        restored = start(running, options, pace, snapshot.external_path)
        found[f"restore_{kind}_s"] = restored.deployment_s()
        harness.progress(f"  went on from {kind} in {found[f'restore_{kind}_s']:.2f} s")
        restored.let_run(1.0)
        check_order(restored)
        restored.cancel()
    return found


def _throughput(
    running: harness.BenchmarkSession, options: argparse.Namespace, pace: Pace, snapshot: Checkpoint
) -> dict[str, float]:
    """As fast as it goes, without checkpoints and with one per second, in turn.

    Without checkpoints changes gather in front of RocksDB until there is no room for more, and cost nothing as long as
    that lasts: the windows come behind it. So RocksDB writes and merges in windows of either kind. What the processor
    does for a row tells more than rates on a busy machine.
    """
    job = start(running, options, replace(pace, rows_per_s=0), snapshot.external_path)
    rates: dict[str, list[float]] = {"none": [], "during": []}
    costs: dict[str, list[float]] = {"none": [], "during": []}
    for kind in ("none", "during") * WINDOWS:
        if kind == "none":
            _end_checkpoints(job, pace)
        else:
            _begin_checkpoints(job)
        before, cpu_s = job.report(), _cpu_s(running)
        job.let_run(options.window_s)
        report, cpu_s = job.report(), _cpu_s(running) - cpu_s
        rates[kind].append(report.rows_per_s_since(before))
        costs[kind].append(cpu_s * 1e6 / (report.total("rows") - before.total("rows")))
        harness.progress(f"  checkpoints: {kind}, {rates[kind][-1]:,.0f} rows/s, {costs[kind][-1]:.1f} us of CPU a row")
    check_order(job)
    job.cancel()
    return {f"rows_per_s_{kind}": round(statistics.mean(rate)) for kind, rate in rates.items()} | {
        f"cpu_us_per_row_{kind}": round(statistics.mean(cost), 1) for kind, cost in costs.items()
    }


def _end_checkpoints(job: harness.BenchmarkJob, pace: Pace) -> None:
    """Returns when the last one has ended, and the cache holds as many changes as it can since."""
    job.patch_interval(NEVER_MS)
    job.wait_for("the last checkpoint to end", lambda: job.checkpoint_statistics().counts.in_progress == 0, 120)
    full = job.report().total("rows") + min(pace.keys, PARALLELISM * RocksDBOptions.CACHE_KEYS.default)
    job.wait_for("changes to fill the cache", lambda: job.report().total("rows") >= full, FILL_TIMEOUT_S)


def _begin_checkpoints(job: harness.BenchmarkJob) -> None:
    """Returns when one comes every second."""
    job.patch_interval(1000)
    least = job.checkpoint_statistics().counts.completed + 1
    job.wait_for("checkpoints", lambda: job.checkpoint_statistics().counts.completed > least, 120)


def _cpu_s(running: harness.BenchmarkSession) -> float:
    """Processor seconds that the processes of the session have used so far."""
    total = 0.0
    for process in processes_of(running.info.pid):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def check_order(job: harness.BenchmarkJob) -> None:
    """Raises BenchmarkError if the job has ended, or the updates of a key were not in order."""
    job.check_alive()
    if job.report().total("violations"):
        raise harness.BenchmarkError("updates came out of order")


if __name__ == "__main__":
    harness.run_main(main)
