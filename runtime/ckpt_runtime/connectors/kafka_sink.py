"""Format ``kafka``: rows to topics, with the columns and options of Spark's sink; at least once.

A message is visible as soon as the broker has it. Before a checkpoint all messages are flushed, so no row is lost; rows
behind the restored checkpoint are sent again after a failure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from ckpt_runtime.graph.kafka_columns import producer_settings, sink_topic
from ckpt_runtime.sinks import CommitOutcome, Sink, SinkCommitter, SinkContext, SinkWriter, Transaction

_FLUSH_SECONDS = 1.0
_POLL_SECONDS = 0.1


class KafkaDeliveryError(RuntimeError):
    """The broker did not take a message. The text has the topic and the client's reason."""


class Nothing(msgspec.Struct, frozen=True):
    """There is nothing to commit: messages are visible when they are sent."""


class KafkaSink(Sink):
    """The sink behind format ``kafka``."""

    committable = Nothing
    single_committer = False

    @classmethod
    def name(cls) -> str:
        return "kafka"

    def open_writer(self, schema: pa.Schema, context: SinkContext) -> SinkWriter:
        return _KafkaWriter(producer_settings(self.options), sink_topic(self.options), schema, context)

    def open_committer(self, schema: pa.Schema | None, context: SinkContext) -> SinkCommitter:
        return _NothingToCommit()


class _NothingToCommit(SinkCommitter):
    def commit(self, transaction: Transaction, committables: Sequence[Any]) -> CommitOutcome:
        return CommitOutcome.ALREADY_COMMITTED


class _KafkaWriter(SinkWriter):
    """Sends the rows of one subtask in their order."""

    def __init__(self, settings: Mapping[str, str], topic: str | None, schema: pa.Schema, context: SinkContext) -> None:
        from confluent_kafka import KafkaException, Producer

        self._refused = KafkaException
        identity = {"client.id": f"ckpt-{context.job_id}-{context.uid}-{context.subtask_index}"}
        self._producer = Producer(
            {"enable.idempotence": "true", **identity, **settings, "on_delivery": self._delivered}
        )
        self._topic = topic
        self._columns = [name for name in ("key", "value", "partition", "headers", "topic") if name in schema.names]
        self._failure: KafkaDeliveryError | None = None

    def write(self, batch: pa.RecordBatch) -> None:
        for row in batch.select(self._columns).to_pylist():
            self._send(row)
        self.check()

    def prepare_commit(self, checkpoint_id: int) -> Sequence[Any]:
        """Waits until the brokers have all messages. Raises KafkaDeliveryError for one that they do not take."""
        while self._producer.flush(_FLUSH_SECONDS):
            self._raise_failure()
        self._raise_failure()
        return ()

    def check(self) -> None:
        self._producer.poll(0)
        self._raise_failure()

    def close(self) -> None:
        """Drops what is not sent: it is sent again after a restore."""
        self._producer.purge()
        self._producer.flush(_FLUSH_SECONDS)

    def _send(self, row: dict[str, Any]) -> None:
        topic = self._topic or row["topic"]
        if topic is None:
            raise KafkaDeliveryError("a row has no topic: column 'topic' is null, and there is no option topic")
        more: dict[str, Any] = {}
        if row.get("partition") is not None:
            more["partition"] = row["partition"]
        if row.get("headers"):
            more["headers"] = [(header["key"], header["value"]) for header in row["headers"]]
        while True:
            try:
                self._producer.produce(topic, row["value"], row.get("key"), **more)
                return
            except BufferError:
                # The client's queue is full: it empties while delivery reports are taken.
                self._producer.poll(_POLL_SECONDS)
                self._raise_failure()
            except self._refused as error:
                raise KafkaDeliveryError(f"topic {topic!r}: {error}") from None

    def _delivered(self, error: Any, message: Any) -> None:
        if error is not None and self._failure is None:
            self._failure = KafkaDeliveryError(f"topic {message.topic()!r}: {error}")

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure
