"""Format ``kafka``: the records of topics, in Spark's columns. A split is a partition; its position is an offset.

Positions are restored from checkpoints only. If the program names a consumer group, offsets are also committed to it,
so that tools show the lag; the source never reads them back. Partitions that appear while the job runs are read from
their beginnings. A bounded source reads each partition up to the end that it had at the start.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event
from typing import Annotated, Any, ClassVar, NotRequired, TypedDict

import pyarrow as pa
from msgspec import Meta

from ckpt_runtime.connectors.kafka_reader import (
    DATA_LOSS,
    PASSING,
    KafkaReader,
    Partition,
    lost_data,
    named,
    partition_of,
    place,
)
from ckpt_runtime.connectors.splits import BuiltInSource
from ckpt_runtime.graph.kafka_options import (
    EARLIEST,
    LATEST,
    PREFIX,
    KafkaSubscription,
    connection_settings,
    consumer_settings,
    offsets_by_partition,
    start,
    subscription,
)
from ckpt_runtime.graph.schema import NonNegative
from ckpt_runtime.operators.task_context import HelperThread
from ckpt_runtime.sources import (
    PositionKind,
    Split,
    SplitEnumerator,
    SplitReader,
    StartPosition,
)

_LOG = logging.getLogger(__name__)
_ANSWER_S = 5.0
_FIRST_ANSWER_S = 60.0
"""How long a source waits for its brokers when no snapshot says that they have ever answered."""
_POLL_FOUND_MS = 100

_WITHOUT_IDS = ("_UNSUPPORTED_FEATURE", "UNSUPPORTED_VERSION")
_NO_ID = "A" * 22
"""The id of a topic as text, where brokers have none (before Kafka 2.8)."""

_Number = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]


class _SentPartitions(TypedDict):
    """The state of an enumerator: see :class:`KafkaEnumerator`."""

    partitions: dict[str, dict[_Number, NonNegative | None]]
    looked: bool
    splits: NonNegative
    topics: NotRequired[dict[str, str]]


class _PartitionRange(TypedDict):
    """The offsets of a partition that make up a split; ``end`` is None for an unbounded one."""

    topic: str
    partition: Annotated[int, Meta(ge=0, lt=1 << 31)]
    begin: NonNegative
    end: NonNegative | None


class KafkaSource(BuiltInSource):
    """The source of format ``kafka``."""

    state_type: Any = _SentPartitions
    description_type: Any = _PartitionRange
    position_type: Any = NonNegative
    start_positions: ClassVar[frozenset[PositionKind]] = frozenset({"earliest", "latest", "timestamp", "offsets"})

    @property
    def acknowledges(self) -> bool:
        """Whether the program names a group to commit to."""
        return any(key.lower() == f"{PREFIX}group.id" for key in self._values[PREFIX])

    def open_enumerator(self, schema: pa.Schema, state: Any, *, bounded: bool) -> SplitEnumerator:
        return KafkaEnumerator(self._values, state, bounded=bounded)

    def repositioned(
        self, schema: pa.Schema, state: Any, reading: Sequence[tuple[Split, Any]], position: StartPosition
    ) -> Any:
        """Partitions that ``offsets`` do not name keep their position; those without one start at their beginning."""
        kept = {
            (topic, int(number)): end
            for topic, partitions in state["partitions"].items()
            for number, end in partitions.items()
            if end is not None
        }
        for split, offset in reading:
            key = partition_of(split)
            at = split.description["begin"] if offset is None else offset
            kept[key] = min(at, kept[key]) if key in kept else at
        given = None if position.kind != "offsets" else offsets_by_partition(position.offsets)
        brokers = _Brokers(self._values)
        try:
            partitions = brokers.partitions(set(kept))
            topics = brokers.topic_ids(partitions)
            found = _positions(brokers, partitions, kept, position, given)
        finally:
            brokers.close()
        return _state_of(found, topics, looked=True, splits=state["splits"])

    def open_reader(self, schema: pa.Schema, *, subtask: int, parallelism: int) -> SplitReader:
        limit = self._values["maxOffsetsPerTrigger"]
        return KafkaReader(self._values, schema, limit=None if limit is None else max(1, limit // parallelism))


@dataclass(slots=True)
class _Found:
    """The result of a discovery: splits, partitions that no longer exist, partitions without anything to read, and the
    ids of the topics."""

    splits: list[Split]
    gone: list[Partition]
    empty: dict[Partition, int]
    topics: dict[str, str]


class BrokersAwayError(RuntimeError):
    """No broker answers. The text has the addresses and the client's reason."""


