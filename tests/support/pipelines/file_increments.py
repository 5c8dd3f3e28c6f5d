"""Queries that read what has arrived since their last run, one file in each of Spark's batches."""

from __future__ import annotations

import json
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

from tests.support.pipelines.batch_functions import killed

MODES = {"rows": "append", "once": "append", "counts": "complete", "windows": "append"}


def pipeline(spark: SparkSession, directory: str, output: str, name: str, faults: str) -> None:
    started(spark, directory, output, name, faults)


def started(spark: SparkSession, directory: str, output: str, name: str, faults: str) -> StreamingQuery:
    """A query whose function writes the rows of each call to a file of its own; files in ``faults`` kill it."""
    rows = spark.readStream.option("maxFilesPerTrigger", 1).text(directory)
    times = rows.select(F.timestamp_seconds(F.col("value").cast("long")).alias("at")).withWatermark("at", "10 seconds")
    queries = {
        "rows": rows,
        "once": rows,
        "counts": rows.groupBy(F.substring("value", 1, 1).alias("key")).count(),
        "windows": times.groupBy(F.window("at", "10 seconds")).count().selectExpr("window.start", "count"),
    }

    def write(batch: DataFrame, batch_id: int) -> None:
        killed(faults, f"called-{batch_id}")
        values = sorted(" ".join(map(str, row)) for row in batch.collect())
        Path(output, f"{batch_id}.json").write_text(json.dumps(values))
        killed(faults, f"written-{batch_id}")

    writer = queries[name].writeStream.outputMode(MODES[name]).foreachBatch(write)
    writer = writer.option("checkpointLocation", f"{output}/state")
    return (writer.trigger(once=True) if name == "once" else writer.trigger(availableNow=True)).start()
