"""Scripts in the forms of Spark's streaming guide, each started by its name: sources, operations, sinks, management."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle, StreamingQuery, StreamingQueryListener
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.types import StructType

name, directory, port, servers, *kept = sys.argv[1:]
spark = SparkSession.builder.master("local[*]").appName("guide").getOrCreate()
spark.sparkContext.setLogLevel("WARN")
if kept:  # the same rows in each run, and their results in files
    rate = spark.readStream.schema("timestamp TIMESTAMP, value BIGINT").json(directory + "/rate")
else:
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


class Numbered(InputPartition):
    """A range of numbers."""

    def __init__(self, first: int, end: int) -> None:
        super().__init__((first, end))
        self.first, self.end = first, end


class Limited(DataSourceStreamReader):
    """Reads 25 numbers, as many at a time as the engine wants, and two by itself."""

    most = 25

    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(2)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        wanted = limit.max_rows if isinstance(limit, ReadMaxRows) else self.most
        assert isinstance(limit, ReadMaxRows | ReadAllAvailable)
        return {"next": min(start["next"] + wanted, self.most)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [Numbered(start["next"], end["next"])] if start != end else []

    def read(self, partition: InputPartition) -> Iterator[tuple[int, str]]:
        assert isinstance(partition, Numbered)
        yield from ((number, f"number {number}") for number in range(partition.first, partition.end))

    def commit(self, end: dict[str, int]) -> None:
        """Has nothing to release."""


class Numbers(DataSource):
    """A source whose classes are those of the script."""

    @classmethod
    def name(cls) -> str:
        return "numbers_of_a_script"

    def schema(self) -> str:
        return "number INT, text STRING"

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return Limited()


class Detector(StatefulProcessor):
    """Remembers the last time of a key, and says how long it has been silent."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle
        self.last = handle.getValueState("last", "at TIMESTAMP")

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        latest = max(frame["timestamp"].max() for frame in rows)
        if not self.last.exists() or self.last.get()[0] < latest:
            for timer in self.handle.listTimers():
                self.handle.deleteTimer(timer)
            self.last.update((latest,))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 500)
        yield pd.DataFrame({"id": key, "text": ["seen"]})

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[pd.DataFrame]:
        silent_ms = timerValues.getCurrentProcessingTimeInMs() - int(time.time() * 1000)
        yield pd.DataFrame({"id": key, "text": [f"silent for {silent_ms} ms since {self.last.get()[0]}"]})


