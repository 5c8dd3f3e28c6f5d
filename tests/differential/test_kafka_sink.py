"""Format ``kafka`` as a sink: columns and options that are Spark's; tests of kills are in ``test_killed_sinks.py``."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.connectors.kafka_sink import KafkaDeliveryError, KafkaSink
from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.formats import check_sink
from tests.support.kafka_broker import KafkaBroker
from tests.unit.runtime.connectors.harness import context, opened, snapshot_of

pytest.importorskip("confluent_kafka", reason="pip install 'ckpt-runtime[kafka]'")


def sink(broker: KafkaBroker, **options: str) -> CommittingSinkOperator:
    given = {"kafka.bootstrap.servers": broker.servers, "deliveryGuarantee": "at-least-once", **options}
    return CommittingSinkOperator(KafkaSink(given))


def test_messages_reach_the_topic_and_partition_of_their_row_before_the_checkpoint_completes(
    broker: KafkaBroker,
) -> None:
    broker.create_topic("parts", 2)
    operator = sink(broker)
    opened(operator, context(uid="out"))
    rows = [{"value": b"v%d" % n, "topic": "parts", "partition": n % 2} for n in range(5)]
    schema = pa.schema([("value", pa.binary()), ("topic", pa.string()), ("partition", pa.int32())])
    operator.process_batch(pa.RecordBatch.from_pylist(rows, schema=schema), 0)
    snapshot_of(operator, 1)
    found = sorted((message.partition(), message.value()) for message in broker.consume("parts", 2))
    assert found == [(0, b"v0"), (0, b"v2"), (0, b"v4"), (1, b"v1"), (1, b"v3")]
    operator.close()


def test_key_has_the_partition_that_the_producer_of_spark_chooses(broker: KafkaBroker) -> None:
    """The hashes are those of the tests of ``org.apache.kafka.common.utils.Utils.murmur2``."""
    hashes = {
        "21": -973932308,
        "foobar": -790332482,
        "a-little-bit-long-string": -985981536,
        "a-little-bit-longer-string": -1486304829,
        "lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        "abc": 479470107,
    }
    broker.create_topic("keyed", 7)
    operator = sink(broker, topic="keyed")
    opened(operator, context(uid="out"))
    operator.process_batch(pa.record_batch({"key": list(hashes), "value": list(hashes)}), 0)
    snapshot_of(operator, 1)
    found = {message.key().decode(): message.partition() for message in broker.consume("keyed", 7)}
    assert found == {key: (number & 0x7FFFFFFF) % 7 for key, number in hashes.items()}
    operator.close()


def test_row_without_a_topic_and_message_that_the_broker_refuses_fail_the_job_by_name(broker: KafkaBroker) -> None:
    operator = sink(broker)
    opened(operator, context(uid="out"))
    row: dict[str, Any] = {"value": [b"v"], "topic": pa.array([None], pa.string())}
    with pytest.raises(KafkaDeliveryError, match="a row has no topic"):
        operator.process_batch(pa.record_batch(row), 0)
    operator.close()
    broker.create_topic("one", 1)
    operator = sink(broker, topic="one")
    opened(operator, context(uid="out"))
    # The client refuses the message at once if it knows the partitions already.
    with pytest.raises(KafkaDeliveryError, match="topic 'one': .*nknown .*partition"):
        operator.process_batch(pa.record_batch({"value": ["v"], "partition": pa.array([7], pa.int32())}), 0)
        snapshot_of(operator, 1)
    operator.close()


VALUE = {"value": pa.string()}
SERVERS = {"kafka.bootstrap.servers": "localhost:1"}


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        (VALUE, {"topic": "t"}, "'kafka.bootstrap.servers': format 'kafka' needs it"),
        (VALUE, SERVERS, "'topic': set it, or select a column topic"),
        ({"key": pa.string()}, {**SERVERS, "topic": "t"}, "'value': a message needs it"),
        ({"value": pa.int64()}, {**SERVERS, "topic": "t"}, "'value': it is int64"),
        ({**VALUE, "headers": pa.list_(pa.string())}, {**SERVERS, "topic": "t"}, "'headers': it is list"),
        (VALUE, {**SERVERS, "topic": "t", "kafka.no.such": "1"}, "No such configuration property"),
        (VALUE, {**SERVERS, "topic": "t", "kafka.transactional.id": "1"}, "the engine sets it"),
        (VALUE, {**SERVERS, "topics": "t"}, "'topics'"),
        (VALUE, {**SERVERS, "topic": "t", "deliveryGuarantee": "none"}, "'none' is not one of exactly-once, at-least"),
        (
            VALUE,
            {**SERVERS, "topic": "t", "kafka.security.protocol": "sasl_ssl"},
            "works with PLAIN, .*not with GSSAPI",
        ),
        (
            VALUE,
            {**SERVERS, "topic": "t", "kafka.security.protocol": "ssl", "kafka.ssl.keystore.location": "/k"},
            "'kafka.ssl.keystore.location': it belongs to the Java client: use kafka.ssl.certificate.location",
        ),
        (VALUE, {**SERVERS, "topic": "t", "kafka.max.request.size": "9"}, "use kafka.message.max.bytes"),
        (
            VALUE,
            {**SERVERS, "topic": "t", "kafka.security.protocol": "ssl", "kafka.ssl.crl.location": "/k"},
            "'kafka.ssl.crl.location': exactly once works with ssl.ca.location",
        ),
    ],
)
def test_options_and_columns_that_spark_or_the_client_would_not_take_are_refused(
    columns: dict[str, pa.DataType], options: dict[str, str], problem: str
) -> None:
    with pytest.raises(PlanError, match=problem):
        check_sink("kafka", options, pa.schema(list(columns.items())))
