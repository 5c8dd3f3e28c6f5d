"""Format ``kafka`` as a sink, at planning time: Spark's columns and options, and the client's settings."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from ckpt_runtime.graph.errors import PlanError

_PREFIX = "kafka."
_SERVERS = "bootstrap.servers"
_OWN = ("enable.idempotence", "transactional.id")
_CLASSES = ("key.serializer", "value.serializer")


def sink_topic(options: Mapping[str, str]) -> str | None:
    """The topic that all rows go to; None if column ``topic`` says it."""
    return next((value for key, value in options.items() if key.lower() == "topic"), None)


def producer_settings(options: Mapping[str, str]) -> dict[str, str]:
    """The client's settings: the options with the prefix ``kafka.``."""
    lower = {key.lower(): value for key, value in options.items()}
    return {key.removeprefix(_PREFIX): value for key, value in lower.items() if key.startswith(_PREFIX)}


def check_kafka_sink(options: Mapping[str, str], schema: pa.Schema) -> None:
    """Raises PlanError for options and columns that Spark's sink would not take, and settings that the client lacks."""
    for key in options:
        if key.lower() != "topic" and not key.lower().startswith(_PREFIX):
            raise PlanError(f"option {key!r}", "format 'kafka' takes topic, and settings of the client as kafka.NAME")
    settings = producer_settings(options)
    if _SERVERS not in settings:
        raise PlanError(f"option '{_PREFIX}{_SERVERS}'", "format 'kafka' needs it")
    for name in (*_OWN, *_CLASSES):
        if name in settings:
            raise PlanError(f"option '{_PREFIX}{name}'", "the engine sets it; leave it out")
    _check_columns(schema, has_topic=sink_topic(options) is not None)
    try:
        from confluent_kafka import KafkaException, Producer
    except ImportError:
        raise PlanError("format", "'kafka' needs a library: pip install 'ckpt-runtime[kafka]'") from None
    try:
        Producer({**settings, "log_level": 0})
    except (KafkaException, TypeError, ValueError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
        raise PlanError("options", f"the Kafka client (librdkafka) does not take its settings: {reason}") from None


def _check_columns(schema: pa.Schema, *, has_topic: bool) -> None:
    texts = (pa.string(), pa.binary())
    header = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
    known = {"key": texts, "value": texts, "topic": (pa.string(),), "partition": (pa.int32(),)}
    for name, kinds in known.items():
        if name in schema.names and schema.field(name).type not in kinds:
            allowed = " or ".join(map(str, kinds))
            raise PlanError(f"column {name!r}", f"it is {schema.field(name).type}, and has to be {allowed}: cast it")
    if "headers" in schema.names:
        kind = schema.field("headers").type
        fields = kind.value_type if pa.types.is_list(kind) else None
        if fields is None or not pa.types.is_struct(fields) or fields.names != ["key", "value"]:
            raise PlanError("column 'headers'", f"it is {kind}, and has to be {header}")
        if fields.field("key").type != pa.string() or fields.field("value").type != pa.binary():
            raise PlanError("column 'headers'", f"it is {kind}, and has to be {header}")
    if "value" not in schema.names:
        raise PlanError("column 'value'", f"a message needs it; the query has {', '.join(schema.names)}")
    if not has_topic and "topic" not in schema.names:
        raise PlanError("option 'topic'", "set it, or select a column topic")
