"""Scripts in the forms of Spark's streaming guide, each started by its name: sources, operations, sinks, management."""

import sys
from collections.abc import Callable

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StreamingQuery, StreamingQueryListener
from pyspark.sql.streaming.readwriter import DataStreamWriter

name, directory = sys.argv[1:]
spark = SparkSession.builder.appName("guide").getOrCreate()
rate = spark.readStream.format("rate").option("rowsPerSecond", 50).load()
timed = rate.withWatermark("timestamp", "10 seconds")
BETWEEN = "value = other AND later >= timestamp AND later <= timestamp + INTERVAL 1 HOUR"


class Forgetful:
    """Has the methods that ``foreach`` calls."""

    def open(self, partition: int, epoch: int) -> bool:
        return True

    def process(self, row: Row) -> None:
        """Does nothing with a row."""

    def close(self, error: Exception | None) -> None:
        """Has nothing to close."""


class Silent(StreamingQueryListener):
    """Does nothing with events."""

    def onQueryStarted(self, event: object) -> None:
        """Ignores it."""

    onQueryProgress = onQueryIdle = onQueryTerminated = onQueryStarted


def console(frame: DataFrame, mode: str = "append") -> DataStreamWriter:
    return frame.writeStream.outputMode(mode).format("console")


def files() -> DataStreamWriter:
    frame = spark.readStream.option("sep", ";").schema("name STRING, age INT").csv(directory)
    assert frame.isStreaming
    return console(frame.select("name").where("age > 10"))


def joined(how: str) -> DataStreamWriter:
    others = rate.select(F.col("value").alias("other"), F.col("timestamp").alias("later"))
    return console(timed.join(others.withWatermark("later", "20 seconds"), F.expr(BETWEEN), how))


def view() -> DataStreamWriter:
    rate.createOrReplaceTempView("updates")
    return console(spark.sql("SELECT count(*) FROM updates"), "complete")


def with_table() -> DataStreamWriter:
    table = spark.createDataFrame([(1, "one")], "value BIGINT, name STRING")
    return console(rate.join(table, "value", "left_outer"))


def gap() -> DataStreamWriter:
    lengths = F.when(F.col("value") % 2 == 1, "5 seconds").otherwise("5 minutes")
    return console(timed.groupBy(F.session_window("timestamp", lengths), "value").count())


def listened() -> DataStreamWriter:
    spark.streams.addListener(Silent())
    return console(rate)


def inferred() -> DataStreamWriter:
    spark.conf.set("spark.sql.streaming.schemaInference", "true")
    return console(spark.readStream.json(directory))


def latest_watermark() -> DataStreamWriter:
    spark.conf.set("spark.sql.streaming.multipleWatermarkPolicy", "max")
    return console(rate)


def shown() -> DataStreamWriter:
    spark.range(3).show()
    return console(rate)


WINDOW = F.window("timestamp", "10 minutes", "5 minutes")
FORMS: dict[str, Callable[[], DataStreamWriter]] = {
    "files": files,
    "rate": lambda: console(rate),
    "rate_per_batch": lambda: console(spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 5).load()),
    "view": view,
    "counts": lambda: console(rate.groupBy("value").count(), "complete"),
    "windows": lambda: console(rate.groupBy(WINDOW, "value").count(), "complete"),
    "late_windows": lambda: console(timed.groupBy(WINDOW, "value").count(), "update"),
    "sessions": lambda: console(timed.groupBy(F.session_window("timestamp", "5 minutes"), "value").count()),
    "sessions_with_a_gap_of_the_row": gap,
    "join_with_a_table": with_table,
    "inner_join": lambda: joined("inner"),
    "left_join": lambda: joined("leftOuter"),
    "semi_join": lambda: joined("leftSemi"),
    "duplicates": lambda: console(rate.dropDuplicates(["value"])),
    "duplicates_with_time": lambda: console(timed.dropDuplicates(["value", "timestamp"])),
    "duplicates_within_watermark": lambda: console(timed.dropDuplicatesWithinWatermark(["value"])),
    "parquet": lambda: rate.writeStream.format("parquet").option("path", directory + "/rows"),
    "batches": lambda: rate.writeStream.foreachBatch(lambda batch, number: None),
    "rows": lambda: rate.writeStream.foreach(lambda row: None),
    "rows_of_an_object": lambda: rate.writeStream.foreach(Forgetful()),
    "processing_time": lambda: console(rate).trigger(processingTime="1 second"),
    "continuous": lambda: console(rate).trigger(continuous="1 second"),
    "available_now": lambda: console(spark.readStream.schema("a INT").json(directory)).trigger(availableNow=True),
    "real_time": lambda: console(rate).trigger(realTime="5 minutes"),
    "memory": lambda: rate.groupBy("value").count().writeStream.queryName("t").outputMode("complete").format("memory"),
    "listener": listened,
    "inferred_schema": inferred,
    "latest_watermark": latest_watermark,
    "action": shown,
}


def manage(query: StreamingQuery) -> None:
    """Calls what the guide calls on a query and on the manager of queries."""
    assert spark.streams.get(query.id).id == query.id
    assert query.runId
    assert (query.lastProgress, query.recentProgress, query.exception()) == (None, [], None)
    assert query.status["isDataAvailable"] is False
    query.explain()
    assert len(spark.streams.active) == 1
    spark.streams.resetTerminated()
    query.awaitTermination(5)
    spark.streams.awaitAnyTermination()
    query.stop()


manage(FORMS[name]().option("checkpointLocation", directory + "/checkpoint").start())