class _Brokers:
    """Asks the brokers for partitions and offsets. Raises KafkaException while they do not answer."""

    def __init__(self, options: dict[str, Any]) -> None:
        from confluent_kafka import Consumer
        from confluent_kafka.admin import AdminClient

        self._subscription: KafkaSubscription = subscription(options)
        self._settings = consumer_settings(options)
        self._reason = ""
        self._consumer = Consumer({**self._settings, "enable.partition.eof": False, "error_cb": self._failed})
        self._admin: Any = AdminClient(connection_settings(self._settings))

    def _failed(self, error: Any) -> None:
        if error.name() != "_ALL_BROKERS_DOWN":  # which says less than the errors before it
            self._reason = error.str()

    def away(self, error: Exception) -> BrokersAwayError:
        """The error of brokers that have not answered, with the reason that the client has found meanwhile."""
        self._consumer.poll(0)
        return BrokersAwayError(
            f"kafka: no broker answers at {self._settings['bootstrap.servers']}: {self._reason or error}; check "
            "kafka.bootstrap.servers, and the options kafka.security.protocol, kafka.sasl.* and kafka.ssl.*"
        )

    @property
    def refresh_s(self) -> float:
        """How long to wait between two looks for partitions."""
        return float(self._settings["topic.metadata.refresh.interval.ms"]) / 1000

    def by_time(self, partition: Partition, time_ms: int) -> int | None:
        """The offset of the first record that is not older; None without one."""
        [found] = self._consumer.offsets_for_times([place(partition, time_ms)], timeout=_ANSWER_S)
        return int(found.offset) if found.offset >= 0 else None

    def ends(self, partition: Partition) -> tuple[int, int]:
        """The offset of the first record, and the one after the last record."""
        low, high = self._consumer.get_watermark_offsets(place(partition), timeout=_ANSWER_S)
        return int(low), int(high)

    def partitions(self, known: Collection[Partition]) -> set[Partition]:
        """The partitions that the options name and that exist.

        Raises ValueError for a topic that does not, unless some of its partitions are ``known``, and for a partition
        of option ``assign`` that does not and is not ``known``.
        """
        from confluent_kafka import KafkaException

        wanted = self._subscription
        topics = self._consumer.list_topics(timeout=_ANSWER_S).topics
        if wanted.partitions is not None:
            there = {(name, number) for name, topic in topics.items() for number in topic.partitions}
            asked = {(name, number) for name, numbers in wanted.partitions.items() for number in numbers}
            for name, number in sorted(asked - there - set(known)):
                found = named(sorted(each for each in there if each[0] == name)) or "no such topic"
                raise ValueError(
                    f"option 'assign': {named([(name, number)])} does not exist at "
                    f"{self._settings['bootstrap.servers']}; there is {found}"
                )
            return asked & there
        if wanted.pattern is not None:
            names = [name for name in topics if wanted.pattern.fullmatch(name)]
        else:
            for name in wanted.topics:
                error = topics[name].error if name in topics else None
                if error is not None and error.name() not in DATA_LOSS:
                    raise KafkaException(error)
            names = [name for name in wanted.topics if name in topics and topics[name].error is None]
            missing = [name for name in wanted.topics if name not in names]
            if missing and not any(name == topic for name in missing for topic, _ in known):
                raise ValueError(f"topic {missing[0]!r} does not exist at {self._settings['bootstrap.servers']}")
        return {(name, number) for name in names for number in topics[name].partitions}

    def topic_ids(self, partitions: Collection[Partition]) -> dict[str, str]:
        """The ids of topics that exist, as far as brokers have ids: a topic that is created again has another one."""
        from confluent_kafka import KafkaException, TopicCollection

        names = sorted({topic for topic, _ in partitions})
        if not names:
            return {}
        ids: dict[str, str] = {}
        for name, described in self._admin.describe_topics(TopicCollection(names), request_timeout=_ANSWER_S).items():
            try:
                ids[name] = str(described.result().topic_id)
            except KafkaException as error:
                if error.args[0].name() not in (*DATA_LOSS, *_WITHOUT_IDS):
                    raise
        return {name: found for name, found in ids.items() if found != _NO_ID}

    def close(self) -> None:
        self._consumer.close()
        self._admin = None


