"""Targets of built-in sinks, read by a library that the sink does not use, and what is left there beside the rows."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from s3fs import S3FileSystem

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast, wait_for_restarts
from tests.support.kafka_broker import KafkaBroker, committed, kafka_broker
from tests.support.object_store import keys, unfinished_uploads
from tests.support.postgres_server import PostgresServer, running_postgres

FORMATS = ("parquet", "delta", "kafka", "postgresql", "postgresql-prepared", "foreachBatch", "json-s3", "delta-s3")
"""Those that end in ``-s3`` lie in the object store of the tests, which has to run."""
ROWS = 4_000


class Target:
    """``options`` lead a sink to the place; :meth:`numbers` reads its column ``n``, each row once."""

    def __init__(
        self,
        options: dict[str, str],
        numbers: Callable[[], list[int]],
        left: Callable[[], list[str]],
        server: KafkaBroker | PostgresServer | None = None,
    ) -> None:
        self.options = options
        self.server = server
        self.numbers = numbers
        self.left = left
        """Names what is in the place and belongs to no row: hidden files, transactions, tables."""


@contextmanager
def target(format_: str, directory: Path) -> Iterator[Target]:
    """A new place for a format."""
    if format_ == "kafka":
        with kafka_broker(directory) as broker:
            broker.create_topic("numbers", 1)

            def values() -> list[int]:
                rows = committed(broker, "numbers").committed
                numbers = [int(key) for key, _ in rows if key is not None]
                assert [value for _, value in rows] == [b"%d" % n if n % 2 == 0 else None for n in numbers]
                return numbers

            options = {"kafka.bootstrap.servers": broker.servers, "topic": "numbers"}

            def open_ones() -> list[str]:
                return [f"transaction {key}" for key in committed(broker, "numbers").open]

            yield Target(options, values, open_ones, broker)
    elif format_.startswith("postgresql"):
        psycopg = pytest.importorskip("psycopg", reason="pip install 'ckpt-runtime[postgres]'")
        with running_postgres() as server:

            def column(query: str) -> list[Any]:
                with psycopg.connect(server.url, autocommit=True) as database:
                    return [value for (value,) in database.execute(query).fetchall()]

            with psycopg.connect(server.url, autocommit=True) as database:
                database.execute("CREATE TABLE numbers (n bigint, part text)")

            def left() -> list[str]:
                tables = column("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
                found = set(tables) - {"numbers", "ckpt_commits", "ckpt_staged"}
                waiting = column("SELECT name FROM ckpt_staged")
                return sorted({*found, *waiting, *column("SELECT gid FROM pg_prepared_xacts")})

            more = {"preparedTransactions": "true"} if format_ == "postgresql-prepared" else {}
            yield Target(
                {"url": server.url, "dbtable": "numbers", **more}, lambda: column("SELECT n FROM numbers"), left, server
            )
    elif format_.endswith("-s3"):
        objects = _Objects() if format_ == "json-s3" else _DeltaObjects()
        yield Target({"path": objects.place.url}, objects.numbers, objects.left)
    else:
        place = directory / "target"
        kind = _Delta if format_ == "delta" else _Files
        reader = kind(place)
        yield Target({"path": str(place)}, reader.numbers, reader.left)


class _Objects:
    """Files of JSON lines in a new bucket."""

    def __init__(self) -> None:
        bucket = f"bucket-{uuid4().hex}"
        S3FileSystem(use_listings_cache=False).mkdir(bucket)
        self.place = resolve(f"s3://{bucket}/target")

    def numbers(self) -> list[int]:
        files = [key for key in keys(self.place.url) if key.rpartition("/")[2].startswith("part-")]
        texts = (self.place.filesystem.cat_file(f"{self.place.path}/{key}") for key in files)
        return [json.loads(line)["n"] for text in texts for line in text.splitlines()]

    def left(self) -> list[str]:
        return [key for key in keys(self.place.url) if key.startswith(".")] + unfinished_uploads(self.place)


class _DeltaObjects(_Objects):
    """A Delta table in a new bucket, read by deltalake."""

    def numbers(self) -> list[int]:
        deltalake = pytest.importorskip("deltalake", reason="pip install 'ckpt-runtime[delta]'")
        try:  # without is_deltatable, which keeps the interpreter from serving the request of this very process
            table = deltalake.DeltaTable(self.place.url)
        except deltalake.exceptions.TableNotFoundError:
            return []
        numbers: list[int] = table.to_pyarrow_table().column("n").to_pylist()
        return numbers

    def left(self) -> list[str]:
        """Also files that no version of the table has, and versions that repeat a transaction."""
        found = keys(self.place.url)
        log = [key for key in found if key.startswith("_delta_log/")]
        texts = [self.place.filesystem.cat_file(f"{self.place.path}/{key}").decode() for key in log if ".json" in key]
        files = {key for key in found if key.endswith(".parquet") and key not in log}
        return [*super().left(), *_strangers(texts, files)]


class _Files:
    """A directory of Parquet files, read by DuckDB."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def files(self) -> list[str]:
        found = (path.relative_to(self.place) for path in self.place.rglob("*.parquet"))
        # Hidden files, and the directories in which Spark is writing.
        return sorted(
            str(self.place / path) for path in found if not any(part.startswith((".", "_")) for part in path.parts)
        )

    def numbers(self) -> list[int]:
        files = self.files()
        if not files:
            return []
        return [n for (n,) in duckdb.execute(f"SELECT n FROM read_parquet({files!r})").fetchall()]

    def left(self) -> list[str]:
        names = [path.name for path in self.place.rglob("*") if path.suffix != ".crc"]  # Spark's own checksums
        return [name for name in names if name.startswith((".part", "_ckpt"))]


