"""Targets of built-in sinks, read by a library that the sink does not use, and what is left there beside the rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import duckdb
import pytest
from s3fs import S3FileSystem

from ckpt_runtime.storage.filesystem import resolve
from tests.support.kafka_broker import KafkaBroker, committed, kafka_broker
from tests.support.object_store import keys, unfinished_uploads
from tests.support.postgres_server import PostgresServer, running_postgres

FORMATS = ("parquet", "delta", "kafka", "postgresql", "postgresql-prepared", "foreachBatch", "json-s3")
"""``json-s3`` is JSON in the object store of the tests, which has to run."""


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
    elif format_ == "json-s3":
        objects = _Objects()
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
        lines = [
            json.loads(line)
            for file in sorted((self.place / "_delta_log").glob("*.json"))
            for line in file.read_text().splitlines()
        ]
        known = {Path(line["add"]["path"]).name for line in lines if "add" in line}
        files = {path.name for path in self.place.rglob("*.parquet") if "_delta_log" not in path.parts}
        transactions = [(line["txn"]["appId"], line["txn"]["version"]) for line in lines if "txn" in line]
        repeated = {str(entry) for entry in transactions if transactions.count(entry) > 1}
        return [*super().left(), *sorted(files - known), *sorted(repeated)]


def numbers_once(target: Target) -> list[int]:
    """The numbers that are there. Asserts that none of them is there twice."""
    found = sorted(target.numbers())
    assert len(found) == len(set(found))
    return found
