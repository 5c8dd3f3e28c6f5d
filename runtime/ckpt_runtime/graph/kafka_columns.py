"""Format ``kafka`` as a sink, at planning time: Spark's columns and options, and the client's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pyarrow as pa

from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.kafka_options import PREFIX, check_java, with_credentials
from ckpt_runtime.graph.options import Option, parse_value

_SERVERS = "bootstrap.servers"
_OWN = ("enable.idempotence", "transactional.id")
_CLASSES = ("key.serializer", "value.serializer")
_TRANSACTION_TIMEOUT = "transaction.timeout.ms"
_DEFAULT_TRANSACTION_TIMEOUT_MS = 900_000
"""The default of the brokers' ``transaction.max.timeout.ms``."""

DELIVERY_GUARANTEE = Option("deliveryGuarantee", default="exactly-once", choices=("exactly-once", "at-least-once"))
ON_MISSING = Option("onMissing", default="fail", choices=("fail", "ignore"))
KAFKA_SINK_OPTIONS = (DELIVERY_GUARANTEE, ON_MISSING, Option("topic"))

_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_PROTOCOLS = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
_TLS = (
    "ssl.ca.location",
    "ssl.ca.pem",
    "ssl.certificate.location",
    "ssl.certificate.pem",
    "ssl.endpoint.identification.algorithm",
    "ssl.key.location",
    "ssl.key.password",
    "ssl.key.pem",
)
"""TLS settings that the engine's own requests support. Other settings would apply to the producer alone."""


_TOPIC = re.compile("[a-zA-Z0-9._-]{1,249}")


def sink_topic(options: Mapping[str, str]) -> str | None:
    """The topic of all rows; None if the column ``topic`` names the topic of each row."""
    return next((value for key, value in options.items() if key.lower() == "topic"), None)


def producer_settings(options: Mapping[str, str]) -> dict[str, str]:
    """The client's settings: the options with the prefix ``kafka.``.

    By default a key has the partition that Java's producers, also Spark's, choose for it.
    """
    lower = {key.lower(): value for key, value in options.items()}
    given = {key.removeprefix(PREFIX): text for key, text in lower.items() if key.startswith(PREFIX)}
    return with_credentials({"partitioner": "murmur2_random", **given})


def is_exactly_once(options: Mapping[str, str]) -> bool:
    """Whether messages become visible with checkpoints, in transactions. Raises PlanError for a bad option."""
    return _value(DELIVERY_GUARANTEE, options) == "exactly-once"


def ignores_lost(options: Mapping[str, str]) -> bool:
    """Whether a restore continues without the rows of a transaction that the brokers have aborted."""
    return _value(ON_MISSING, options) == "ignore"


def transaction_settings(options: Mapping[str, str]) -> dict[str, str]:
    """The settings of a client that writes transactions, without its transactional id."""
    return {_TRANSACTION_TIMEOUT: str(_DEFAULT_TRANSACTION_TIMEOUT_MS), **producer_settings(options)}


def transaction_timeout_ms(options: Mapping[str, str]) -> int:
    """The age at which brokers abort an open transaction. Raises PlanError for a bad value."""
    text = transaction_settings(options)[_TRANSACTION_TIMEOUT]
    if not (text.isascii() and text.isdigit()):
        raise PlanError(f"option '{PREFIX}{_TRANSACTION_TIMEOUT}'", f"{text!r} is not a number of milliseconds")
    return int(text)


def check_transactions(options: Mapping[str, str], interval_ms: int | None, timeout_ms: int) -> None:
    """Raises PlanError if transactions may be older than brokers allow before a checkpoint commits them.

    ``interval_ms`` is the time between checkpoints, None without periodic ones; ``timeout_ms`` that of one checkpoint.
    """
    if not is_exactly_once(options):
        return
    if interval_ms is None:
        raise PlanError(
            "format",
            "'kafka' commits messages with checkpoints, and brokers abort transactions that stay open: set "
            f"execution.checkpointing.interval, or the sink's option {DELIVERY_GUARANTEE.key}=at-least-once",
        )
    allowed = transaction_timeout_ms(options)
    if allowed <= interval_ms + timeout_ms:
        raise PlanError(
            f"option '{PREFIX}{_TRANSACTION_TIMEOUT}'",
            f"brokers abort a transaction after {allowed} ms, but a checkpoint may start {interval_ms} ms after its "
            f"first message and take {timeout_ms} ms: raise the option (brokers allow up to their "
            "transaction.max.timeout.ms), or lower execution.checkpointing.interval or "
            "execution.checkpointing.timeout",
        )


