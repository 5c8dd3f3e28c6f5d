"""Rows per second into a sink: exactly once, with a checkpoint per interval, against at least once, in turns.

Both sides have the same checkpoints. The other side is the job in mode ``AT_LEAST_ONCE``, and for ``kafka`` also the
sink's own ``deliveryGuarantee=at-least-once``, whose messages are visible at once. With ``--other none`` it is a job
without any checkpoint before its end, which no guarantee can be faster than. The time is from the first RUNNING to
FINISHED, the last commit included. Afterwards the target is read by another library: it has to hold each row once.
``kafka`` and ``delta`` also measure how old a row is when a reader sees it. With ``--from kafka`` these rows are
messages that another process sends to a topic, and their age begins there. ``--reader read_uncommitted`` sees the
messages of a target in Kafka before their checkpoint completes.

Kafka's broker and PostgreSQL's server are those of the tests. The broker answers a fetch only when its maximum wait is
over, so that consumers ask for a short one. It shows committed messages too late where transactions overlap; therefore
the log's own marks say when a reader of committed messages sees them in Kafka.
"""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

import pyarrow.parquet as pq

from benchmarks.harness import (
    PIPELINES,
    BenchmarkError,
    measure_here,
    not_negative,
    parser_for,
    percentile,
    positive_int,
    progress,
    run_main,
    spark_beside,
)
from benchmarks.pipelines.sink import FETCH_WAIT_MS
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster

NAME = "sink"
ROWS = {"parquet": 6_000_000, "delta": 6_000_000, "foreachBatch": 3_000_000, "postgresql": 300_000, "kafka": 300_000}
_SETTLED_S = 1.0
"""Rows that are not older than a checkpoint interval and this have not waited for the job's start. Latency is measured
when all rows have been so for twice this time."""
_SETTLES_S = 120.0
_AT_LEAST = "at_least_once"
_EXACTLY = "exactly_once"


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--sink", choices=(*ROWS, "postgres"), default="parquet", help="postgres is postgresql")
    parser.add_argument("--rows", type=positive_int, help="rows of one run; the default differs by sink")
    parser.add_argument("--seconds", type=positive_int, help="instead of --rows: about how long one run should take")
    parser.add_argument("--other", choices=(_AT_LEAST, "none"), default=_AT_LEAST, help="what is compared with")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each side; 0 for latency alone")
    parser.add_argument("--interval-ms", type=positive_int, default=1000, help="checkpoint interval")
    parser.add_argument("--parallelism", type=positive_int, default=2, help="subtasks")
    parser.add_argument("--latency-s", type=not_negative, default=10.0, help="how long latency is measured")
    parser.add_argument("--rows-per-s", type=positive_int, default=1000, help="rate while latency is measured")
    parser.add_argument(
        "--from", dest="source", choices=("rate", "kafka"), default="rate", help="what latency begins at"
    )
    parser.add_argument("--row-bytes", type=positive_int, default=1200, help="size of the messages of --from kafka")
    parser.add_argument("--reader", choices=("read_committed", "read_uncommitted"), default="read_committed")
    options = parser.parse_args()
    options.sink = options.sink.replace("postgresql", "postgres").replace("postgres", "postgresql")
    options.rows = options.rows or ROWS[options.sink]
    with spark_beside(options.parallelism, "1g"):
        measure_here(NAME, options, _measured)


def _measured(options: Namespace, directory: Path) -> dict[str, Any]:
    with target_of(options.sink, directory) as target, MiniCluster() as cluster:
        return Runs(cluster, target, options, directory).measured()


