"""Seconds without output of a running job that is changed: from its last row to its first after.

With ``--kind rescale`` it grows to twice its parallelism and shrinks back, again and again; the first time also
launches a barrier stage, which costs no downtime: the job runs during that time. With ``--kind config`` an option of
its configuration changes that needs a restart, in place. With ``--kind savepoint-resume`` the same change is made by a
new job: the job is stopped with a savepoint and submitted again.

With the other kinds a process is killed: ``slot``, a slot's agent, once all slots have their spare workers;
``executor``, a JVM of a Spark cluster, with half of the slots; ``driver``, the leading driver, its JVM included, while
another session is the standby.

Each change is made when the job has completed a checkpoint since the last one. With ``--state-mb`` there is so much
state to be restored, in values of 500 bytes that no compression makes smaller, each of which is compared when it
changes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from secrets import token_urlsafe
from tempfile import TemporaryDirectory

from benchmarks.harness import (
    BenchmarkError,
    BenchmarkJob,
    BenchmarkSession,
    Report,
    add_backend_option,
    backend_configuration,
    emit,
    not_negative,
    parser_for,
    percentile,
    positive_int,
    progress,
    run_main,
    session,
    standby,
)
from benchmarks.process_tree import agent_of, executor_of

NAME = "downtime"
SMALL, LARGE = "recovery", "savepoint"
"""Pipelines: with hardly any state, and with as much as is asked for."""
KEYS = 1_000
VALUE_BYTES = 500
ROWS_PER_S = 20_000
CHANGES_PER_S = 4_000
"""Of large values, of which each row changes one."""
FILL_S = 20
FILL_TIMEOUT_S = 1800.0
"""A key costs about 35 us of a core: a minute for 2 M keys on a quiet machine, half an hour on a busy one."""
TELL_S = 20.0
FILL_INTERVAL_MS, INTERVAL_MS = 10_000, 500
INTERVAL = "execution.checkpointing.interval"
FROM_LOCAL = "execution.state-recovery.from-local"
PARALLELISM = 2
TIMEOUT_S = 300.0
CONFIGURATION = {
    INTERVAL: f"{INTERVAL_MS} ms",
    "execution.checkpointing.incremental": "true",
    "restart-strategy.type": "none",
}
RESTARTED = {
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": "1000",
    "restart-strategy.fixed-delay.delay": "0 ms",
}
CLUSTER = f"local-cluster[2,{PARALLELISM},1024]"
"""Two executors, each of which has enough slots for the job."""
ALLOW_LIST = "jobmanager.execution.dynamic-configuration.allow-list"
OPTION = "execution.buffer-timeout.interval"


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--kind", choices=(*_KINDS, "driver"), default="rescale", help="what the job is down for")
    add_backend_option(parser, default="memory")
    parser.add_argument("--state-mb", type=not_negative, default=0, help="keyed state")
    parser.add_argument("--from-local", action="store_true", help="workers keep the last checkpoint's tables for it")
    parser.add_argument("--times", type=positive_int, default=6, help="how often")
    options = parser.parse_args()
    times, peak_rss_mb = measure_takeovers(options) if options.kind == "driver" else measure(options)
    emit(NAME, options, {"downtime_s_p50": percentile(times, 0.5), "downtime_s_max": max(times)}, peak_rss_mb)


def measure(options: argparse.Namespace) -> tuple[list[float], int]:
    """The times of all changes, and the peak memory. Raises BenchmarkError when rows were lost or repeated."""
    load = _Load.of(options.state_mb)
    configuration = _configuration(options)
    times = []
    master = CLUSTER if options.kind == "executor" else "local"
    with session(2 * PARALLELISM, {ALLOW_LIST: OPTION}, master=master) as running:
        job = load.started(running, configuration)
        for number in range(options.times):
            _settle(job)
            change = _Change(running, load, {**configuration, OPTION: f"{100 + number} ms"}, number)
            job, seconds = _downtime(job, partial(_KINDS[options.kind], job, change))
            times.append(seconds)
            progress(f"  {seconds:.3f} s")
        load.end(job)
        return times, running.peak_rss_mb


def measure_takeovers(options: argparse.Namespace) -> tuple[list[float], int]:
    """As :func:`measure`, when drivers end and others take over."""
    load = _Load.of(options.state_mb)
    times = []
    with TemporaryDirectory(prefix="ckpt-benchmark-") as storage, ExitStack() as sessions:
        shared = {
            "high-availability.type": "filesystem",
            "high-availability.storageDir": storage,
            "rest.token": token_urlsafe(),
        }
        leader = sessions.enter_context(session(PARALLELISM, shared))
        job = load.started(leader, _configuration(options))
        for _ in range(options.times):
            waiting = sessions.enter_context(standby(PARALLELISM, shared))
            _settle(job)
            job, seconds = _downtime(job, partial(_take_over, job, leader, waiting))
            leader = job.session
            times.append(seconds)
            progress(f"  {seconds:.3f} s")
        load.end(job)
        return times, leader.peak_rss_mb


def _take_over(
    job: BenchmarkJob, leader: BenchmarkSession, waiting: Callable[[], BenchmarkSession]
) -> tuple[BenchmarkJob, int]:
    leader.kill()
    job.move_to(waiting())
    return job, PARALLELISM


@dataclass(frozen=True)
class _Load:
    """The program of the job, and its arguments; large state is full when a row of each of its ``keys`` has arrived."""

    pipeline: str
    keys: int
    arguments: list[int]

    @classmethod
    def of(cls, state_mb: float) -> _Load:
        keys = round(state_mb * 1_000_000 / VALUE_BYTES)
        if not keys:
            return cls(SMALL, KEYS, [KEYS, ROWS_PER_S])
        spread = max(1, round(keys / (CHANGES_PER_S * FILL_S)))
        return cls(LARGE, keys, [keys, VALUE_BYTES, CHANGES_PER_S, spread])

    def run(
        self, running: BenchmarkSession, configuration: Mapping[str, str], snapshot: str | None = None
    ) -> BenchmarkJob:
        return running.run(self.pipeline, self.arguments, PARALLELISM, configuration, snapshot)

    def started(self, running: BenchmarkSession, configuration: Mapping[str, str]) -> BenchmarkJob:
        """With all of its state, which fills in a third less time while checkpoints are rare."""
        job = self.run(running, {**configuration, INTERVAL: f"{FILL_INTERVAL_MS} ms"})
        job.wait_for_rows()
        self._fill(job)
        job.patch_interval(INTERVAL_MS)
        return job

    def _fill(self, job: BenchmarkJob) -> None:
        progress(f"filling {self.keys:,} keys")
        reported_at = time.monotonic()

        def is_full() -> bool:
            nonlocal reported_at
            rows = _newest(job).total("rows")
            if time.monotonic() - reported_at > TELL_S:
                reported_at = time.monotonic()
                progress(f"  {rows:,}")
            return rows >= self.keys

        job.wait_for("the state", is_full, FILL_TIMEOUT_S)

    def end(self, job: BenchmarkJob) -> None:
        """Raises BenchmarkError when rows were lost or repeated; large values fail the job when they are not right."""
        job.check_alive()
        if self.pipeline == SMALL:
            job.wait_for("all keys", lambda: _newest(job).total("keys") == self.keys, TIMEOUT_S)
        _settle(job)
        job.drain()
        report = _newest(job)
        rows, counted = report.total("rows"), report.total("count_total")
        if report.total("violations") or (self.pipeline == SMALL and rows != counted):
            raise BenchmarkError(f"{rows} rows at the sink, {counted} counted, {report.total('violations')} violations")


def _configuration(options: argparse.Namespace) -> dict[str, str]:
    is_loss = options.kind in ("slot", "executor", "driver")
    local = {FROM_LOCAL: "true"} if options.from_local else {}
    return {**CONFIGURATION, **local, **(RESTARTED if is_loss else {}), **backend_configuration(options.backend)}


def _newest(job: BenchmarkJob) -> Report:
    """The reports of the subtasks of the newest attempt; of those that have ended the last report stays."""
    subtasks = job.report().subtasks
    newest = max(document["attempt"] for document in subtasks.values())
    return Report({index: document for index, document in subtasks.items() if document["attempt"] == newest})


def _settle(job: BenchmarkJob) -> None:
    """Waits for the next completed checkpoint."""
    known = len(job.completed_checkpoints())
    job.wait_for("a completed checkpoint", lambda: len(job.completed_checkpoints()) > known, TIMEOUT_S)


@dataclass(frozen=True)
class _Change:
    """The ``number``-th, to this configuration."""

    session: BenchmarkSession
    load: _Load
    configuration: Mapping[str, str]
    number: int


def _rescale(job: BenchmarkJob, change: _Change) -> tuple[BenchmarkJob, int]:
    parallelism = PARALLELISM if change.number % 2 else 2 * PARALLELISM
    job.rescale(parallelism)
    return job, parallelism


def _configure(job: BenchmarkJob, change: _Change) -> tuple[BenchmarkJob, int]:
    job.configure({OPTION: change.configuration[OPTION]})
    return job, PARALLELISM


def _resume(job: BenchmarkJob, change: _Change) -> tuple[BenchmarkJob, int]:
    """The new job's subtasks report to another place."""
    stopped = job.stop()
    return change.load.run(change.session, change.configuration, stopped), PARALLELISM


