"""A server of Kafka's protocol for readers alone, whose logs tests write offset by offset.

It serves what the broker of the tests cannot: aborted transactions, as Kafka lists them for readers of committed
messages; records that compaction has removed; times that the log has set; offsets by time; and more partitions.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

_FETCH, _LIST_OFFSETS, _METADATA, _FIND_COORDINATOR, _VERSIONS = 1, 2, 3, 10, 18
_SERVED = {0: (3, 3), _FETCH: (4, 4), _LIST_OFFSETS: (2, 2), _METADATA: (2, 2), _FIND_COORDINATOR: (0, 0)}
"""The versions of each request. Nothing can be produced: clients take it as a sign of what they may be sent."""
_LATEST, _EARLIEST = -1, -2
_UNKNOWN_TOPIC, _COORDINATOR_NOT_AVAILABLE = 3, 15
_TRANSACTIONAL, _CONTROL, _LOG_TIME = 0x10, 0x20, 0x08


def _varint(value: int) -> bytes:
    rest, data = (value << 1) ^ (value >> 63), bytearray()
    while rest > 0x7F:
        data.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*data, rest])


def _batch(offset: int, records: list[tuple[int, bytes, bytes]], attributes: int, producer: int, at_ms: int) -> bytes:
    """``records`` are (difference of offsets, key, value)."""
    encoded = b""
    for delta, key, value in records:
        body = b"\0" + _varint(0) + _varint(delta) + _varint(len(key)) + key + _varint(len(value)) + value + b"\0"
        encoded += _varint(len(body)) + body
    last = records[-1][0]
    return _stored(offset, last, encoded, len(records), attributes, producer, at_ms)


def _stored(
    offset: int, last: int, encoded: bytes, records: int, attributes: int = 0, producer: int = -1, at_ms: int = 0
) -> bytes:
    head = struct.pack(">hiqqqhii", attributes, last, at_ms, at_ms, producer, 0, -1, records)
    rest = struct.pack(">ibI", 0, 2, 0) + head + encoded  # clients do not look at the checksum by default
    return struct.pack(">qi", offset, len(rest)) + rest


@dataclass
class Log:
    """The log of a partition. ``end`` is the offset of what comes next."""

    end: int = 0
    batches: list[tuple[int, int, bytes]] = field(default_factory=list)
    """The last offset and the time of each batch, and its bytes."""
    aborted: list[tuple[int, int, int]] = field(default_factory=list)
    """The producer, the first offset and the marker's offset of aborted transactions."""
    open: dict[int, int] = field(default_factory=dict)
    """The first offset of each producer's open transaction."""

    def add(self, *values: int, producer: int = -1, at_ms: int = 0, log_time: bool = False) -> None:
        """Adds a batch of messages, those of a ``producer`` in its transaction, which begins with them."""
        if producer >= 0:
            self.open.setdefault(producer, self.end)
        attributes = (_TRANSACTIONAL if producer >= 0 else 0) | (_LOG_TIME if log_time else 0)
        records = [(at, b"", b"%d" % value) for at, value in enumerate(values)]
        self._append(_batch(self.end, records, attributes, producer, at_ms), len(values), at_ms)

    def finish(self, producer: int, *, commit: bool) -> None:
        """Adds the marker of a transaction."""
        first = self.open.pop(producer)
        if not commit:
            self.aborted.append((producer, first, self.end))
        marker = [(0, struct.pack(">hh", 0, int(commit)), struct.pack(">hi", 0, 0))]
        self._append(_batch(self.end, marker, _TRANSACTIONAL | _CONTROL, producer, 0), 1, 0)

    def compact(self, records: int, *, is_last: bool = False) -> None:
        """Leaves so many offsets without a record. Behind the last record, Kafka keeps a batch without records."""
        if is_last:
            self._append(_stored(self.end, records - 1, b"", 0), records, 0)
        else:
            self.end += records

    @property
    def stable(self) -> int:
        """The offset up to which readers of committed messages read."""
        return min(self.open.values(), default=self.end)

    def _append(self, batch: bytes, offsets: int, at_ms: int) -> None:
        self.end += offsets
        self.batches.append((self.end - 1, at_ms, batch))


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, form: str) -> int:
        (value,) = struct.unpack_from(f">{form}", self._data, self._at)
        self._at += struct.calcsize(f">{form}")
        return int(value)

    def text(self) -> str:
        length = self.take("h")
        begin, self._at = self._at, self._at + max(length, 0)
        return self._data[begin : self._at].decode()

    def partitions(self, *forms: str) -> Iterator[tuple[str, list[int]]]:
        """Each partition of a request, by its topic, with its numbers."""
        for _ in range(self.take("i")):
            topic = self.text()
            for _ in range(self.take("i")):
                yield topic, [self.take(form) for form in forms]


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


