"""The cost of waiting: a real triggerer with many deferred waits at one session, and one stream of events for them all.

Three times tasks wait in the same triggerer: ``--waiting`` triggers that fire at moments known beforehand, which is
Airflow's own floor; ``--few`` waits of the provider; ``--waiting`` waits of the provider. Each time nothing happens
for ``--seconds``, and then there are ``--rounds``: a checkpoint completes, which wakes all waits and ends those that
wait for just this one. The latency is from the completion at the job manager to the event in Airflow's database. The
session, without Spark, counts the requests.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.counted_session import CountedSession, counted_session
from benchmarks.harness import PIPELINES, BenchmarkError, emit, parser_for, percentile, positive_int, progress, run_main
from benchmarks.triggerer import Described, Resumed, Triggerer, triggerer
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import RunOptions

NAME = "triggers"
PAUSE_S = 2.0
ROWS_PER_S, KEYS = 100, 10
_WAIT = {"ckpt_conn_id": "ckpt_default", "deadline": None, "poll_interval": 2.0, "memo": {}}
_STREAM = "GET /events"


@dataclass
class Measured:
    """One phase. ``quiet`` is of the time without events, ``busy`` of the rounds."""

    quiet_cpu_percent: float
    busy_cpu_percent: float
    rss_mb: float
    quiet_requests_per_s: float
    busy_requests_per_s: float
    streams: int
    blocked: int
    latencies_s: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Usage:
    """Of the triggerer and the session, so far."""

    at: float
    cpu_s: float
    requests: int

    def since(self, earlier: Usage) -> tuple[float, float]:
        """Percent of one processor, and requests per second."""
        elapsed = self.at - earlier.at
        return 100 * (self.cpu_s - earlier.cpu_s) / elapsed, (self.requests - earlier.requests) / elapsed


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--waiting", type=positive_int, default=500, help="tasks that wait at the same time")
    parser.add_argument("--few", type=positive_int, default=10, help="the same with so many tasks, for the requests")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the time without events")
    parser.add_argument("--rounds", type=positive_int, default=20, help="completions in each phase")
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ckpt-benchmark-")))
        session = stack.enter_context(counted_session(directory))
        client = stack.enter_context(CkptClient(session.uncounted_url))
        airflow = stack.enter_context(triggerer(directory / "airflow", session.url, progress))
        bench = Benchmark(options, session, client, airflow, directory)
        floor = bench.floor(options.waiting)
        few = bench.waits("few", options.few)
        many = bench.waits("many", options.waiting)
    emit(NAME, options, measures(floor, few, many), round(many.rss_mb))


def measures(floor: Measured, few: Measured, many: Measured) -> dict[str, Any]:
    """The keys of the line."""
    beyond = {
        f"latency_beyond_floor_s_{name}": round(
            percentile(many.latencies_s, share) - percentile(floor.latencies_s, share), 3
        )
        for name, share in (("p50", 0.5), ("p95", 0.95))
    }
    return {
        **_figures(many, ""),
        **beyond,
        **_figures(floor, "_floor", requests=False),
        **_figures(few, "_few"),
        "streams": many.streams,
        "completions": len(many.latencies_s),
    }


def _figures(phase: Measured, suffix: str, *, requests: bool = True) -> dict[str, float]:
    found = {
        f"cpu_percent{suffix}": round(phase.busy_cpu_percent, 2),
        f"cpu_percent_quiet{suffix}": round(phase.quiet_cpu_percent, 2),
        f"rss_mb{suffix}": round(phase.rss_mb, 1),
        f"latency_s_p50{suffix}": round(percentile(phase.latencies_s, 0.5), 3),
        f"latency_s_p95{suffix}": round(percentile(phase.latencies_s, 0.95), 3),
        f"blocked{suffix}": phase.blocked,
    }
    if requests:
        found[f"requests_per_s{suffix}"] = round(phase.busy_requests_per_s, 2)
        found[f"requests_per_s_quiet{suffix}"] = round(phase.quiet_requests_per_s, 3)
    return found


def round_of(index: int, rounds: int) -> int:
    """The round that ends a wait: the last ones first, so that some waits last until the end."""
    return rounds - 1 - index % rounds


class Benchmark:
    """A triggerer, and a session with a job that takes checkpoints on request."""

    def __init__(
        self,
        options: argparse.Namespace,
        session: CountedSession,
        client: CkptClient,
        airflow: Triggerer,
        directory: Path,
    ) -> None:
        self._options = options
        self._session = session
        self._client = client
        self._airflow = airflow
        pipeline_id = client.upload_pipeline(*pack_pipeline(PIPELINES / "recovery.py"))
        configuration = {
            "execution.checkpointing.dir": (directory / "checkpoints").as_uri(),
            "execution.checkpointing.interval": "1 d",
            "restart-strategy.type": "none",
        }
        arguments = (str(directory / "report"), str(KEYS), str(ROWS_PER_S))
        run = RunOptions(arguments=arguments, parallelism=1, configuration=configuration)
        self._job_id = client.run_pipeline(pipeline_id, run)
        client.wait_for_state(self._job_id, ["RUNNING"], timeout_s=120, poll_interval_s=0.1)
        airflow.until("running tasks", self._runs, 120)

    def floor(self, waiting: int) -> Measured:
        """Triggers that only fire: what Airflow takes for as many."""
        rounds, seconds = self._options.rounds, self._options.seconds
        # They have to be loaded by then, fifty a second at most.
        first = time.time() + 30 + 0.1 * waiting + seconds
        moments = [round(1000 * (first + PAUSE_S * (number + random.uniform(-0.1, 0.1)))) for number in range(rounds)]
        triggers = [
            ("benchmarks.moment_trigger.MomentTrigger", {"at_ms": moments[round_of(index, rounds)]})
            for index in range(waiting)
        ]

        def happen(number: int) -> None:
            _sleep_until(moments[number] / 1000)

        found, resumed = self._phase("floor", triggers, happen, lambda: _sleep_until(first - PAUSE_S))
        found.latencies_s = [(one.at_ms - one.event["at_ms"]) / 1000 for one in resumed.values()]
        return found

    def waits(self, run_id: str, waiting: int) -> Measured:
        """Waits of the provider, each for one checkpoint of the job."""
        rounds = self._options.rounds
        first = 1 + max((item.id for item in self._client.checkpoint_statistics(self._job_id).history), default=0)
        wanted = [first + round_of(index, rounds) for index in range(waiting)]
        completed_ms: dict[int, int] = {}

        def happen(number: int) -> None:
            completed_ms[first + number] = self._checkpoint(first + number)
            time.sleep(PAUSE_S * random.uniform(0.9, 1.1))

        triggers = [self._wait_for(checkpoint_id) for checkpoint_id in wanted]
        found, resumed = self._phase(run_id, triggers, happen, lambda: None)
        for index, one in resumed.items():
            if one.event["status"] != "done" or one.event["result"]["checkpoint_id"] != wanted[index]:
                raise BenchmarkError(f"the wait for checkpoint {wanted[index]} has ended with {one.event}")
        found.latencies_s = [(one.at_ms - completed_ms[wanted[index]]) / 1000 for index, one in resumed.items()]
        if min(found.latencies_s) < 0:
            raise BenchmarkError("a wait has ended before its checkpoint was complete")
        if found.streams != 1:
            raise BenchmarkError(f"{waiting} waits have opened {found.streams} streams")
        return found

    def _wait_for(self, checkpoint_id: int) -> Described:
        goal = {"checkpoint_id": checkpoint_id}
        condition = {"type": "CheckpointCondition", "job_id": self._job_id, "goal": goal}
        return "airflow_provider_ckpt.triggers.wait.CkptTrigger", {**_WAIT, "condition": condition}

    def _phase(
        self, run_id: str, triggers: Sequence[Described], happen: Callable[[int], None], begin: Callable[[], None]
    ) -> tuple[Measured, dict[int, Resumed]]:
        streams, blocked = self._session.requests()[_STREAM], self._airflow.blocked()
        self._airflow.defer(run_id, triggers)
        self._airflow.until("all tasks to wait", lambda: self._airflow.waiting(run_id) == len(triggers))
        progress(f"{run_id}: {len(triggers)} tasks wait; quiet for {self._options.seconds:g} s")
        before = self._usage()
        time.sleep(self._options.seconds)
        quiet = self._usage().since(before)
        rss_mb = self._airflow.rss_mb()
        begin()
        if self._airflow.resumed(run_id):
            raise BenchmarkError(f"{run_id}: tasks were resumed before anything has happened")
        progress(f"{run_id}: {self._options.rounds} rounds")
        before = self._usage()
        for number in range(self._options.rounds):
            happen(number)
        busy = self._usage().since(before)
        self._airflow.until("the end of all waits", lambda: len(self._airflow.resumed(run_id)) == len(triggers))
        opened, blocked = self._session.requests()[_STREAM] - streams, self._airflow.blocked() - blocked
        found = Measured(quiet[0], busy[0], rss_mb, quiet[1], busy[1], opened, blocked)
        return found, self._airflow.resumed(run_id)

    def _usage(self) -> Usage:
        return Usage(time.monotonic(), self._airflow.cpu_s(), self._session.requests().total())

    def _runs(self) -> bool:
        vertices = self._client.job_details(self._job_id).vertices
        return all(vertex.tasks.get("RUNNING") == vertex.parallelism for vertex in vertices)

    def _checkpoint(self, expected: int) -> int:
        """Takes one; when it was complete, in milliseconds since the epoch by the job manager's clock."""
        trigger = self._client.trigger_checkpoint(self._job_id)
        status = self._client.wait_for_operation(
            "checkpoint", trigger, self._job_id, timeout_s=60, poll_interval_s=0.02
        )
        if status.checkpoint_id != expected:
            raise BenchmarkError(f"checkpoint {status.checkpoint_id} has come instead of {expected}")
        found = self._client.checkpoint_details(self._job_id, expected)
        return found.triggered_at_ms + math.floor(found.duration_ms or 0)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.time()))


if __name__ == "__main__":
    run_main(main)
