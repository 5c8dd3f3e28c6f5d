"""Reads the partitions of a Kafka source: one consumer for a subtask, which reads range by range."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from ckpt_runtime.graph.kafka_options import consumer_settings
from ckpt_runtime.sources import Offsets, Split, SplitReader, SplitRows

_LOG = logging.getLogger(__name__)
_CONSUMED_AT_ONCE = 4_096
_MOST_BUFFERED_BYTES = 16 << 20
_BYTES_OF_RECORD = 64
_TIME_TYPES = {0: -1, 1: 0, 2: 1}
"""From the library's types of timestamps to Kafka's: none, of the producer, of the log."""

DATA_LOSS = (
    "_AUTO_OFFSET_RESET",
    "OFFSET_OUT_OF_RANGE",
    "UNKNOWN_TOPIC_OR_PART",
    "_UNKNOWN_PARTITION",
    "_UNKNOWN_TOPIC",
)
PASSING = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE")

Partition = tuple[str, int]


@dataclass(slots=True)
class _Assigned:
    """A partition being read. ``target`` ends the range; rows after it wait, so that no partition runs ahead.

    ``at_end``: there was no record after the last one when the broker was queried; ``log_end`` was the end of the log
    then, which includes transaction markers.
    """

    split: Split
    position: int
    target: int | None = None
    at_end: bool = False
    log_end: int = -1
    buffered_bytes: int = 0
    paused: bool = False
    is_gone: bool = False
    buffered: deque[Any] = field(default_factory=deque)

    @property
    def end(self) -> int | None:
        end: int | None = self.split.description["end"]
        return end

    @property
    def bound(self) -> int | None:
        """The offset up to which rows may be emitted now; None before the range has an end."""
        if self.target is None:
            return None
        return self.target if self.end is None else min(self.target, self.end)

    @property
    def next_offset(self) -> int:
        """Where the next record is, as far as that is known: aborted transactions and compaction leave gaps."""
        return int(self.buffered[0].offset()) if self.buffered else self.position

    @property
    def has_rows(self) -> bool:
        bound = self.bound
        return bool(self.buffered) and bound is not None and self.buffered[0].offset() < bound

    @property
    def is_over(self) -> bool:
        """Whether it was read to its end, or no longer exists. The last offsets may be transaction markers."""
        if self.is_gone:
            return not self.has_rows
        if self.end is None:
            return False
        if self.buffered:
            return bool(self.buffered[0].offset() >= self.end)
        return self.position >= self.end or (self.at_end and self.log_end >= self.end)

    def take(self, most_rows: int) -> list[Any]:
        """Returns the next records up to the bound."""
        messages: list[Any] = []
        while len(messages) < most_rows and self.has_rows:
            message = self.buffered.popleft()
            self.buffered_bytes -= len(message) + _BYTES_OF_RECORD
            messages.append(message)
        if messages:
            self.position = messages[-1].offset() + 1
        return messages

    def reached(self) -> bool:
        """Whether all rows of the range were emitted."""
        if self.is_gone:
            return True
        if self.buffered:
            return self.target is not None and self.buffered[0].offset() >= self.target
        return self.at_end or (self.target is not None and self.position >= self.target)


class KafkaReader(SplitReader):
    """Reads its partitions with one consumer, range by range: up to the ends that they had when the range began.

    ``limit`` is the maximum number of records of a range, shared among partitions by the records that wait in each.
    """

    pauses_splits = True

    def __init__(self, options: dict[str, Any], schema: pa.Schema, limit: int | None) -> None:
        from confluent_kafka import Consumer

        self._options = options
        self._schema = schema
        self._limit = limit
        self._consumer = Consumer(consumer_settings(options))
        self._assigned: dict[Partition, _Assigned] = {}
        self._order: deque[Partition] = deque()
        self._read_to_end: dict[Partition, int] = {}
        self._later: deque[tuple[Split, Any]] = deque()
        self._paused: Set[str] = frozenset()

    def add(self, split: Split, position: Any) -> None:
        """Adds an offset range of a partition. It waits while an earlier range of the same partition is being read."""
        key = partition_of(split)
        begin = split.description["begin"] if position is None else position
        if key in self._assigned:
            self._later.append((split, position))
            return
        self._assigned[key] = _Assigned(split, begin)
        self._order.append(key)
        self._consumer.incremental_assign([place(key, begin)])

    @property
    def idle_ms(self) -> int:
        """Polls again at once while records of the next range are already buffered."""
        return 0 if any(assigned.has_rows for assigned in self._running) else 10

    @property
    def holds_event_time(self) -> bool:
        return not all(assigned.reached() for assigned in self._running)

    def pause(self, split_ids: Set[str]) -> None:
        """Records of paused partitions are fetched as far as the buffer has room."""
        self._paused = split_ids

    @property
    def _running(self) -> Iterator[_Assigned]:
        """The partitions that are not paused."""
        return (assigned for assigned in self._assigned.values() if assigned.split.id not in self._paused)

    def read(self, most_rows: int) -> SplitRows | None:
        rows = self._next_rows(most_rows)
        if rows is None:
            self._consume()
            rows = self._next_rows(most_rows)
        return rows

    def begin_range(self) -> None:
        waiting = {key: self._waiting(key, assigned) for key, assigned in self._assigned.items()}
        total = sum(filter(None, waiting.values()))
        for key, assigned in self._assigned.items():
            count = waiting[key]
            if count is not None and self._limit is not None and total > self._limit:
                count = -(-count * self._limit // total)
            assigned.target = None if count is None else assigned.next_offset + count

    def backlog(self) -> int | None:
        waiting = [self._waiting(key, assigned) for key, assigned in self._assigned.items()]
        return None if None in waiting else sum(filter(None, waiting))

    def offsets(self) -> tuple[Offsets, Offsets] | None:
        reached: dict[str, dict[str, int]] = {}
        latest: dict[str, dict[str, int]] = {}
        for (topic, partition), end in self._read_to_end.items():
            reached.setdefault(topic, {})[str(partition)] = latest.setdefault(topic, {})[str(partition)] = end
        for key, assigned in self._assigned.items():
            reached.setdefault(key[0], {})[str(key[1])] = assigned.position
            if (waiting := self._waiting(key, assigned)) is not None:
                latest.setdefault(key[0], {})[str(key[1])] = assigned.next_offset + waiting
        return reached, latest

    def completed(self, positions: Mapping[str, Any], ended: Sequence[Split]) -> None:
        """Commits offsets to the group, for tools that show the lag."""
        from confluent_kafka import KafkaException

        by_id = {assigned.split.id: key for key, assigned in self._assigned.items()}
        offsets = [
            place(by_id[split_id], position)
            for split_id, position in positions.items()
            if split_id in by_id and position is not None
        ]
        offsets += [place(partition_of(split), split.description["end"]) for split in ended]
        if not offsets:
            return
        try:
            self._consumer.commit(offsets=offsets, asynchronous=not ended)
        except KafkaException as error:
            _LOG.warning("kafka: offsets were not committed to the group, so its lag is shown too high: %s", error)

    def close(self) -> None:
        self._assigned.clear()
        self._consumer.close()

    def _next_rows(self, most_rows: int) -> SplitRows | None:
        """Rows of the next partition that has some, in turn."""
        for _ in range(len(self._order)):
            self._order.rotate(-1)
            key = self._order[0]
            assigned = self._assigned[key]
            if assigned.split.id in self._paused:
                continue
            if assigned.target is None and (count := self._waiting(key, assigned)) is not None:
                share = None if self._limit is None else max(1, self._limit // len(self._assigned))
                assigned.target = assigned.next_offset + (count if share is None else min(count, share))
            messages = assigned.take(most_rows)
            if messages:
                self._resume(key, assigned)
                return SplitRows(
                    assigned.split.id, assigned.position, self._batch_of(messages), origin=_origin_in(messages)
                )
            if assigned.is_over:
                self._drop(key)
                return SplitRows(assigned.split.id, assigned.position, ended=True)
        return None

    def _waiting(self, key: Partition, assigned: _Assigned) -> int | None:
        """The number of offsets from the next record to the partition's end; None before the first answer."""
        if assigned.at_end and not assigned.buffered:
            return 0
        high = self._consumer.get_watermark_offsets(place(key), cached=True)[1]
        if assigned.buffered:
            high = max(high, assigned.buffered[-1].offset() + 1)
        if high < 0:
            return None
        end = high if assigned.end is None else min(high, assigned.end)
        return max(0, int(end) - assigned.next_offset)

    def _consume(self) -> None:
        from confluent_kafka import KafkaException

        for message in self._consumer.consume(_CONSUMED_AT_ONCE, timeout=0):
            error = message.error()
            assigned = self._assigned.get((message.topic(), message.partition()))
            if error is None:
                if assigned is not None:
                    assigned.at_end = False
                    assigned.buffered.append(message)
                    assigned.buffered_bytes += len(message) + _BYTES_OF_RECORD
            elif error.name() == "_PARTITION_EOF":
                if assigned is not None:
                    assigned.at_end, assigned.log_end = True, message.offset()
            elif error.name() in DATA_LOSS:
                lost_data(self._options, f"{named([(message.topic(), message.partition())])}: {error.str()}")
                if assigned is not None and error.name() != "OFFSET_OUT_OF_RANGE":
                    assigned.is_gone = True
            elif not error.retriable() and error.name() not in PASSING:
                raise KafkaException(error)
        for key, assigned in self._assigned.items():
            if assigned.buffered_bytes > _MOST_BUFFERED_BYTES and not assigned.paused:
                self._consumer.pause([place(key)])
                assigned.paused = True

    def _resume(self, key: Partition, assigned: _Assigned) -> None:
        if assigned.paused and assigned.buffered_bytes < _MOST_BUFFERED_BYTES // 4:
            self._consumer.resume([place(key)])
            assigned.paused = False

    def _drop(self, key: Partition) -> None:
        self._consumer.incremental_unassign([place(key)])
        self._read_to_end[key] = self._assigned.pop(key).position
        self._order.remove(key)
        later, self._later = self._later, deque()
        for split, position in later:
            self.add(split, position)

    def _batch_of(self, messages: Sequence[Any]) -> pa.RecordBatch:
        first = messages[0]
        times = [message.timestamp() for message in messages]
        columns = [
            pa.array([message.key() for message in messages], pa.binary()),
            pa.array([message.value() for message in messages], pa.binary()),
            pa.repeat(pa.scalar(first.topic(), pa.string()), len(messages)),
            pa.repeat(pa.scalar(first.partition(), pa.int32()), len(messages)),
            pa.array([message.offset() for message in messages], pa.int64()),
            pa.array([at * 1000 for _, at in times], pa.int64()).cast(self._schema.field("timestamp").type),
            pa.array([_TIME_TYPES[kind] for kind, _ in times], pa.int32()),
        ]
        if len(self._schema) > len(columns):
            headers = [
                None if not (given := message.headers()) else [{"key": key, "value": value} for key, value in given]
                for message in messages
            ]
            columns.append(pa.array(headers, self._schema.field("headers").type))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