class KafkaLogs:
    """``logs`` has the partitions of each topic. Tests change them between the requests of clients."""

    def __init__(self) -> None:
        self.logs: dict[str, list[Log]] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._port: int = self._listener.getsockname()[1]
        self._connections: list[socket.socket] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self._port}"

    def topic(self, name: str, partitions: int = 1) -> list[Log]:
        """Adds partitions to a topic, which is created if there is none. Returns the topic's logs."""
        logs = self.logs.setdefault(name, [])
        logs.extend(Log() for _ in range(partitions))
        return logs

    def close(self) -> None:
        self._over.set()
        for connection in (self._listener, *self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                self._threads.append(threading.Thread(target=self._serve, args=(connection,)))
                self._threads[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection.makefile("rb") as requests:
            while len(size := requests.read(4)) == 4:
                request = _Reader(requests.read(struct.unpack(">i", size)[0]))
                kind, _, number = request.take("h"), request.take("h"), request.take("i")
                request.text()
                answer = struct.pack(">i", number) + self._answer(kind, request)
                connection.sendall(struct.pack(">i", len(answer)) + answer)

    def _answer(self, kind: int, request: _Reader) -> bytes:
        if kind == _VERSIONS:  # in its version 3
            served = {**_SERVED, _VERSIONS: (3, 3)}
            entries = (struct.pack(">hhhb", key, *versions, 0) for key, versions in served.items())
            return struct.pack(">hb", 0, len(served) + 1) + b"".join(entries) + struct.pack(">ib", 0, 0)
        if kind == _METADATA:
            return self._metadata(request)
        if kind == _FIND_COORDINATOR:
            return struct.pack(">hi", _COORDINATOR_NOT_AVAILABLE, -1) + _text("") + struct.pack(">i", -1)
        return self._offsets(request) if kind == _LIST_OFFSETS else self._fetched(request)

    def _metadata(self, request: _Reader) -> bytes:
        count = request.take("i")
        names = list(self.logs) if count < 0 else [request.text() for _ in range(count)]
        answer = struct.pack(">ii", 1, 1) + _text("127.0.0.1") + struct.pack(">ih", self._port, -1)
        answer += _text("logs") + struct.pack(">ii", 1, len(names))
        for name in names:
            partitions = range(len(self.logs.get(name, ())))
            answer += struct.pack(">h", 0 if partitions else _UNKNOWN_TOPIC) + _text(name) + b"\0"
            answer += struct.pack(">i", len(partitions))
            answer += b"".join(struct.pack(">hiiiiii", 0, number, 1, 1, 1, 1, 1) for number in partitions)
        return answer

    def _offsets(self, request: _Reader) -> bytes:
        request.take("i")
        committed = request.take("b")
        answers = []
        for topic, (number, time_ms) in request.partitions("i", "q"):
            log = self.logs[topic][number]
            later = (last for last, at_ms, _ in log.batches if at_ms >= time_ms)  # batches of one message
            end = log.stable if committed else log.end
            offset = {_LATEST: end, _EARLIEST: 0}.get(time_ms, next(later, -1) if time_ms >= 0 else -1)
            answers.append((topic, struct.pack(">ihqq", number, 0, -1, offset)))
        return struct.pack(">i", 0) + _by_topic(answers)

    def _fetched(self, request: _Reader) -> bytes:
        request.take("i")
        wait_ms, _, _, committed = request.take("i"), request.take("i"), request.take("i"), request.take("b")
        asked = [(topic, number, offset) for topic, (number, offset, _) in request.partitions("i", "q", "i")]
        for _ in range(2):
            found = [(topic, self._records(topic, number, offset, committed)) for topic, number, offset in asked]
            if any(records for _, (_, records) in found) or self._over.wait(min(wait_ms, 20) / 1000):
                break
        return struct.pack(">i", 0) + _by_topic([(topic, head + records) for topic, (head, records) in found])

    def _records(self, topic: str, number: int, offset: int, committed: int) -> tuple[bytes, bytes]:
        log = self.logs[topic][number]
        end = log.stable if committed else log.end
        records = b"".join(batch for last, _, batch in log.batches if offset <= last < end)
        aborted = [(producer, first) for producer, first, marker in log.aborted if marker >= offset]
        head = struct.pack(">ihqqi", number, 0, log.end, log.stable, len(aborted))
        head += b"".join(struct.pack(">qq", *entry) for entry in aborted) + struct.pack(">i", len(records))
        return head, records


def _by_topic(answers: list[tuple[str, bytes]]) -> bytes:
    """An array with an entry for each partition, which names its topic again."""
    entries = (_text(topic) + struct.pack(">i", 1) + answer for topic, answer in answers)
    return struct.pack(">i", len(answers)) + b"".join(entries)


@contextmanager
def kafka_logs() -> Iterator[KafkaLogs]:
    """Serves logs until the end of the block."""
    served = KafkaLogs()
    try:
        yield served
    finally:
        served.close()