def check_kafka_sink(options: Mapping[str, str], schema: pa.Schema) -> None:
    """Raises PlanError for options and columns that Spark's sink would not take, and settings that the client lacks."""
    known = {option.key.lower() for option in KAFKA_SINK_OPTIONS}
    for key in options:
        if key.lower() not in known and not key.lower().startswith(PREFIX):
            names = ", ".join(sorted(option.key for option in KAFKA_SINK_OPTIONS))
            raise PlanError(
                f"option {key!r}", f"format 'kafka' takes {names}, and settings of the client as kafka.NAME"
            )
    ignores_lost(options)
    settings = transaction_settings(options) if is_exactly_once(options) else producer_settings(options)
    if _SERVERS not in settings:
        raise PlanError(f"option '{PREFIX}{_SERVERS}'", "format 'kafka' needs it")
    check_java(settings)
    for name in (*_OWN, *_CLASSES):
        if name in settings:
            raise PlanError(f"option '{PREFIX}{name}'", "the engine sets it; do not set it")
    topic = sink_topic(options)
    if topic is not None and not (_TOPIC.fullmatch(topic) and topic not in (".", "..")):
        problem = "is not a topic's name: up to 249 letters, digits and the characters . _ -"
        raise PlanError("option 'topic'", f"{topic!r} {problem}")
    _check_columns(schema, has_topic=topic is not None)
    if is_exactly_once(options):
        _check_security(settings)
        settings = {**settings, "transactional.id": "planned"}
    try:
        from confluent_kafka import KafkaException, Producer
    except ImportError:
        raise PlanError("format", "'kafka' needs a library: pip install 'ckpt-runtime[kafka]'") from None
    try:
        Producer({**settings, "log_level": 0})
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise PlanError("options", f"the Kafka client (librdkafka) does not accept its settings: {reason}") from None


def _value(option: Option, options: Mapping[str, str]) -> object:
    given = next((value for key, value in options.items() if key.lower() == option.key.lower()), None)
    return option.default if given is None else parse_value(option, given)


def _check_security(settings: Mapping[str, str]) -> None:
    """Raises PlanError for settings with which the engine cannot commit a transaction after a crash."""
    protocol = settings.get("security.protocol", "plaintext").lower()
    instead = f"; option {DELIVERY_GUARANTEE.key}=at-least-once works with every setting of the client"
    if protocol.startswith("sasl"):
        mechanism = settings.get("sasl.mechanism", settings.get("sasl.mechanisms", "GSSAPI")).upper()
        if mechanism not in _MECHANISMS:
            raise PlanError(
                f"option '{PREFIX}sasl.mechanism'",
                f"exactly once works with {', '.join(_MECHANISMS)}, not with {mechanism}{instead}",
            )
    odd = [key for key in settings if key.startswith("ssl.") and key not in _TLS]
    if odd and protocol.endswith("ssl"):
        raise PlanError(f"option '{PREFIX}{odd[0]}'", f"exactly once works with {', '.join(_TLS)}{instead}")
    if protocol not in _PROTOCOLS:
        raise PlanError(f"option '{PREFIX}security.protocol'", f"{protocol!r} is not one of {', '.join(_PROTOCOLS)}")


def _check_columns(schema: pa.Schema, *, has_topic: bool) -> None:
    texts = (pa.string(), pa.binary())
    header = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
    known = {"key": texts, "value": texts, "topic": (pa.string(),), "partition": (pa.int32(),)}
    for name, kinds in known.items():
        if name in schema.names and schema.field(name).type not in kinds:
            allowed = " or ".join(map(str, kinds))
            raise PlanError(f"column {name!r}", f"it is {schema.field(name).type}, but must be {allowed}: cast it")
    if "headers" in schema.names:
        kind = schema.field("headers").type
        fields = kind.value_type if pa.types.is_list(kind) else None
        if fields is None or not pa.types.is_struct(fields) or fields.names != ["key", "value"]:
            raise PlanError("column 'headers'", f"it is {kind}, but must be {header}")
        if fields.field("key").type != pa.string() or fields.field("value").type != pa.binary():
            raise PlanError("column 'headers'", f"it is {kind}, but must be {header}")
    if "value" not in schema.names:
        raise PlanError("column 'value'", f"a message needs it; the query has {', '.join(schema.names)}")
    if not has_topic and "topic" not in schema.names:
        raise PlanError("option 'topic'", "set it, or select a column topic")