def _kill_slot(job: BenchmarkJob, _: _Change) -> tuple[BenchmarkJob, int]:
    """After a loss they are replaced within seconds, and the next one is not measured before."""
    job.wait_for("spare workers", lambda: len(job.ready_workers()) >= 2 * PARALLELISM, TIMEOUT_S)
    worker = job.active_worker()
    (agent_of(worker) or worker).kill()
    return job, PARALLELISM


def _kill_executor(job: BenchmarkJob, _: _Change) -> tuple[BenchmarkJob, int]:
    executor = executor_of(job.active_worker())
    if executor is None:
        raise BenchmarkError("the active worker is not below an executor")
    executor.kill()
    return job, PARALLELISM


_KINDS = {
    "rescale": _rescale,
    "config": _configure,
    "savepoint-resume": _resume,
    "slot": _kill_slot,
    "executor": _kill_executor,
}


def _downtime(job: BenchmarkJob, change: Callable[[], tuple[BenchmarkJob, int]]) -> tuple[BenchmarkJob, float]:
    """The job after the change, and the seconds until every subtask of its sink, so many, has got rows again."""
    before = _newest(job).subtasks.values()
    attempt = max(document["attempt"] for document in before)
    last_ms = max(float(document["last_ms"]) for document in before)
    following, parallelism = change()

    def all_have_rows() -> bool:
        """A subtask that ends writes its last report, which the next attempt's first one replaces."""
        nonlocal last_ms
        old, new = job.report().subtasks.values(), following.report().subtasks.values()
        last_ms = max([last_ms, *(float(d["last_ms"]) for d in old if d["attempt"] == attempt)])
        return sum(d["attempt"] > attempt or following is not job for d in new) == parallelism

    following.wait_for("rows after the change", all_have_rows, TIMEOUT_S, poll_s=0.005)
    newest = _newest(following).subtasks.values()
    return following, max(float(document["first_ms"]) - last_ms for document in newest) / 1000


if __name__ == "__main__":
    run_main(main)