def _positions(
    brokers: _Brokers,
    partitions: Collection[Partition],
    kept: Mapping[Partition, int],
    position: StartPosition,
    given: Mapping[str, Mapping[int, int]] | None,
) -> dict[Partition, int | None]:
    """The offset at which each partition continues. Raises ValueError for one that the partition does not have."""
    unknown = [
        (topic, at) for topic, numbers in (given or {}).items() for at in numbers if (topic, at) not in partitions
    ]
    if unknown:
        raise ValueError(f"the offsets name {named(unknown)}, which the source does not read or which does not exist")
    found: dict[Partition, int | None] = {}
    for partition in sorted(partitions):
        low, high = brokers.ends(partition)
        asked = EARLIEST if position.kind == "earliest" else LATEST
        if position.kind == "timestamp":
            assert position.time_ms is not None
            by_time = brokers.by_time(partition, position.time_ms)
            asked = LATEST if by_time is None else by_time
        elif given is not None:
            topic, number = partition
            asked = given.get(topic, {}).get(number, kept.get(partition, EARLIEST))
            if partition in kept and number not in given.get(topic, {}):
                found[partition] = asked
                continue
        offset = {EARLIEST: low, LATEST: high}.get(asked, asked)
        if not low <= offset <= high:
            raise ValueError(f"{named([partition])} has the offsets {low} to {high}, but {offset} was requested")
        found[partition] = offset
    return found


def _state_of(
    known: Mapping[Partition, int | None], topics: Mapping[str, str], *, looked: bool, splits: int
) -> _SentPartitions:
    """The stored form of an enumerator."""
    partitions: dict[str, dict[str, int | None]] = {}
    for (topic, partition), end in known.items():
        partitions.setdefault(topic, {})[str(partition)] = end
    return {"partitions": partitions, "looked": looked, "splits": splits, "topics": dict(topics)}


def _offsets_of(split: Split) -> int:
    """The number of offsets of a bounded split."""
    return int(split.description["end"] - split.description["begin"])


