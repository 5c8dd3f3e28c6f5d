"""Copies one topic of Kafka into another one, exactly once. Arguments: the brokers, and both topics."""

from __future__ import annotations

from ckpt_runtime.api import StreamSession


def pipeline(session: StreamSession, servers: str, source: str, target: str) -> None:
    reader = session.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", source)
    rows = reader.option("startingOffsets", "earliest").load().uid("source").select("key", "value")
    writer = rows.writeStream.format("kafka").option("kafka.bootstrap.servers", servers)
    writer.option("topic", target).option("kafka.transaction.timeout.ms", "60000").start().uid("sink")
