"""Options of format ``kafka`` at planning time: Spark's names and their meaning here. Never connects to a broker."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.options import Option, java_pattern, names_of

PREFIX = "kafka."
"""Options with this prefix are properties of the client library."""

EARLIEST, LATEST = -2, -1
"""Offsets that stand for a partition's beginning and end, as in Spark."""

KAFKA_SOURCE_OPTIONS = (
    Option("subscribe"),
    Option("subscribePattern", java_pattern),
    Option("assign"),
    Option("startingOffsets", default="latest"),
    Option("startingTimestamp", int, None, minimum=0),
    Option("startingOffsetsByTimestamp"),
    Option("startingOffsetsByTimestampStrategy", default="error", choices=("error", "latest")),
    Option("failOnDataLoss", bool, True),
    Option("maxOffsetsPerTrigger", int, None, minimum=1),
    Option("includeHeaders", bool, False),
    Option("groupIdPrefix", default="ckpt"),
    Option("minPartitions", int, None, minimum=1),
    Option("maxRecordsPerPartition", int, None, minimum=1),
    Option("minOffsetsPerTrigger", int, None, minimum=1),
    Option("maxTriggerDelay"),
    Option("kafkaConsumer.pollTimeoutMs", int, None, minimum=0),
    Option("fetchOffset.numRetries", int, None, minimum=0),
    Option("fetchOffset.retryIntervalMs", int, None, minimum=0),
)
"""The last seven have no effect: they determine how Spark divides tasks, waits for a batch and repeats requests."""

_REFRESH = "topic.metadata.refresh.interval.ms"
_OWN = (
    "auto.offset.reset",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "enable.partition.eof",
    "value.deserializer",
)
_OF_JAVA = {
    "key.deserializer": "keys and values are bytes; cast them in the program",
    "value.deserializer": "keys and values are bytes; cast them in the program",
    "interceptor.classes": "interceptors are not supported",
    "buffer.memory": "use kafka.queue.buffering.max.kbytes",
    "default.api.timeout.ms": "leave it out, the source waits for brokers",
    "fetch.max.wait.ms": "use kafka.fetch.wait.max.ms",
    "max.block.ms": "leave it out, the sink waits while the client's queue is full",
    "max.request.size": "use kafka.message.max.bytes",
    "ssl.truststore.location": "use kafka.ssl.ca.location, a PEM file of certificates",
    "ssl.keystore.location": "use kafka.ssl.certificate.location and kafka.ssl.key.location, which are PEM files",
}


def kafka_columns(*, headers: bool) -> pa.Schema:
    """Spark's columns of a record."""
    header = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
    columns: list[tuple[str, pa.DataType]] = [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
    ]
    if headers:
        columns.append(("headers", pa.list_(header)))
    return pa.schema(columns)


