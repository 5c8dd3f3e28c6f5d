"""Nexmark's queries in the engine, and beside a peer: events per second, processor seconds, and a check of each result.

Each query runs twice: over ``--check-events`` events into Parquet, where DuckDB compares the result, and over
``--events`` without a sink, with a checkpoint per second, exactly once, which is measured from when all subtasks run.
``events_per_s_core`` is by processor seconds of all processes. A peer runs each query in turn with ours, ``--rounds``
times, and the figures are those of the run with the median of processor seconds.

With ``--rate half`` each query runs once more, at half of the rate that it has reached: from when its last event is due
by the clock to when a row has come out are ``latency_ms_p50`` and ``latency_ms_p99``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.harness import BenchmarkError, emit, parser_for, positive_int, progress, run_main, spark_beside
from benchmarks.latency import percentiles, read_ages
from benchmarks.nexmark.chart import Queries, write_chart
from benchmarks.nexmark.expected import EVENTS, Expected
from benchmarks.nexmark.flink.peer import CHECKED_EVENTS, CHECKED_PER_S, FlinkPeer
from benchmarks.nexmark.generator import EVENTS_PER_S, GROUP
from benchmarks.nexmark.pipeline.queries import QUERIES
from benchmarks.nexmark.processes import CpuTime, Timed, own_processes
from benchmarks.nexmark.spark_peer import SparkPeer
from benchmarks.process_tree import PeakMemory
from ckpt_runtime.jobmaster.gateway_values import ExecutionState
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster

NAME = "nexmark"
_PIPELINE = Path(__file__).resolve().parent / "pipeline"
_TIMEOUT_S = 1_800
_PEERS = {"spark": "Structured Streaming", "flink": "Flink SQL"}
_RANGE_S = 0.05
"""The time by the clock of a range at half of the rate: event time advances behind each."""
_LATE_S = 3.0
"""How much longer than its events come a query may take, with its last checkpoint."""
_CHECKED_S = 40
"""The event time of the compared events: three windows of ten seconds end within it."""


@dataclass(frozen=True)
class Pace:
    """Events come at this rate by the clock from when the job is RUNNING; the file ``begin`` then has the time."""

    rate: int
    begin: Path


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--query", default="all", help="a query such as q5, several with commas between them, or all")
    parser.add_argument("--events", type=positive_int, default=4_000_000, help="events that are measured")
    parser.add_argument("--check-events", type=positive_int, default=400_000, help="events of the compared result")
    parser.add_argument("--events-per-split", type=positive_int, default=20_000, help="events that one reader reads")
    parser.add_argument("--parallelism", type=positive_int, default=2, help="subtasks, cores and shuffle partitions")
    parser.add_argument("--rate", choices=("full", "half"), default="full", help="half measures latency, too")
    seconds = "length of the run at half of the rate"
    parser.add_argument("--seconds", type=positive_int, default=20, help=seconds)
    incremental = "whether a checkpoint on our side has only what has changed"
    parser.add_argument("--incremental", action=BooleanOptionalAction, default=True, help=incremental)
    parser.add_argument("--peer", choices=("none", *_PEERS), default="none", help="the system to compare with")
    parser.add_argument("--flink-dir", help="a Flink distribution, otherwise that of FLINK_HOME")
    parser.add_argument("--rounds", type=positive_int, default=1, help="times that ours and the peer run in turn")
    parser.add_argument("--plot", help="where to write a chart of the queries beside the peer, as SVG")
    parser.add_argument("--beside", help="the output of a run with the other peer, which the chart shows, too")
    options = parser.parse_args()
    if options.plot is not None and options.peer == "none":
        parser.error("--plot draws a query beside that of a peer: give --peer, too")
    other = {} if options.beside is None else _earlier(parser, Path(options.beside))
    names = list(QUERIES) if options.query == "all" else options.query.split(",")
    if unknown := [name for name in names if name not in QUERIES]:
        parser.error(f"--query {unknown[0]}: it has to be one of {', '.join(QUERIES)}")
    directory = Path(tempfile.mkdtemp(prefix="ckpt-nexmark-"))
    try:
        with PeakMemory(os.getpid()) as memory:
            queries = _measured(names, options, directory)
        if options.plot is not None:
            note = f"{options.events:,} events, {options.parallelism} subtasks, {date.today()}"
            write_chart(Path(options.plot), {_PEERS[options.peer]: queries} | other, note)
        emit(NAME, options, {"queries": queries}, round(memory.peak_mb))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _earlier(parser: ArgumentParser, file: Path) -> dict[str, Queries]:
    """The figures of an earlier run, by its peer."""
    try:
        line = json.loads(file.read_text().splitlines()[-1])
        return {_PEERS[line["options"]["peer"]]: line["queries"]}
    except (OSError, ValueError, LookupError) as error:
        parser.error(f"--beside {file} is not the output of a run with a peer: {error!r}")


def _measured(names: list[str], options: Namespace, directory: Path) -> dict[str, dict[str, Any]]:
    per_second = -(-options.check_events // _CHECKED_S)
    expected = Expected(options.check_events, per_second)
    found: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        peer: FlinkPeer | SparkPeer | None = None
        if options.peer == "spark":
            peer = SparkPeer(stack.enter_context(spark_beside(options.parallelism, "4g")), options, directory)
        elif options.peer == "flink":
            peer = stack.enter_context(FlinkPeer(options, directory))
            check_flink(peer, [*EVENTS, *names])
        cluster = stack.enter_context(MiniCluster())
        for name in names:
            in_engine(cluster, name, options.check_events, per_second, options, directory / "engine")
            result = pq.read_table(directory / "engine" / name)
            checked, wrong = expected.difference(name, result, last_events(options))
            if wrong:
                raise BenchmarkError(f"{name}: {wrong}")
            ours, theirs = [], []
            for _ in range(options.rounds):
                ours.append(in_engine(cluster, name, options.events, EVENTS_PER_S, options, None, beside=peer))
                theirs += [peer.run(name)] if peer is not None else []
                progress(f"{name}: {ours[-1]}, {theirs[-1:]}")
            found[name] = _figures(options.events, _median(ours)) | {"checked": checked}
            if theirs:
                _add_peer(found[name], options.events, _median(theirs))
            if options.rate == "half":
                found[name] |= at_half_rate(cluster, name, found[name]["events_per_s"] // 2, options, directory / name)
            progress(f"{name}: {found[name]}")
    return found


def at_half_rate(cluster: MiniCluster, name: str, rate: int, options: Namespace, directory: Path) -> dict[str, float]:
    """Runs a query while so many events come in a second. Raises BenchmarkError if it does not keep up."""
    directory.mkdir()
    per_split = max(round(rate * _RANGE_S / options.parallelism / GROUP), 1) * GROUP
    events = rate * options.seconds // GROUP * GROUP
    given = Namespace(**vars(options) | {"events_per_split": per_split})
    run = in_engine(cluster, name, events, EVENTS_PER_S, given, None, pace=Pace(rate, directory / "begin"))
    if run.seconds > events / rate + _LATE_S:
        raise BenchmarkError(f"{name} took {run.seconds:.1f} s for events of {events / rate:.1f} s")
    figures = percentiles(read_ages(directory))
    figures = {key: figures[key] for key in ("latency_ms_p50", "latency_ms_p99")}
    return figures | {"half_events_per_s": rate, "half_events_per_s_core": round(events / run.cpu_s)}


def check_flink(flink: FlinkPeer, names: list[str]) -> None:
    """Raises BenchmarkError if Flink has other events than ours, or if a query's result differs from DuckDB's."""
    expected = Expected(CHECKED_EVENTS, CHECKED_PER_S)
    at_end = CHECKED_EVENTS + _CHECKED_S * CHECKED_PER_S  # when its input ends, all of Flink's windows do
    for name in names:
        result = flink.result(name, expected.rows(name, at_end).schema)
        rows, wrong = expected.difference(name, result, (at_end, at_end))
        if wrong:
            raise BenchmarkError(f"{name} in Flink: {wrong}")
        progress(f"{name} in Flink: {rows} rows are as expected")


def _median(runs: list[Timed]) -> Timed:
    """The run with the median of processor seconds, the lower one of two."""
    return sorted(runs, key=lambda run: run.cpu_s)[(len(runs) - 1) // 2]


def _figures(events: int, run: Timed) -> dict[str, Any]:
    return {
        "seconds": round(run.seconds, 2),
        "events_per_s": round(events / run.seconds),
        "events_per_s_core": round(events / run.cpu_s),
        "cpu_s": round(run.cpu_s, 2),
    }


def _add_peer(figures: dict[str, Any], events: int, run: Timed) -> None:
    of_peer = _figures(events, run)
    figures |= {f"peer_{key}": value for key, value in of_peer.items()}
    figures["ratio"] = round(figures["events_per_s"] / of_peer["events_per_s"], 2)
    figures["ratio_core"] = round(figures["events_per_s_core"] / of_peer["events_per_s_core"], 2)


def in_engine(
    cluster: MiniCluster,
    name: str,
    events: int,
    per_second: int,
    options: Namespace,
    output: Path | None,
    *,
    beside: FlinkPeer | SparkPeer | None = None,
    pace: Pace | None = None,
) -> Timed:
    """Runs a query to its end, with a checkpoint per second.

    Planning and what workers do before their subtasks run are not measured, as in Flink. The processor time of a peer
    that waits beside it is not counted.
    """
    arguments = [name, str(events), str(options.events_per_split), str(options.parallelism)]
    arguments += [str(per_second), str(output or ""), "" if pace is None else f"{pace.rate} {pace.begin}"]
    configuration = {
        "execution.checkpointing.interval": "1 s",
        "execution.checkpointing.incremental": str(options.incremental).lower(),
        "restart-strategy.type": "none",
    }
    job = cluster.submit(
        _PIPELINE,
        entry="queries:pipeline",
        arguments=arguments,
        configuration=configuration,
        parallelism=options.parallelism,
    )
    # In two waits: each begins with short pauses, and what happens until the end of the second one is noticed is not
    # measured.
    cluster.wait_for_status(job, JobStatus.RUNNING, JobStatus.FINISHED)
    cluster.wait_until(lambda: _all_started(cluster, job), f"all subtasks of job {job} to run")
    if pace is not None:
        written = pace.begin.with_suffix(".part")
        written.write_text(str(time.time()))
        written.rename(pace.begin)
    start = time.monotonic()
    with CpuTime(lambda: own_processes(without=beside.process if beside is not None else None)) as cpu:
        cluster.wait_for_status(job, JobStatus.FINISHED, timeout_s=_TIMEOUT_S, clean_up=False)
        seconds = time.monotonic() - start
    cluster.wait_for_clean_up(job)
    return Timed(seconds, cpu.seconds)


def _all_started(cluster: MiniCluster, job: str) -> bool:
    """Whether all subtasks run, or have ended. A job is RUNNING before that, while they load the program."""
    cluster.wait_for_status(job, JobStatus.RUNNING, JobStatus.FINISHED)
    overview = cluster.of_job(job, lambda known: known.overview())
    return set(overview.tasks_by_state) <= {ExecutionState.RUNNING, ExecutionState.FINISHED}


def last_events(options: Namespace) -> tuple[int, int]:
    """The last events of the readers that end first and last in event time, which read groups in turn.

    Raises BenchmarkError if a reader gets no group, since event time would never advance.
    """
    events, readers = options.check_events, options.parallelism
    if events < readers * GROUP:
        raise BenchmarkError(f"{events} events are fewer than {readers} groups of {GROUP}: give more events")
    return events - (readers - 1) * GROUP - 1, events - 1


if __name__ == "__main__":
    run_main(main)
