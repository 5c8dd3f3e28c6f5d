"""Decodes Avro messages of files with the schemas of a registry, and encodes a part of them again."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.avro.functions import from_avro, to_avro

ORDER = """{"type": "record", "name": "Order", "fields": [
    {"name": "id", "type": "long"},
    {"name": "country", "type": "string", "default": "?"},
    {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}], "default": null}]}"""
KEY = """{"type": "record", "name": "Key", "fields": [
    {"name": "country", "type": ["null", "string"]}, {"name": "id", "type": ["null", "long"]}]}"""


def pipeline(spark: SparkSession, source: str, registry: str, output: str) -> None:
    messages = spark.readStream.schema("value BINARY").parquet(source).hint("uid", "messages")
    order = from_avro("value", ORDER, {"schema.registry.url": registry, "mode": "PERMISSIVE"})
    orders = messages.select(order.alias("order")).select("order.*").where("id IS NULL OR id > 0")
    keyed = orders.withColumn("key", to_avro(F.struct("country", "id"), KEY))
    options = {"schema.registry.url": registry, "schema.registry.subject": "keys"}
    given = F.create_map(*(F.lit(text) for option in options.items() for text in option))
    keyed = keyed.withColumn("framed", F.call_function("to_avro", F.struct("country", "id"), F.lit(KEY), given))
    keyed.writeStream.trigger(availableNow=True).format("parquet").queryName("orders").start(output)