@dataclass(frozen=True, slots=True)
class KafkaSubscription:
    """The topics and partitions that a source reads: topics by name or by a pattern that the whole name has to match,
    or given partitions.
    """

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    partitions: Mapping[str, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class KafkaStart:
    """Where a source starts in partitions without a stored position: one ``offset`` for all, or one per partition.

    ``by_time``: the numbers are times in ms, and mean the first record that is not older.
    """

    offset: int | None = None
    partitions: Mapping[str, Mapping[int, int]] | None = None
    by_time: bool = False
    latest_if_none: bool = False

    def of(self, topic: str, partition: int) -> int:
        """The offset or time of a partition. Raises ValueError if a start by partitions does not name it."""
        if self.partitions is None:
            assert self.offset is not None
            return self.offset
        try:
            return self.partitions[topic][partition]
        except KeyError:
            raise ValueError(
                f"partition {partition} of topic {topic!r} is read, but the given offsets or times do not include it; "
                "name all partitions"
            ) from None


def kafka_schema(options: dict[str, Any], declared: pa.Schema | None) -> pa.Schema:
    """Checks the options of a source. Raises PlanError for a bad one, or a missing library."""
    if declared is not None:
        raise PlanError("schema", "the columns of format 'kafka' are fixed; do not set a schema")
    subscription(options)
    start(options)
    settings = consumer_settings(options)
    check_client("Consumer", settings)
    if float(settings[_REFRESH]) <= 0:
        raise PlanError(
            f"option 'kafka.{_REFRESH}'",
            f"{settings[_REFRESH]} ms is not a valid time between two lookups of partitions; use assign for fixed "
            "partitions",
        )
    return kafka_columns(headers=options["includeHeaders"])


def subscription(options: Mapping[str, Any]) -> KafkaSubscription:
    """Exactly one of ``subscribe``, ``subscribePattern`` and ``assign`` selects the partitions."""
    given = [key for key in ("subscribe", "subscribePattern", "assign") if options[key]]
    if len(given) != 1:
        raise PlanError("option 'subscribe'", "set exactly one of subscribe, subscribePattern and assign")
    if options["assign"]:
        named = _json_object("assign", options["assign"])
        try:
            partitions = {topic: tuple(map(int, numbers)) for topic, numbers in named.items()}
        except (TypeError, ValueError):
            partitions = {}
        if not any(partitions.values()) or any(number < 0 for numbers in partitions.values() for number in numbers):
            raise PlanError("option 'assign'", 'expected the numbers of partitions in JSON, such as {"orders": [0, 1]}')
        return KafkaSubscription(partitions=partitions)
    if options["subscribePattern"]:
        return KafkaSubscription(pattern=options["subscribePattern"])
    topics = names_of(options["subscribe"])
    if not topics:
        raise PlanError("option 'subscribe'", "it names no topic")
    return KafkaSubscription(topics=topics)


def start(options: Mapping[str, Any]) -> KafkaStart:
    """As in Spark, a start by time takes precedence over one by offsets."""
    if_none = options["startingOffsetsByTimestampStrategy"] == "latest"
    if options["startingTimestamp"] is not None:
        return KafkaStart(options["startingTimestamp"], by_time=True, latest_if_none=if_none)
    if options["startingOffsetsByTimestamp"]:
        times = _by_partition("startingOffsetsByTimestamp", options["startingOffsetsByTimestamp"], least=0)
        return KafkaStart(partitions=times, by_time=True, latest_if_none=if_none)
    text = options["startingOffsets"].strip()
    if text.lower() in ("earliest", "latest"):
        return KafkaStart(EARLIEST if text.lower() == "earliest" else LATEST)
    return KafkaStart(partitions=_by_partition("startingOffsets", text, least=EARLIEST))


def consumer_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a consumer, without its group."""
    given = client_properties(options, _OWN)
    return {
        "isolation.level": "read_committed",
        "queued.max.messages.kbytes": 16_384,
        _REFRESH: 5_000,
        "group.id": options["groupIdPrefix"],
        **given,
        "auto.offset.reset": "error" if options["failOnDataLoss"] else "earliest",
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
    }


def client_properties(options: Mapping[str, Any], own: tuple[str, ...]) -> dict[str, str]:
    """The properties of the client library, without their prefix. ``own`` are those that the engine sets."""
    given = {key[len(PREFIX) :].lower(): value for key, value in options[PREFIX].items()}
    if not given.get("bootstrap.servers"):
        raise PlanError("option 'kafka.bootstrap.servers'", "format 'kafka' needs it")
    check_java(given)
    for key in given:
        if key in own:
            raise PlanError(f"option 'kafka.{key}'", "the engine sets it, because offsets are part of checkpoints")
    return with_credentials(given)


def check_java(settings: Mapping[str, str]) -> None:
    """Raises PlanError for a setting that only the Java client has; the message says what to do instead."""
    for key in settings:
        if key in _OF_JAVA:
            raise PlanError(f"option 'kafka.{key}'", f"it belongs to the Java client: {_OF_JAVA[key]}")


_JAAS = "sasl.jaas.config"
_LOGIN = re.compile(
    r"""\s*[\w.]*\.(?:Plain|Scram)LoginModule\s+\w+((?:\s+\w+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s;"']+))*)\s*;\s*"""
)
_LOGIN_OPTION = re.compile(r"""(\w+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;"']+))""")


def with_credentials(settings: dict[str, str]) -> dict[str, str]:
    """The settings of a client, with user and password instead of the Java client's line that has both.

    Raises PlanError, without the line, for one of another login module than those of PLAIN and SCRAM.
    """
    if _JAAS not in settings:
        return settings
    login = _LOGIN.fullmatch(settings[_JAAS])
    given = {name: "".join(values) for name, *values in _LOGIN_OPTION.findall(login[1])} if login else {}
    if given.keys() != {"username", "password"}:
        raise PlanError(
            f"option '{PREFIX}{_JAAS}'",
            "expected PlainLoginModule or ScramLoginModule with username and password; otherwise use the settings of "
            "librdkafka, such as kafka.sasl.username, kafka.sasl.password, kafka.sasl.oauthbearer.config",
        )
    others = {key: value for key, value in settings.items() if key != _JAAS}
    return {"sasl.username": given["username"], "sasl.password": given["password"], **others}


_OF_CONNECTIONS = (
    "bootstrap.", "client.", "enable.sasl.", "enable.ssl.", "https.", "log_level", "reconnect.", "sasl.", "security.",
    "socket.", "ssl.",
)  # fmt: skip


def connection_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that say how brokers are reached, which are valid for each kind of client."""
    return {key: value for key, value in settings.items() if key.startswith(_OF_CONNECTIONS)}


def check_client(kind: str, settings: Mapping[str, Any]) -> None:
    """Has the library check the settings of a ``Consumer`` or ``Producer``. Raises PlanError."""
    try:
        import confluent_kafka
    except ImportError:
        raise PlanError("format", "format 'kafka' needs a library: pip install 'ckpt-runtime[kafka]'") from None
    try:
        client = getattr(confluent_kafka, kind)({**settings, "log_level": 0})
    except confluent_kafka.KafkaException as error:
        raise PlanError("option 'kafka.*'", str(error.args[0].str())) from None
    if kind == "Consumer":
        client.close()


def _json_object(key: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise PlanError(f"option {key!r}", f"it is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise PlanError(f"option {key!r}", "expected a JSON object with the names of topics")
    return value


def offsets_by_partition(value: Any) -> dict[str, dict[int, int]]:
    """The numbers by topic and partition in a value of JSON. Raises ValueError for a value of another form."""
    try:
        return {
            topic: {int(partition): int(number) for partition, number in partitions.items()}
            for topic, partitions in value.items()
        }
    except (AttributeError, TypeError, ValueError):
        raise ValueError('expected JSON such as {"orders": {"0": 23, "1": 42}}') from None


def _by_partition(key: str, text: str, least: int) -> dict[str, dict[int, int]]:
    try:
        named = offsets_by_partition(_json_object(key, text))
    except ValueError:
        raise PlanError(f"option {key!r}", 'expected JSON such as {"orders": {"0": 23, "1": 42}}') from None
    for topic, partitions in named.items():
        for partition, number in partitions.items():
            if number < least:
                raise PlanError(f"option {key!r}", f"{number} of partition {partition} of {topic!r} is below {least}")
    return named
