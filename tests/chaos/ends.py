"""Jobs between two systems under chaos: what feeds them, and what their targets must hold in the end.

A thread feeds the source until the run ends. Targets are read by other libraries than those of the sinks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

from tests.chaos.oracle import Input, compare, running_totals
from tests.support.kafka_broker import committed, kafka_broker
from tests.support.patience import patient
from tests.support.postgres_server import running_postgres
from tests.support.spark_sessions import wait_until

TICK_S = 0.1
PARTITIONS = 2
_FED_S = patient(600.0)
"""How long the target may take for the rows that wait when the source ends."""
_SETTLED_S = patient(120.0)


class Ends:
    """A source, a job and a target. ``per_tick`` orders come each tenth of a second."""

    entry: str

    def __init__(self, directory: Path, output: Path, made: Input, per_tick: int) -> None:
        self.directory, self.output, self.made, self.per_tick = directory, output, made, per_tick
        self.running = ExitStack()
        self.fed: list[tuple[int, int, int]] = []
        self._ends = threading.Event()
        self._error: BaseException | None = None
        self._feeder = threading.Thread(target=self._feed, name="orders", daemon=True)

    def start(self) -> None:
        """Starts the systems, and the thread that feeds the source."""
        self.prepare()
        self._feeder.start()
        self.running.callback(self._ends.set)

    def finish(self) -> None:
        """Ends the source, and waits until the target has as many rows as it must have."""
        self._ends.set()
        self._feeder.join(patient(60))
        if self._error is not None:
            raise self._error
        wait_until(lambda: len(self.found()) >= len(self.wanted()), "the target to have all rows", _FED_S)

    def check(self) -> None:
        """Raises WrongOutput for other rows, and AssertionError if something is left beside them."""
        compare(self.entry, self.wanted(), self.found())
        wait_until(lambda: self.left() == [], f"nothing to be left, unlike {self.left()}", _SETTLED_S)

    def close(self) -> None:
        self.running.close()

    def prepare(self) -> None:
        raise NotImplementedError

    def arguments(self) -> tuple[str, ...]:
        """Arguments of the pipeline."""
        raise NotImplementedError

    def send(self, orders: list[tuple[int, int, int]]) -> None:
        """Gives orders to the source."""
        raise NotImplementedError

    def outages(self) -> Sequence[Callable[[], AbstractContextManager[None]]]:
        """How the target can be away inside of a block, if it is a server and not a directory."""
        return ()

    def wanted(self) -> list[tuple[Any, ...]]:
        """A row for each order: what its key had come to."""
        return running_totals(self.fed)

    def found(self) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def left(self) -> list[str]:
        """What the target holds beside rows."""
        return []

    def _feed(self) -> None:
        orders = [row[:3] for row in self.made.orders[: self.made.rows]]
        try:
            while len(self.fed) < len(orders) and not self._ends.wait(TICK_S):
                batch = orders[len(self.fed) : len(self.fed) + self.per_tick]
                self.send(batch)
                self.fed += batch
        except BaseException as error:
            self._error = error


class _FromKafka(Ends):
    def prepare(self) -> None:
        from confluent_kafka import Producer

        self.broker = self.running.enter_context(kafka_broker(self.directory))
        self.broker.create_topic("orders", PARTITIONS)
        self._producer = Producer({"bootstrap.servers": self.broker.servers, "batch.num.messages": 1})

    def send(self, orders: list[tuple[int, int, int]]) -> None:
        for number, key, amount in orders:
            value = json.dumps({"id": number, "key": key, "amount": amount}).encode()
            self._producer.produce("orders", value, partition=key % PARTITIONS)
        left = self._producer.flush(patient(60))
        assert left == 0, f"the broker has not taken {left} orders"


class KafkaToKafka(_FromKafka):
    """Read by the marks in the broker's log: it does not report aborted transactions to consumers."""

    entry = "ends_job:kafka_to_kafka"

    def prepare(self) -> None:
        super().prepare()
        self.broker.create_topic("totals", 1)

    def arguments(self) -> tuple[str, ...]:
        return (self.broker.servers,)

    def outages(self) -> Sequence[Callable[[], AbstractContextManager[None]]]:
        return (self.broker.silent,)

    def found(self) -> list[tuple[Any, ...]]:
        rows = [json.loads(value) for _, value in committed(self.broker, "totals").committed if value is not None]
        return [(row["key"], row["orders"], row["amount"], row["id"]) for row in rows]

    def left(self) -> list[str]:
        return [f"transaction of producer {producer}" for producer in committed(self.broker, "totals").open]


class KafkaToDelta(_FromKafka):
    """Read by DuckDB, from the files of the newest version."""

    entry = "ends_job:kafka_to_delta"

    def arguments(self) -> tuple[str, ...]:
        return (self.broker.servers, str(self.output / "totals"))

    def found(self) -> list[tuple[Any, ...]]:
        import duckdb

        files = self._files()
        if not files:
            return []
        return duckdb.execute(f"SELECT key, orders, amount, id FROM read_parquet({files!r})").fetchall()

    def left(self) -> list[str]:
        known = {Path(file).name for file in self._files()}
        return sorted(path.name for path in (self.output / "totals").glob("*.parquet") if path.name not in known)

    def _files(self) -> list[str]:
        from deltalake import DeltaTable

        table = str(self.output / "totals")
        return sorted(DeltaTable(table).file_uris()) if DeltaTable.is_deltatable(table) else []


class FilesToPostgres(Ends):
    """Read by psycopg."""

    entry = "ends_job:files_to_postgres"

    def prepare(self) -> None:
        self._server = self.running.enter_context(running_postgres())
        self._run("CREATE TABLE orders (id bigint, key bigint, amount bigint, twice bigint)")
        self._source = self.directory / "orders"
        self._source.mkdir()

    def arguments(self) -> tuple[str, ...]:
        return (str(self._source), self._server.url)

    def send(self, orders: list[tuple[int, int, int]]) -> None:
        lines = [json.dumps({"id": number, "key": key, "amount": amount}) for number, key, amount in orders]
        name = f"{orders[0][0]:09d}.json"
        (self._source / f".{name}").write_text("\n".join(lines))
        (self._source / f".{name}").rename(self._source / name)

    def wanted(self) -> list[tuple[Any, ...]]:
        return [(number, key, amount, 2 * amount) for number, key, amount in self.fed if number % 7]

    def outages(self) -> Sequence[Callable[[], AbstractContextManager[None]]]:
        return (self._server.silent, self._server.down)

    def found(self) -> list[tuple[Any, ...]]:
        return self._run("SELECT id, key, amount, twice FROM orders")

    def left(self) -> list[str]:
        tables = self._run("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")
        waiting = self._run("SELECT name FROM ckpt_staged")
        return sorted({name for (name,) in (*tables, *waiting)} - {"orders", "ckpt_commits", "ckpt_staged"})

    def _run(self, statement: str) -> list[tuple[Any, ...]]:
        """On a connection of its own: the server may have crashed meanwhile."""
        import psycopg

        with psycopg.connect(self._server.url, autocommit=True) as database:
            found = database.execute(statement)
            return found.fetchall() if found.description else []


KINDS: dict[str, Callable[[Path, Path, Input, int], Ends]] = {
    "kafka-to-kafka": KafkaToKafka,
    "kafka-to-delta": KafkaToDelta,
    "files-to-postgres": FilesToPostgres,
}
