"""Milliseconds from a source's stamp to the operator after one shuffle, at a fixed rate of rows.

With ``--flink-dir`` the same work runs in Flink afterwards: a Java program beside this module, in one process, with the
same rate, parallelism, checkpoints and buffer timeout. Ours stamps a buffer of rows, Flink's each row.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.harness import BenchmarkError, BenchmarkJob, emit, parser_for, positive_int, progress, run_main, session
from benchmarks.pipelines.latency import BUCKETS_PER_DECADE, DECADES

NAME = "latency"
WARM_UP_S = 5.0


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--rows-per-s", type=positive_int, default=1_000, help="rate of all sources together")
    parser.add_argument("--parallelism", type=positive_int, default=2, help="subtasks of each vertex, and slots")
    parser.add_argument("--seconds", type=positive_int, default=20, help="length of the measurement")
    parser.add_argument("--interval-ms", type=int, default=1_000, help="checkpoint interval; 0 for none")
    parser.add_argument("--buffer-timeout", default="", help="execution.buffer-timeout.interval; the default if empty")
    parser.add_argument("--flink-dir", help="a Flink distribution, to measure Flink, too")
    options = parser.parse_args()
    flink = _distribution(options.flink_dir) if options.flink_dir else None
    configuration = {"restart-strategy.type": "none"}
    if options.interval_ms:
        configuration["execution.checkpointing.interval"] = f"{options.interval_ms} ms"
    if options.buffer_timeout:
        configuration["execution.buffer-timeout.interval"] = options.buffer_timeout
    with session(options.parallelism) as running:
        job = running.run(NAME, [options.rows_per_s], options.parallelism, configuration)
        job.wait_for_rows()
        job.wait_for_spares()
        job.let_run(WARM_UP_S)
        figures = _measured(job, options)
        job.drain()
        rss = running.peak_rss_mb
    if flink is not None:
        figures |= {f"flink_{name}": figure for name, figure in _in_flink(flink, configuration, options).items()}
    emit(NAME, options, figures, rss)


def _measured(job: BenchmarkJob, options: argparse.Namespace) -> dict[str, float]:
    before = job.report().total("rows")
    job.file("begin").touch()
    job.let_run(options.seconds)
    rate = (job.report().total("rows") - before) / options.seconds
    documents = read_ages(job.file("begin").parent)
    if len(documents) != options.parallelism:
        raise BenchmarkError(f"{len(documents)} of {options.parallelism} subtasks have measured ages")
    return _figures(documents, rate, options)


def read_ages(directory: Path) -> list[dict[str, Any]]:
    """What each subtask has counted there."""
    return [json.loads(file.read_text()) for file in directory.glob("ages-*.json")]


def _distribution(directory: str) -> Path:
    # Imports the queries of Nexmark, which takes seconds.
    from benchmarks.nexmark.flink.peer import distribution

    return distribution(directory)


def _in_flink(flink: Path, configuration: dict[str, str], options: argparse.Namespace) -> dict[str, float]:
    """Raises BenchmarkError when the program does not compile, fails, or does not keep up."""
    with TemporaryDirectory(prefix="ckpt-latency-") as directory:
        classpath = f"{directory}:{flink}/lib/*"
        _java("javac", "-nowarn", "-d", directory, "-cp", classpath, str(Path(__file__).with_name("Latency.java")))
        given = {
            **configuration,
            "parallelism.default": str(options.parallelism),
            "execution.checkpointing.dir": Path(directory, "checkpoints").as_uri(),
        }
        numbers = (options.rows_per_s, WARM_UP_S, options.seconds, BUCKETS_PER_DECADE, DECADES)
        settings = [f"{key}={value}" for key, value in given.items()]
        opened = [f"--add-opens=java.base/java.{package}=ALL-UNNAMED" for package in ("lang", "util", "time")]
        printed = _java("java", "-Xmx2g", *opened, "-cp", classpath, "Latency", *map(str, numbers), *settings)
    document = json.loads(printed.splitlines()[-1])
    return _figures([document], sum(document["counts"]) / options.seconds, options)


def _java(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"{command[0]} ended with code {done.returncode}:\n{done.stderr[-2_000:]}")
    return done.stdout


def _figures(documents: Sequence[dict[str, Any]], rate: float, options: argparse.Namespace) -> dict[str, float]:
    if rate < 0.9 * options.rows_per_s:
        raise BenchmarkError(f"the job kept up with {rate:,.0f} of {options.rows_per_s:,} rows/s only")
    return {**percentiles(documents), "rows_per_s": round(rate)}


def percentiles(documents: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The latencies of all rows that subtasks have counted. Raises BenchmarkError if there are none."""
    counts = np.sum([document["counts"] for document in documents], axis=0)
    if not np.any(counts):
        raise BenchmarkError("no row was measured")
    progress(f"measured {int(counts.sum()):,} rows")
    edges = 10 ** ((np.arange(len(counts)) + 1) / BUCKETS_PER_DECADE) / 1_000
    ranks = np.cumsum(counts) / counts.sum()
    figures = {}
    for part in (50, 95, 99):
        figures[f"latency_ms_p{part}"] = round(float(edges[np.searchsorted(ranks, part / 100)]), 2)
    return {**figures, "latency_ms_max": max(document["max"] for document in documents) / 1_000}


if __name__ == "__main__":
    run_main(main)
