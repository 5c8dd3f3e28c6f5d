"""Orders from lines of JSON; lines that are none, or hold a value that does not fit, go to a directory of their own."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

SCHEMA = "order_id BIGINT, amount DOUBLE, bad STRING"


def pipeline(spark: SparkSession, lines: str, orders: str, dead_letters: str) -> None:
    parsed = (
        spark.readStream.format("text")
        .load(lines)
        .hint("uid", "lines")
        .withColumn("row", F.from_json("value", SCHEMA, {"columnNameOfCorruptRecord": "bad"}))
    )
    good = parsed.where("row IS NOT NULL AND row.bad IS NULL").select("row.order_id", "row.amount")
    good.writeStream.format("parquet").queryName("orders").start(orders)
    bad = parsed.where("row.bad IS NOT NULL").select("value")
    bad.writeStream.format("parquet").queryName("dead_letters").start(dead_letters)


def options(spark: SparkSession, lines: str, orders: str, dead_letters: str) -> None:
    """The same by the option of the source, and by that of the job for amounts that are no numbers."""
    parsed = (
        spark.readStream.format("json")
        .schema("order_id BIGINT, amount STRING")
        .options(badRows="deadLetter", badRowsDirectory=dead_letters)
        .load(lines)
        .hint("uid", "lines")
    )
    good = parsed.selectExpr("order_id", "CAST(amount AS DOUBLE) AS amount").where("order_id IS NOT NULL")
    good.hint("uid", "numbers").writeStream.format("parquet").queryName("orders").start(orders)


def messages(spark: SparkSession, servers: str, topic: str, good: str) -> None:
    """Reads a part of each value that is no number in some messages, and no other column."""
    source = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers).option("subscribe", topic)
    texts = source.option("startingOffsets", "earliest").load().selectExpr("CAST(value AS STRING) AS text")
    parts = texts.where("text <> ''").select(F.explode(F.split("text", ",")).alias("part"))
    numbers = parts.where("part <> '-'").selectExpr("CAST(part AS INT) AS n")
    numbers.writeStream.format("parquet").queryName("numbers").trigger(availableNow=True).start(good)


def ratios(spark: SparkSession, lines: str, ratios: str) -> None:
    """Expressions and a function that fail for some lines: they are no number, zero, or 13."""

    def twice(n: int) -> int:
        if n == 13:
            raise ValueError("13 has no double")
        return 2 * n

    parsed = spark.readStream.format("text").load(lines).hint("uid", "lines").selectExpr("CAST(value AS INT) AS n")
    doubled = parsed.where("100 / n > 0").select("n", F.udf(twice, "INT")("n").alias("twice"))
    doubled.writeStream.format("parquet").queryName("ratios").start(ratios)