def _origin_in(messages: Sequence[Any]) -> Callable[[int], tuple[str, bytes | None]]:
    def origin(at: int) -> tuple[str, bytes | None]:
        found = messages[at]
        place = f"topic {found.topic()!r}, partition {found.partition()}, offset {found.offset()}"
        return place, found.value()

    return origin


def partition_of(split: Split) -> Partition:
    """The partition that a split is a range of."""
    return split.description["topic"], split.description["partition"]


def place(partition: Partition, *offset: int) -> Any:
    """A partition, perhaps with an offset or a time, as the library takes it, which is only loaded when it is used."""
    from confluent_kafka import TopicPartition

    return TopicPartition(*partition, *offset)


def named(partitions: Sequence[Partition]) -> str:
    """Partitions as Kafka's tools name them."""
    return ", ".join(f"{topic}-{partition}" for topic, partition in partitions)


def lost_data(options: Mapping[str, Any], problem: str) -> None:
    """Reports records that may be lost. Raises ValueError unless the option says that the source continues."""
    if options["failOnDataLoss"]:
        raise ValueError(
            f"kafka: {problem}; records may have been deleted before they were read. With failOnDataLoss=false the "
            "source continues with the remaining records"
        )
    _LOG.warning("kafka: %s; the source continues with the remaining records", problem)