def counted(key: Any, rows: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Counts the rows of a key until none has come for a while."""
    if state.hasTimedOut:
        (count,) = state.get
        state.remove()
        yield pd.DataFrame({"key": [key[0]], "count": [count]})
        return
    before = state.get[0] if state.exists else 0
    state.update((before + sum(map(len, rows)),))
    state.setTimeoutDuration(1000)
    yield pd.DataFrame()


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


def words() -> DataStreamWriter:
    lines = spark.readStream.format("socket").option("host", "127.0.0.1").option("port", port).load()
    lines.printSchema()
    found = lines.select(F.explode(F.split(lines.value, " ")).alias("word"))
    return console(found.groupBy("word").count(), "complete")


def from_kafka(**options: str) -> DataFrame:
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", servers)
    return reader.options(**options).load()


def to_kafka(frame: DataFrame, **options: str) -> DataStreamWriter:
    writer = frame.writeStream.format("kafka").option("kafka.bootstrap.servers", servers)
    return writer.options(**options).outputMode("update")


def headers() -> DataStreamWriter:
    read = from_kafka(subscribe="orders,bills", includeHeaders="true", startingOffsets="earliest")
    return console(read.selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)", "headers"))


def copied() -> DataStreamWriter:
    read = from_kafka(subscribePattern="ord.*")
    return to_kafka(read.selectExpr("'bills' AS topic", "CAST(key AS STRING)", "CAST(value AS STRING)"))


def at_once() -> DataStreamWriter:
    table = spark.read.schema("key STRING, name STRING").json(directory + "/table")
    read = from_kafka(subscribe="orders").selectExpr("CAST(key AS STRING)", "CAST(value AS STRING)")
    found = read.join(F.broadcast(table), "key").dropDuplicates(["key"])
    return to_kafka(found, topic="bills").trigger(realTime="5 minutes")


def keyed() -> DataFrame:
    return rate.selectExpr("CAST(value % 3 AS STRING) AS key", "timestamp")


def timers() -> DataStreamWriter:
    grouped = keyed().groupBy("key")
    return console(
        grouped.transformWithStateInPandas(Detector(), "id STRING, text STRING", "Update", "ProcessingTime"), "update"
    )


def timeouts() -> DataStreamWriter:
    timeout = GroupStateTimeout.ProcessingTimeTimeout
    types = ("key STRING, count BIGINT", "count BIGINT")
    return console(keyed().groupBy("key").applyInPandasWithState(counted, *types, "update", timeout), "update")


def windows_of_windows() -> DataStreamWriter:
    counts = timed.groupBy(WINDOW, "value").count()
    return console(counts.groupBy(F.window(F.window_time(counts.window), "1 hour"), counts.value).count())


def join_of_windows() -> DataStreamWriter:
    other = rate.select(F.col("value").alias("other"), F.col("timestamp").alias("later"))
    first = timed.groupBy("value", F.window("timestamp", "1 hour")).count()
    second = other.withWatermark("later", "20 seconds").groupBy("other", F.window("later", "1 hour")).count()
    return console(first.join(second, "window", "inner"))


def file_of_each_row() -> DataStreamWriter:
    frame = spark.readStream.schema("a INT").json(directory)
    return console(frame.select("a", "_metadata.file_name", F.col("_metadata.file_size")))


def named_files() -> DataStreamWriter:
    frame = spark.readStream.schema("a INT").json(directory)
    return frame.withColumn("file", F.input_file_name()).writeStream.option("path", directory + "/rows")


def settings() -> DataStreamWriter:
    spark.sql("SET spark.sql.streaming.metricsEnabled=true")
    state = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", state)
    spark.conf.set("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
    return console(rate.groupBy("value").count(), "update")


def earlier_column() -> DataStreamWriter:
    return console(timed.groupBy(F.window(rate.timestamp, "10 minutes"), rate.value).count())


def state_of_a_query() -> DataStreamWriter:
    spark.read.format("statestore").load(directory + "/checkpoint").show()
    return console(rate)


def batch_of_kafka() -> DataStreamWriter:
    rows = spark.range(3).selectExpr("CAST(id AS STRING) AS value")
    rows.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", "orders").save()
    return console(rate)


def view() -> DataStreamWriter:
    rate.createOrReplaceTempView("updates")
    return console(spark.sql("SELECT count(*) FROM updates"), "complete")


def with_table() -> DataStreamWriter:
    table = spark.createDataFrame([(1, "one")], "value BIGINT, name STRING")
    return console(rate.join(table, "value", "left_outer"))


def own_source() -> DataStreamWriter:
    spark.dataSource.register(Numbers)
    return console(spark.readStream.format("numbers_of_a_script").load())


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
    "own_source": own_source,
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
    "named_files": named_files,
    "stopped": lambda: rate.writeStream.format("parquet").option("path", directory + "/rows"),
    "stopped_at_end": lambda: rate.writeStream.format("parquet").option("path", directory + "/rows"),
    "stopped_when_processed": named_files,
    "batches": lambda: rate.writeStream.foreachBatch(lambda batch, number: None),
    "rows": lambda: rate.writeStream.foreach(lambda row: None),
    "rows_of_an_object": lambda: rate.writeStream.foreach(Forgetful()),
    "words": words,
    "headers": headers,
    "copied": copied,
    "at_once": at_once,
    "timers": timers,
    "timeouts": timeouts,
    "windows_of_windows": windows_of_windows,
    "join_of_windows": join_of_windows,
    "file_of_each_row": file_of_each_row,
    "settings": settings,
    "earlier_column": earlier_column,
    "state_of_a_query": state_of_a_query,
    "batch_of_kafka": batch_of_kafka,
    "right_join": lambda: joined("rightOuter"),
    "full_join": lambda: joined("fullOuter"),
    "rate_to_its_end": lambda: console(rate).trigger(availableNow=True),
    "nothing": lambda: rate.writeStream.format("noop"),
    "once": lambda: console(spark.readStream.schema("a INT").json(directory)).trigger(once=True),
    "processing_time": lambda: console(rate).trigger(processingTime="1 second"),
    "continuous": lambda: console(rate).trigger(continuous="1 second"),
    "available_now": lambda: console(spark.readStream.schema("a INT").json(directory)).trigger(availableNow=True),
    "real_time": lambda: console(rate, "update").trigger(realTime="30 seconds"),
    "real_time_files": lambda: rate.writeStream.option("path", directory + "/rows").trigger(realTime="5 minutes"),
    "memory": lambda: rate.groupBy("value").count().writeStream.queryName("t").outputMode("complete").format("memory"),
    "listener": listened,
    "inferred_schema": inferred,
    "latest_watermark": latest_watermark,
    "action": shown,
}


def stop_all(query: StreamingQuery) -> None:
    """Stops a query by the manager, after a wait that does not see its end."""
    assert query.awaitTermination(2) is False
    assert query.isActive
    for each in spark.streams.active:
        each.stop()
    assert not query.isActive
    assert spark.streams.active == []
    assert query.awaitTermination(2) is True
    assert spark.streams.awaitAnyTermination(2) is True


def stop_at_end(query: StreamingQuery) -> None:
    """Stops a query whatever happens while the program watches it."""
    try:
        for _ in range(4):
            time.sleep(0.5)
            assert query.isActive
    finally:
        query.stop()


def stop_when_processed(query: StreamingQuery) -> None:
    """Stops a query that has processed the data that is there."""
    query.processAllAvailable()
    query.stop()


ENDING = ("available_now", "once")
"""Forms whose queries end with the data that is there, so that a wait sees their end."""
STOPPED = {"stopped": stop_all, "stopped_at_end": stop_at_end, "stopped_when_processed": stop_when_processed}


def keep(batch: DataFrame, number: int) -> None:
    """Writes a batch to a file."""
    hidden = Path(kept[0], f".{number}")
    hidden.parent.mkdir(exist_ok=True)
    columns = [f"{column}_{at}" for at, column in enumerate(batch.columns)]  # some are equal
    pq.write_table(batch.toDF(*columns).toArrow(), hidden)
    hidden.rename(hidden.with_name(f"{number:06}.parquet"))


def manage(query: StreamingQuery) -> None:
    """Calls what the guide calls on a query and on the manager of queries."""
    if name in STOPPED:
        STOPPED[name](query)
        return
    assert spark.streams.get(query.id).id == query.id
    assert query.runId
    assert (query.lastProgress, query.recentProgress, query.exception()) == (None, [], None)
    assert query.status["isDataAvailable"] is False
    query.explain()
    assert len(spark.streams.active) == 1
    spark.streams.resetTerminated()
    assert query.awaitTermination(5) is (name in ENDING)
    try:
        spark.streams.awaitAnyTermination()
    finally:
        query.stop()


writer = FORMS[name]().option("checkpointLocation", "".join(kept or directory) + "-checkpoint")
if kept:
    writer.foreachBatch(keep).trigger(availableNow=True).start().awaitTermination()
else:
    manage(writer.start())
