"""Ours and a peer in turn, several rounds in one run, and the ratios of medians.

``--flink-dir`` is a directory with scripts that run the same work on a Flink cluster which is up: ``b1/run.sh`` (Java)
and ``b1/run_py.sh`` (PyFlink), each of which prints one JSON line with ``rec_s_steady`` and ``rec_s_wall``, and
``b2/run.sh`` (Java, the topology of :mod:`benchmarks.backpressure`), which prints ``rec_s`` and ``e2e_ms_median``.
``--spark`` adds :mod:`benchmarks.spark_peer`. Machines are noisy: only figures of one run are comparable.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.backpressure import SLEEPS_MS, policies, sleeps
from benchmarks.expected import KEY_FORMS
from benchmarks.harness import (
    BenchmarkError,
    add_backend_option,
    backend_configuration,
    parser_for,
    positive_int,
    progress,
    run_main,
)
from benchmarks.shuffle_run import POLICIES, setting
from benchmarks.spark_peer import STATE_STORES

NAME = "peers"
TIMEOUT_S = 900
WAIT_S = 30.0
ALIGNED_TIMEOUT_MS = 100


WORK = ("keyed_count", "keyed_process", "both", "backpressure")


@dataclass(frozen=True)
class Contest:
    """One kind of work: our benchmark, and the peer's script with its arguments."""

    name: str
    ours: tuple[str, ...]
    flink: tuple[str, ...]
    spark: tuple[str, ...] = ()


def contests(options: argparse.Namespace) -> list[Contest]:
    """The requested work. PyFlink's thread mode is its fastest way to run Python."""
    if options.what == "backpressure":
        return [backpressure(policy, sleep, options) for sleep in options.sleeps for policy in options.policies]
    seconds = ("--seconds", f"{options.seconds:g}", "--interval-ms", str(options.interval_ms))
    spark = ("--seconds", f"{options.seconds:g}", "--files-per-batch", str(options.files_per_batch))
    ckpt = ("--ckpt", f"{options.interval_ms}ms" if options.interval_ms else "off")
    keys = ("--keys", str(options.keys))
    form = ("--key", options.key)
    cache = ("--cached-keys", str(options.cached_keys)) if options.cached_keys else ()
    backend = ("--backend", options.backend)
    flink_backend = ("--backend", backend_configuration(options.backend)["state.backend.type"])
    count = Contest(
        "keyed_count",
        ("keyed_count", *seconds, *keys, *form, *backend, *cache),
        ("b1/run.sh", "--n", str(options.java_rows), *ckpt, *keys, *form, *flink_backend),
        ("spark_peer", "--what", "count", "--state", options.state, *spark),
    )
    process = Contest(
        "keyed_process",
        ("keyed_process", *seconds),
        ("b1/run_py.sh", "--mode", "thread", "--n", str(options.python_rows), *ckpt),
        ("spark_peer", "--what", "process", *spark),
    )
    return [contest for contest in (count, process) if options.what in (contest.name, "both")]