class _Delta(_Files):
    """A Delta table: the files of its newest version, by deltalake, with their rows, by DuckDB."""

    def files(self) -> list[str]:
        deltalake = pytest.importorskip("deltalake", reason="pip install 'ckpt-runtime[delta]'")
        if not (self.place / "_delta_log").exists():
            return []
        return sorted(deltalake.DeltaTable(self.place).file_uris())

    def left(self) -> list[str]:
        """Also files that no version of the table has, and versions that repeat a transaction."""
        texts = [file.read_text() for file in (self.place / "_delta_log").glob("*.json")]
        files = {path.name for path in self.place.rglob("*.parquet") if "_delta_log" not in path.parts}
        return [*super().left(), *_strangers(texts, files)]


def _strangers(log: Iterable[str], files: set[str]) -> list[str]:
    """The files that a table's log does not name, and the transactions that it has more than once."""
    lines = [json.loads(line) for text in log for line in text.splitlines()]
    known = {Path(line["add"]["path"]).name for line in lines if "add" in line}
    transactions = [(line["txn"]["appId"], line["txn"]["version"]) for line in lines if "txn" in line]
    return [*sorted(files - known), *sorted({str(entry) for entry in transactions if transactions.count(entry) > 1})]


def numbers_once(target: Target) -> list[int]:
    """The numbers that are there. Asserts that none of them is there twice."""
    found = sorted(target.numbers())
    assert len(found) == len(set(found))
    return found


class Numbers:
    """Jobs that write the numbers below ``ROWS`` to one target."""

    def __init__(self, cluster: MiniCluster, format_: str, place: Target, directory: Path) -> None:
        self.cluster, self.format, self.target = cluster, format_, place
        self.faults, self.source = directory / "faults", directory / "numbers.parquet"
        self.directory = directory
        self.faults.mkdir()
        pq.write_table(pa.table({"n": pa.array(range(ROWS), pa.int64())}), self.source)

    def start(
        self,
        rate: int,
        savepoint: str | None = None,
        mode: str = "EXACTLY_ONCE",
        *,
        fork: bool = False,
        restart_delay: str = "0 ms",
    ) -> str:
        checkpoints = str(self.directory / "checkpoints")
        options = fast(execution__checkpointing__interval="200ms", execution__checkpointing__dir=checkpoints)
        options["execution.checkpointing.mode"] = mode
        options["restart-strategy.fixed-delay.delay"] = restart_delay
        return self.cluster.submit(
            PIPELINES / "killed_sinks.py",
            arguments=[
                self.format,
                str(self.source),
                str(rate),
                json.dumps(self.target.options),
                str(self.faults),
            ],
            configuration=options,
            parallelism=2,
            savepoint=savepoint,
            fork=fork,
        )

    def kill_at(self, job: str, step: str) -> None:
        """Waits until the process has been killed at the step, and until the job has completed a checkpoint again.

        A clean-up belongs to a restart, for which another kill is needed.
        """
        before = self.cluster.restarts(job)
        steps = (step, "write") if step == "clean-up" else (step,)
        for each in steps:
            (self.faults / each).touch()
        for each in steps:
            self.cluster.wait_until(lambda each=each: not (self.faults / each).exists(), f"a kill at {each}")  # type: ignore[misc]
        wait_for_restarts(self.cluster, job, before + 1)
        self.cluster.wait_for_checkpoints(job, 1)

    def kill_at_random(self, job: str, moments: random.Random) -> None:
        before = self.cluster.restarts(job)
        pause = time.monotonic() + moments.uniform(0, 0.5)
        self.cluster.wait_until(lambda: time.monotonic() > pause, "the moment of a kill")
        os.kill(moments.choice(self.cluster.worker_pids(job)), signal.SIGKILL)
        wait_for_restarts(self.cluster, job, before + 1)
        self.cluster.wait_for_checkpoints(job, 1)

    def stopped(self, job: str) -> str:
        return self.cluster.savepoint(job, self.directory / "savepoints", stop=True)

    def finish(self, savepoint: str) -> None:
        self.cluster.wait_for_status(self.start(0, savepoint), JobStatus.FINISHED)

    def left(self) -> list[str]:
        """What lies beside the rows, and staged rows of functions."""
        staged = self.directory / "checkpoints" / "staged"
        return [*self.target.left(), *(path.name for path in (staged.iterdir() if staged.exists() else ()))]