class KafkaEnumerator(SplitEnumerator):
    """Finds partitions. A thread queries the brokers, unless the source is bounded.

    State: the partitions that were sent, by topic, each with the offset up to which it is read, null without an end;
    the ids of the topics; and the number of splits so far, which makes their ids unique.
    """

    idle_ms = _POLL_FOUND_MS

    def __init__(self, options: dict[str, Any], state: Any, *, bounded: bool) -> None:
        self._options = options
        self._bounded = bounded
        self._known: dict[Partition, int | None] = {
            (topic, int(partition)): end
            for topic, partitions in ({} if state is None else state["partitions"]).items()
            for partition, end in partitions.items()
        }
        self._is_first = state is None or not state["looked"]
        self._splits = 0 if state is None else state["splits"]
        self._topics: dict[str, str] = dict({} if state is None else state.get("topics", {}))
        if bounded and any(end is None for end in self._known.values()):
            raise ValueError(
                "the partitions of the restored snapshot are read without an end, which availableNow would change; "
                "leave it out, or give the source a new uid"
            )
        self._brokers = _Brokers(options)
        self._found: SimpleQueue[_Found | Exception] = SimpleQueue()
        self._taken = Event()
        self._closed = Event()
        self._left: list[Split] | None = None
        self._thread = None if bounded else HelperThread(target=self._watch, name="kafka partitions", daemon=True)
        if self._thread is not None:
            self._thread.start()

    def discover(self) -> Sequence[Split]:
        if self._bounded:
            found: _Found | Exception = self._next_batch()
        else:
            try:
                found = self._found.get_nowait()
            except Empty:
                return ()
        if isinstance(found, Exception):
            raise found
        self._is_first = False
        for partition in found.gone:
            self._known.pop(partition, None)
        self._known.update(found.empty)
        self._topics = found.topics
        for split in found.splits:
            self._known[partition_of(split)] = split.description["end"]
        self._splits += len(found.splits)
        self._taken.set()
        return found.splits

    def snapshot(self) -> Any:
        return _state_of(self._known, self._topics, looked=not self._is_first, splits=self._splits)

    def close(self) -> None:
        self._closed.set()
        self._taken.set()
        if self._thread is not None:
            self._thread.join(_ANSWER_S)
        self._brokers.close()

    def _next_batch(self) -> _Found:
        """The next ``maxOffsetsPerTrigger`` offsets of what there was at first, dealt out by what is left.

        This is Spark's rule (``KafkaOffsetReader.rateLimit``): each partition gets its share, rounded down, or one.
        """
        found = _Found([], [], {}, self._topics) if self._left is not None else self._look_once()
        whole = found.splits if self._left is None else self._left
        limit, total = self._options["maxOffsetsPerTrigger"], sum(map(_offsets_of, whole))
        found.splits, self._left = [], []
        for split in whole:
            begin, end = split.description["begin"], split.description["end"]
            share = limit * (_offsets_of(split) / total) if limit is not None else end - begin
            upto = min(end, begin + (math.floor(share) if share >= 1 else 1))
            found.splits.append(self._split(partition_of(split), begin, upto, len(found.splits)))
            if upto < end:
                self._left.append(self._split(partition_of(split), upto, end, 0))
        return found

    def _split(self, partition: Partition, begin: int, end: int | None, number: int) -> Split:
        """A split that is the one with that number of a discovery."""
        topic, at = partition
        description = {"topic": topic, "partition": at, "begin": begin, "end": end}
        return Split(f"{topic}-{at}#{self._splits + number}", description, bounded=end is not None)

    def _look_once(self) -> _Found:
        from confluent_kafka import KafkaException

        try:
            return self._look()
        except KafkaException as error:
            raise (self._brokers.away(error) if error.args[0].name() in PASSING else error) from None

    def _watch(self) -> None:
        """Discovers partitions periodically. If brokers do not answer, it keeps trying, unless they never have."""
        from confluent_kafka import KafkaException

        deadline = time.monotonic() + _FIRST_ANSWER_S
        while not self._closed.is_set():
            try:
                found = self._look()
            except KafkaException as error:
                away = self._brokers.away(error)
                if self._is_first and time.monotonic() > deadline:
                    self._found.put(away)
                    return
                _LOG.warning("kafka: the partitions cannot be listed now: %s", away)
            except Exception as error:
                self._found.put(error)
                return
            else:
                if found.splits or found.gone or found.topics != self._topics or self._is_first:
                    self._taken.clear()
                    self._found.put(found)
                    if not self._closed.is_set():
                        self._taken.wait()  # the same partitions would be discovered again until then
            self._closed.wait(self._brokers.refresh_s)

    def _look(self) -> _Found:
        """Discovers partitions without changing state. A partition that was read to an end continues from there.

        An offset that was reached in a deleted topic may exist in one that was created with its name, so only the ids
        of topics show the difference. If loss is allowed, partitions that are being read continue at their offsets,
        because their readers cannot be asked to leave them, and the others begin again.
        """
        there = self._brokers.partitions(self._known)
        ids = self._brokers.topic_ids(there)  # before offsets: a topic may be created again at any moment
        gone = sorted(set(self._known) - there)
        if gone:
            lost_data(self._options, f"partitions {named(gone)} no longer exist")
        for topic, before in self._topics.items():
            if ids.get(topic, before) != before:
                problem = f"its id was {before}, and is {ids[topic]} now"
                lost_data(self._options, f"topic {topic!r} was deleted and created again: {problem}")
                ended = (each for each, end in self._known.items() if each[0] == topic and end is not None)
                gone += [partition for partition in ended if partition not in gone]
        topics = {topic: ids.get(topic) or self._topics.get(topic) for topic, _ in there}
        found = _Found([], gone, {}, {topic: known for topic, known in topics.items() if known is not None})
        for partition in sorted(there):
            if partition in gone or partition not in self._known or self._known[partition] is not None:
                self._add_split(partition, found)
        return found

    def _add_split(self, partition: Partition, found: _Found) -> None:
        begin = None if partition in found.gone else self._known.get(partition)
        if begin is None:
            begin = self._begin(partition)
        end = self._brokers.ends(partition)[1] if self._bounded else None
        if end is not None and end <= begin:
            found.empty[partition] = begin  # the next run continues here
            return
        found.splits.append(self._split(partition, begin, end, len(found.splits)))

    def _begin(self, partition: Partition) -> int:
        """Returns the first offset to read. Partitions that appear later are read from the beginning."""
        begin = start(self._options)
        if not self._is_first:
            return self._brokers.ends(partition)[0]
        number = begin.of(*partition)
        if begin.by_time:
            return self._by_time(partition, number, latest_if_none=begin.latest_if_none)
        if number == EARLIEST:
            return self._brokers.ends(partition)[0]
        return self._brokers.ends(partition)[1] if number == LATEST else number

    def _by_time(self, partition: Partition, time_ms: int, *, latest_if_none: bool) -> int:
        found = self._brokers.by_time(partition, time_ms)
        if found is not None:
            return found
        if not latest_if_none:
            raise ValueError(
                f"{named([partition])} has no record of time {time_ms} ms or later; give a smaller time, or "
                "startingOffsetsByTimestampStrategy=latest"
            )
        return self._brokers.ends(partition)[1]