def backpressure(policy: str, sleep_ms: float, options: argparse.Namespace) -> Contest:
    """One policy at one sleep. Both sides warm up alike, and wait alike for a checkpoint after the window."""
    work = ("--sleep-ms", f"{sleep_ms:g}", "--seconds", f"{options.seconds:g}")
    mode: tuple[str, ...] = ("--mode", "unaligned" if policy == "timeout" else policy)
    if policy == "timeout":
        mode += ("--aligned-timeout", f"{ALIGNED_TIMEOUT_MS}ms")
    limit = f"{options.seconds + WAIT_S:g}"
    return Contest(
        f"backpressure, {policy}, {sleep_ms:g} ms",
        (
            *("backpressure", "--policy", policy, *work, "--interval-ms", str(options.interval_ms)),
            *("--timeout-ms", str(ALIGNED_TIMEOUT_MS), "--wait-s", f"{WAIT_S:g}"),
            *(part for text in options.conf or () for part in ("--conf", text)),
        ),
        (
            *("b2/run.sh", *mode, *work, "--interval", f"{options.interval_ms}ms"),
            *("--warmup", "5", "--min-ckpts", "1", "--max-seconds", limit),
        ),
    )


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, "Runs ours and a peer in turn and compares medians.")
    parser.add_argument("--flink-dir", type=Path, help="directory with the scripts of the Flink peer")
    parser.add_argument("--spark", action="store_true", help="compare with Spark Structured Streaming")
    parser.add_argument("--what", choices=WORK, default="both", help="the work")
    parser.add_argument("--policies", type=policies, default=POLICIES, help="of backpressure, separated by commas")
    parser.add_argument("--sleeps", type=sleeps, default=SLEEPS_MS, help="of backpressure, ms, separated by commas")
    parser.add_argument("--rounds", type=positive_int, default=3, help="times that each side runs")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured window of ours and of Spark's")
    parser.add_argument("--interval-ms", type=int, default=1000, help="checkpoint interval; 0 means no checkpoints")
    parser.add_argument("--java-rows", type=positive_int, default=30_000_000, help="rows of a Java job")
    parser.add_argument("--python-rows", type=positive_int, default=1_000_000, help="rows of a PyFlink job")
    parser.add_argument("--keys", type=positive_int, default=100_000, help="of keyed_count")
    parser.add_argument("--key", choices=KEY_FORMS, default="int", help="form of keyed_count's keys")
    parser.add_argument("--cached-keys", type=positive_int, help="keys of keyed_count that ours keeps in memory")
    add_backend_option(parser, default="memory")
    parser.add_argument("--files-per-batch", type=positive_int, default=2, help="of Spark's micro-batches")
    parser.add_argument("--state", choices=STATE_STORES, default="rocksdb", help="Spark's state store of keyed_count")
    parser.add_argument("--conf", type=setting, action="append", metavar="KEY=VALUE", help="of our side's backpressure")
    options = parser.parse_args()
    if options.flink_dir is None and not options.spark:
        parser.error("give --flink-dir DIR, --spark, or both")
    if options.what == "backpressure" and options.spark:
        parser.error("--spark: Spark has no such topology, give --flink-dir only")
    if (options.spark or options.what != "keyed_count") and _is_special(options):
        parser.error("--keys, --key, --cached-keys and --backend go with --what keyed_count and --flink-dir alone")
    results = [compare(contest, options) for contest in contests(options)]
    print(json.dumps({"name": NAME, "rounds": options.rounds, "contests": results}), flush=True)


def _is_special(options: argparse.Namespace) -> bool:
    """Whether it requests options that only one pair of benchmarks has."""
    given = (options.keys, options.key, options.cached_keys, options.backend)
    return given != (100_000, "int", None, "memory")


def compare(contest: Contest, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one contest: every rate by side, and ours against each peer's median."""
    sides: dict[str, list[str]] = {"ours": _module(contest.ours)}
    if options.flink_dir is not None:
        sides["flink"] = [str(options.flink_dir.resolve() / contest.flink[0]), *contest.flink[1:]]
    if options.spark:
        sides["spark"] = _module(contest.spark)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    durations: dict[str, list[float | None]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side, command in sides.items():
            document = run(command)
            rates[side].append(rate_of(document))
            durations[side].append(duration_of(document))
            took = "" if durations[side][-1] is None else f", a checkpoint takes {durations[side][-1]:,.0f} ms"
            progress(f"{contest.name}, round {number + 1}, {side}: {rates[side][-1]:,.0f} rows/s{took}")
    medians = {side: statistics.median(values) for side, values in rates.items()}
    ratios = {f"ours_to_{side}": round(medians["ours"] / medians[side], 2) for side in sides if side != "ours"}
    result = {"work": contest.name, "rows_per_s": rates, "medians": medians, **ratios}
    return {**result, "checkpoint_ms_p50": durations} if options.what == "backpressure" else result


def _module(arguments: tuple[str, ...]) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:]]


def run(command: list[str]) -> dict[str, Any]:
    """The JSON line that a command prints last. Raises BenchmarkError when there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BenchmarkError(f"{command[0]}: {error}") from error
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise BenchmarkError(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-2000:]}")
    document: dict[str, Any] = json.loads(lines[-1])
    return document


def rate_of(document: dict[str, Any]) -> float:
    """Rows per second of a steady stretch, or over the wall clock where a run has none."""
    rate = next(
        (document[key] for key in ("rows_per_s", "rec_s", "rec_s_steady", "rec_s_wall") if document.get(key)), 0
    )
    if not rate:
        raise BenchmarkError(f"no rate in {document}")
    return float(rate)


def duration_of(document: dict[str, Any]) -> float | None:
    """The median duration of a run's checkpoints in ms; None where none has completed, or none was to be seen."""
    if document.get("censored"):
        return None
    found = document.get("checkpoint_ms_p50", document.get("e2e_ms_median"))
    return None if found is None else float(found)


if __name__ == "__main__":
    run_main(main)
