"""Functions of a program that get the rows of checkpoints; a test drops a file to have the process killed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.connect.client.artifact import ArtifactManager
from pyspark.sql.connect.dataframe import DataFrame as FrameOfClient
from pyspark.sql.streaming.query import StreamingQuery

from tests.support.killed_steps import killed
from tests.support.pipelines.killed_sinks import wrap

SCHEMA = "n BIGINT, name STRING, price DECIMAL(10,2), at TIMESTAMP, tags ARRAY<STRING>"


class Epochs:
    """Writes the rows of each partition and epoch to a file of their own, whose name comes from their ids."""

    def __init__(self, output: str, faults: str) -> None:
        self.output, self.faults = output, faults

    def open(self, partition_id: int, epoch_id: int) -> bool:
        self.name = f"{epoch_id}-{partition_id}"
        self.rows: list[dict[str, Any]] = []
        return True

    def process(self, row: Row) -> None:
        killed(self.faults, "process")
        self.rows.append(row.asDict())

    def close(self, error: Exception | None) -> None:
        killed(self.faults, "close")
        assert error is None
        Path(self.output, self.name).write_text(json.dumps(self.rows, default=str))
        killed(self.faults, "closed")


def pipeline(spark: SparkSession, source: str, rate: str, output: str, faults: str) -> None:
    rows = spark.readStream.format("replay").schema(SCHEMA).option("rowsPerSecond", rate).load(source)
    doubled = rows.hint("uid", "rows").withColumn("twice", F.col("n") * 2)
    seen: list[int] = []

    def write(batch: DataFrame, batch_id: int) -> None:
        """Idempotent, as Spark's guide advises: a repetition overwrites the directory of its batch."""
        while Path(faults, "called-held").exists():
            time.sleep(0.01)
        killed(faults, "called")
        assert SparkSession.builder.getOrCreate() is spark
        assert spark.range(3).count() == 3
        batch.createOrReplaceTempView("batch")
        (
            batch.sparkSession.sql("SELECT *, upper(name) AS shout FROM batch")
            .withColumn("batch_id", F.lit(batch_id))
            .write.mode("overwrite")
            .parquet(f"{output}/batches/{batch_id}")
        )
        seen.append(batch_id)
        assert seen == sorted(set(seen))
        killed(faults, "returned")

    doubled.writeStream.foreachBatch(write).queryName("batches").start()
    doubled.select("n").writeStream.foreach(Epochs(f"{output}/epochs", faults)).queryName("epochs").start()


def combined(spark: SparkSession, source: str, output: str) -> StreamingQuery:
    """The function combines its frame with frames and a view of the program, and with frames that it makes."""
    names = spark.createDataFrame([(0, "even"), (1, "odd")], "part INT, name STRING")
    names.createOrReplaceTempView("names_of_parts")
    spark.udf.register("marked", lambda name: f"<{name}>", "string")
    spark.sql("CREATE TEMPORARY FUNCTION more(n INT) RETURNS INT RETURN n + 1000")
    rows = spark.readStream.schema("n INT").json(source)

    def write(batch: DataFrame, batch_id: int) -> None:
        parted = batch.withColumn("part", F.col("n") % 2).localCheckpoint()
        parted.createOrReplaceTempView("parted")
        left = parted.join(names, parted["part"] == names["part"]).select("n", "name")
        right = names.join(parted, "part", "left_outer").select("n", "name")
        of_view = batch.sparkSession.sql(
            "SELECT more(n) AS n, marked(name) AS name FROM parted JOIN names_of_parts USING (part)"
        )
        made = spark.range(100, 102).selectExpr("cast(id AS INT) AS n", "'made' AS name")
        whole = left.union(right).unionByName(other=of_view).union(made)
        Path(output, f"{batch_id}.json").write_text(json.dumps(sorted(map(list, whole.collect()))))

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", f"{output}/state")
    return writer.trigger(availableNow=True).start()


def kill_senders(faults: str) -> None:
    """Kills the process while it sends the rows of a large frame, or when Spark has made a view of them."""
    requests = ArtifactManager._add_artifacts

    def killing(*arguments: Any) -> Iterator[Any]:
        for request in requests(*arguments):
            yield request
            killed(faults, "sending")

    ArtifactManager._add_artifacts = killing  # type: ignore[method-assign]
    wrap((FrameOfClient, "createOrReplaceGlobalTempView"), None, partial(killed, faults, "sent"))


def stored(spark: SparkSession, source: str, output: str, faults: str = "") -> StreamingQuery:
    """The function reads its frame several times, keeps it in memory, and writes it to several places. The frames are
    larger than what Spark Connect puts into a plan, and a view of the first one remains for the calls that follow."""
    if faults:
        kill_senders(faults)
    rows = spark.readStream.schema("n BIGINT, text STRING").option("maxFilesPerTrigger", 1).parquet(source)

    def write(batch: DataFrame, batch_id: int) -> None:
        killed(faults, "called")
        kept = batch.persist()
        counts = [kept.count(), batch.count(), batch.where("n % 2 = 0").count()]
        batch.createOrReplaceTempView("latest")
        if batch_id == 0:
            batch.groupBy("text").agg(F.min("n").alias("first")).createOrReplaceTempView("firsts")
        for name, part in (("whole", batch), ("even", batch.where("n % 2 = 0"))):
            part.write.mode("overwrite").parquet(f"{output}/{name}/{batch_id}")
        merged = batch.sparkSession.sql("SELECT sum(n - first), count(*) FROM latest JOIN firsts USING (text)").first()
        kept.unpersist()
        assert merged is not None
        Path(output, f"{batch_id}.json").write_text(json.dumps([batch.schema.simpleString(), *counts, *merged]))

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", f"{output}/state")
    return writer.trigger(availableNow=True).start()


def remembered(spark: SparkSession, source: str, output: str) -> None:
    """Each call reads a view that the first one has made."""
    rows = spark.readStream.text(source)

    def write(batch: DataFrame, batch_id: int) -> None:
        if batch_id == 0:
            batch.createOrReplaceTempView("first")
            batch.sparkSession.table("first").cache()
        found = batch.sparkSession.table("first").union(batch).collect()
        written = Path(output, f".{batch_id}")
        written.write_text(" ".join(sorted(row.value for row in found)))
        written.rename(Path(output, str(batch_id)))

    rows.writeStream.foreachBatch(write).start()


def files(spark: SparkSession, source: str, rate: str, output: str) -> None:
    """Rows as CSV and as JSON, by Spark's batch writer, and as Parquet, by the engine."""
    rows = spark.readStream.format("replay").schema("n BIGINT").option("rowsPerSecond", rate).load(source)
    texts = rows.hint("uid", "rows").selectExpr("n", "concat('a \"', n, '\\n', ',') AS text", "n % 2 AS part")
    csv = texts.writeStream.format("csv").option("header", "true").option("escape", '"').queryName("csv")
    csv.partitionBy("part").start(f"{output}/csv")
    texts.writeStream.format("json").queryName("json").start(f"{output}/json")
    texts.writeStream.format("parquet").partitionBy("part").queryName("parquet").start(f"{output}/parquet")


def printed(spark: SparkSession, source: str, output: str) -> None:
    """Spark's batch writer, and the console."""
    rows = spark.readStream.format("replay").schema(SCHEMA).load(source)
    orc = rows.writeStream.format("orc").partitionBy("name").queryName("orc")
    orc.start(output)
    rows.select("n", "name", "at").writeStream.format("console").options(numRows=2, path="ignored").queryName(
        "console"
    ).start()
