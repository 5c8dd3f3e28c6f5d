"""Ours and a peer in turn, several rounds in one run, and the ratios of medians.

``--flink-dir`` is a directory with scripts that run the same work on a Flink cluster which is up: ``b1/run.sh`` (Java)
and ``b1/run_py.sh`` (PyFlink); each prints one JSON line with ``rec_s_steady`` and ``rec_s_wall``. ``--spark`` adds
:mod:`benchmarks.spark_peer`. Machines are noisy: only figures of one run are comparable.
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

from benchmarks.harness import BenchmarkError, parser_for, positive_int, progress, run_main

NAME = "peers"
TIMEOUT_S = 900


@dataclass(frozen=True)
class Contest:
    """One kind of work: our benchmark, and the peer's script with its arguments."""

    name: str
    ours: tuple[str, ...]
    flink: tuple[str, ...]
    spark: tuple[str, ...]


def contests(options: argparse.Namespace) -> list[Contest]:
    """The work that was asked for. PyFlink's thread mode is its fastest way to run Python."""
    seconds = ("--seconds", f"{options.seconds:g}", "--interval-ms", str(options.interval_ms))
    ckpt = ("--ckpt", f"{options.interval_ms}ms" if options.interval_ms else "off")
    count = Contest(
        "keyed_count",
        ("keyed_count", *seconds),
        ("b1/run.sh", "--n", str(options.java_rows), *ckpt),
        ("spark_peer", "--what", "count", "--seconds", f"{options.seconds:g}"),
    )
    process = Contest(
        "keyed_process",
        ("keyed_process", *seconds),
        ("b1/run_py.sh", "--mode", "thread", "--n", str(options.python_rows), *ckpt),
        ("spark_peer", "--what", "process", "--seconds", f"{options.seconds:g}"),
    )
    return [contest for contest in (count, process) if options.what in (contest.name, "both")]


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, "Runs ours and a peer in turn and compares medians.")
    parser.add_argument("--flink-dir", type=Path, help="directory with the scripts of the Flink peer")
    parser.add_argument("--spark", action="store_true", help="compare with Spark Structured Streaming")
    parser.add_argument("--what", choices=("keyed_count", "keyed_process", "both"), default="both", help="the work")
    parser.add_argument("--rounds", type=positive_int, default=3, help="times that each side runs")
    parser.add_argument("--seconds", type=float, default=10.0, help="measured window of ours and of Spark's")
    parser.add_argument("--interval-ms", type=int, default=1000, help="checkpoint interval; 0 means no checkpoints")
    parser.add_argument("--java-rows", type=positive_int, default=30_000_000, help="rows of a Java job")
    parser.add_argument("--python-rows", type=positive_int, default=1_000_000, help="rows of a PyFlink job")
    options = parser.parse_args()
    if options.flink_dir is None and not options.spark:
        parser.error("give --flink-dir DIR, --spark, or both")
    results = [compare(contest, options) for contest in contests(options)]
    print(json.dumps({"name": NAME, "rounds": options.rounds, "contests": results}), flush=True)


def compare(contest: Contest, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one contest: every rate by side, and ours against each peer's median."""
    sides: dict[str, list[str]] = {"ours": _module(contest.ours)}
    if options.flink_dir is not None:
        sides["flink"] = [str(options.flink_dir.resolve() / contest.flink[0]), *contest.flink[1:]]
    if options.spark:
        sides["spark"] = _module(contest.spark)
    rates: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(options.rounds):
        for side, command in sides.items():
            rates[side].append(rate_of(run(command)))
            progress(f"{contest.name}, round {number + 1}, {side}: {rates[side][-1]:,.0f} rows/s")
    medians = {side: statistics.median(values) for side, values in rates.items()}
    ratios = {f"ours_to_{side}": round(medians["ours"] / medians[side], 2) for side in sides if side != "ours"}
    return {"work": contest.name, "rows_per_s": rates, "medians": medians, **ratios}


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
    rate = document.get("rows_per_s") or document.get("rec_s_steady") or document.get("rec_s_wall")
    if not rate:
        raise BenchmarkError(f"no rate in {document}")
    return float(rate)


if __name__ == "__main__":
    run_main(main)