class Target:
    """The targets of rows: a new place for each run, its options, and a function that reads its content."""

    def __init__(self, kind: str, directory: Path, server: Any = None) -> None:
        self.kind = kind
        self.server = server
        self._directory = directory
        self.place = ""

    def new(self) -> dict[str, str]:
        """Makes a new place, and returns the sink's options for it."""
        name = f"t{uuid4().hex[:12]}"
        self.place = name if self.server is not None else str(self._directory / name)
        if self.kind == "kafka":
            self.server.create_topic(name, 2)
            return {"kafka.bootstrap.servers": self.server.servers, "topic": name}
        if self.kind == "postgresql":
            self._query(f"CREATE TABLE {name} (key bigint, value bigint, row bigint)")
            return {"url": self.server, "dbtable": name}
        return {}

    @property
    def broker(self) -> Any:
        """Kafka's, if that is the target."""
        return self.server if self.kind == "kafka" else None

    def rows(self) -> tuple[int, int]:
        """How many rows the place holds, and the sum of their numbers."""
        if self.kind == "kafka":
            numbers = [int(message.value()) for message in self.server.consume(self.place, 2)]
            return len(numbers), sum(numbers)
        if self.kind == "postgresql":
            count, total = self._query(f"SELECT count(*), sum(row) FROM {self.place}")
            return int(count), int(total)
        import duckdb

        if self.kind == "delta":
            from deltalake import DeltaTable

            files = ", ".join(f"'{uri}'" for uri in DeltaTable(self.place).file_uris())
        else:
            files = f"'{self.place}/**/*.parquet'"
        connection = duckdb.connect()
        count, total = connection.execute(f"SELECT count(*), sum(row) FROM read_parquet([{files}])").fetchall()[0]
        return int(count), int(total)

    def check(self, rows: int) -> None:
        """Raises BenchmarkError if the place does not hold each of the rows once."""
        wanted, found = (rows, rows * (rows - 1) // 2), self.rows()
        if found != wanted:
            raise BenchmarkError(f"the target holds {found} (rows, sum), and has to hold {wanted}")

    def _query(self, statement: str) -> Any:
        import psycopg

        with psycopg.connect(self.server, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchone() if cursor.description else None


def _broker(directory: Path) -> Any:
    from tests.support.kafka_broker import kafka_broker

    return kafka_broker(directory)


@contextmanager
def _sending(broker: Any, options: Any) -> Iterator[str]:
    """A topic with two partitions, to which another process sends messages at the rate until the end of the block."""
    topic = f"in{uuid4().hex[:12]}"
    broker.create_topic(topic, 2)
    spawned = get_context("spawn")
    over = spawned.Event()
    sender = spawned.Process(target=_send, args=(broker.servers, topic, options.rows_per_s, options.row_bytes, over))
    sender.start()
    try:
        yield topic
    finally:
        over.set()
        sender.join()


def _send(servers: str, topic: str, rows_per_s: int, size: int, over: Any) -> None:
    """Sends messages that begin with the time, in microseconds since the epoch."""
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": servers, "linger.ms": 5})
    sent, begun = 0, time.monotonic()
    while not over.wait(0.002):
        for number in range(sent, round((time.monotonic() - begun) * rows_per_s)):
            producer.produce(topic, b"%020d" % (time.time_ns() // 1000) + bytes(size - 20), partition=number % 2)
            sent = number + 1
        producer.poll(0)
    producer.flush()


@contextmanager
def target_of(kind: str, directory: Path) -> Iterator[Target]:
    """Targets of a kind of sink, with the server that they need."""
    if kind == "kafka":
        with _broker(directory) as broker:
            yield Target(kind, directory, broker)
    elif kind == "postgresql":
        from tests.support.postgres_server import postgres_server

        with postgres_server() as url:
            yield Target(kind, directory, url)
    else:
        yield Target(kind, directory)


class Runs:
    """The runs of one sink in one session."""

    def __init__(self, cluster: MiniCluster, target: Target, options: Any, directory: Path) -> None:
        self._cluster = cluster
        self._target = target
        self._options = options
        self._directory = directory
        self._checkpoints = f"{directory}/checkpoints"

    def measured(self) -> dict[str, Any]:
        """Both sides in turns, after one run that warms up."""
        options = self._options
        if not options.rounds:
            return self._latency()
        few = max(1, options.rows // 10)
        self._run(_EXACTLY, few)
        if options.seconds:
            # A second run knows the rate: the first one loads what all of them need.
            options.rows = max(few, round(few / self._run(_EXACTLY, few) * options.seconds))
            progress(f"{options.rows:,} rows for each run")
        rates: dict[str, list[float]] = {_EXACTLY: [], _AT_LEAST: []}
        for number in range(options.rounds):
            sides = list(rates) if number % 2 else list(rates)[::-1]
            for side in sides:
                rates[side].append(options.rows / self._run(side, options.rows))
                progress(f"{side}: {rates[side][-1]:,.0f} rows/s")
        exactly, at_least = median(rates[_EXACTLY]), median(rates[_AT_LEAST])
        measures: dict[str, Any] = {
            "exactly_once_rows_per_s": round(exactly),
            "at_least_once_rows_per_s": round(at_least),
            "ratio": round(exactly / at_least, 3),
            "other_side": self._other_side(),
        }
        if options.sink in ("kafka", "delta") and options.latency_s:
            measures |= self._latency()
        return measures

    def _other_side(self) -> str:
        if self._options.other == "none":
            return "no checkpoint before the end"
        own = " and deliveryGuarantee=at-least-once" if self._options.sink == "kafka" else ""
        return f"execution.checkpointing.mode=AT_LEAST_ONCE{own}"

    def _run(self, side: str, rows: int) -> float:
        """The seconds that a job takes. Raises BenchmarkError if its target does not hold each row once."""
        given, configuration = self._target.new(), self._configuration()
        if side == _AT_LEAST and self._options.other == "none":
            del configuration["execution.checkpointing.interval"]
        elif side == _AT_LEAST:
            configuration["execution.checkpointing.mode"] = "AT_LEAST_ONCE"
        if side == _AT_LEAST and self._options.sink == "kafka":
            given["deliveryGuarantee"] = "at-least-once"
        job = self._submitted("pipeline", given, str(rows), configuration)
        started = time.monotonic()
        self._cluster.wait_for_status(job, JobStatus.FINISHED, timeout_s=900)
        took = time.monotonic() - started
        self._target.check(rows)
        return took

    def _latency(self) -> dict[str, Any]:
        """How old rows are when a reader sees them, in ms."""
        options, look = self._options, {"kafka": self._ages_in_kafka, "delta": self._ages_in_delta}
        with ExitStack() as stack:
            entry, amount = "times", str(options.rows_per_s)
            if options.source == "kafka":
                broker = self._target.broker or stack.enter_context(_broker(self._directory))
                entry, amount = "copies", f"{broker.servers}/{stack.enter_context(_sending(broker, options))}"
            job = self._submitted(entry, self._target.new(), amount, self._configuration())
            try:
                seen = look[options.sink]()
            finally:
                self._cluster.call(self._cluster.dispatcher.cancel_job(job))
                self._cluster.wait_for_status(job, JobStatus.CANCELED)
        if len(seen) < options.rows_per_s * options.latency_s / 2:
            raise BenchmarkError(f"only {len(seen)} rows were seen while latency was measured")
        shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
        return {f"latency_ms_{name}": round(percentile(seen, share) or 0.0) for name, share in shares.items()}

    def _ages_in_kafka(self) -> list[float]:
        if self._options.reader == "read_uncommitted":
            return self._ages_of_messages()
        from tests.support.kafka_broker import Log

        logs = [Log(self._target.server, self._target.place, partition) for partition in range(2)]

        def look() -> list[tuple[float, int]]:
            found: list[tuple[float, int]] = []
            for log in logs:
                log.read()
                found += [(time.time(), int(value[:20])) for _, value in log.committed if value is not None]
                log.committed.clear()
            return found

        try:
            return self._ages(look)
        finally:
            for log in logs:
                log.close()

    def _ages_of_messages(self) -> list[float]:
        from confluent_kafka import Consumer, TopicPartition

        settings = {"bootstrap.servers": self._target.server.servers, "fetch.wait.max.ms": FETCH_WAIT_MS}
        settings |= {"isolation.level": "read_uncommitted", "enable.auto.commit": False}
        consumer = Consumer({**settings, "group.id": "latency"})
        consumer.assign([TopicPartition(self._target.place, partition, 0) for partition in range(2)])

        def look() -> list[tuple[float, int]]:
            messages = [message for message in consumer.consume(1000, 0.02) if message.error() is None]
            return [(time.time(), int(message.value()[:20])) for message in messages]

        try:
            return self._ages(look)
        finally:
            consumer.close()

    def _ages_in_delta(self) -> list[float]:
        log, known = Path(self._target.place) / "_delta_log", set[str]()

        def look() -> list[tuple[float, int]]:
            found: list[tuple[float, int]] = []
            for file in sorted(log.glob("*.json")):
                if file.name in known:
                    continue
                known.add(file.name)
                actions = [json.loads(line) for line in file.read_text().splitlines()]
                for path in (action["add"]["path"] for action in actions if "add" in action):
                    due = pq.read_table(log.parent / path, columns=["row"]).column("row").to_pylist()
                    found += [(file.stat().st_mtime, at) for at in due]
            time.sleep(0.02)
            return found

        return self._ages(look)

    def _ages(self, look: Callable[[], list[tuple[float, int]]]) -> list[float]:
        """Looks for the given time, from when the rows that have waited for the job's start are through."""
        ages: list[float] = []
        begun = late = time.monotonic()
        least, first = self._options.interval_ms + _SETTLED_S * 1000, None
        while first is None or time.monotonic() < first + self._options.latency_s:
            seen, now = [(at - due / 1e6) * 1000 for at, due in look()], time.monotonic()
            if first is not None:
                ages += seen
            elif now > begun + _SETTLES_S:
                raise BenchmarkError(f"after {_SETTLES_S:g} s there still are rows that are older than {least:g} ms")
            elif max(seen, default=0.0) >= least:
                late = now
            elif seen and now > late + 2 * _SETTLED_S:
                first = now
        return ages

    def _configuration(self) -> dict[str, str]:
        return {
            "execution.checkpointing.interval": f"{self._options.interval_ms} ms",
            "execution.checkpointing.dir": self._checkpoints,
            "restart-strategy.type": "none",
        }

    def _submitted(self, entry: str, given: dict[str, str], amount: str, configuration: dict[str, str]) -> str:
        job = self._cluster.submit(
            PIPELINES / "sink.py",
            entry=f"sink:{entry}",
            arguments=[self._options.sink, self._target.place, json.dumps(given), amount],
            configuration=configuration,
            parallelism=self._options.parallelism,
        )
        self._cluster.wait_for_status(job, JobStatus.RUNNING, timeout_s=300)
        return job


if __name__ == "__main__":
    run_main(main)
