"""Queries that end with the data that is there, and continue with the next run, in Spark and in the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.query import StreamingQuery

SCHEMA = "id LONG, country STRING, placed_at TIMESTAMP"


def pipeline(spark: SparkSession, path: str, output: str, changed: str = "") -> None:
    """Starts all queries below."""
    started(spark, path, output, changed)


def started(spark: SparkSession, path: str, output: str, changed: str) -> list[StreamingQuery]:
    """Starts the queries, with those changes that Spark allows before a restart if ``changed`` is not empty."""
    rows = spark.readStream.schema(SCHEMA).parquet(path)
    numbered = rows.writeStream.foreachBatch(numbered_in(Path(output, "numbered"))).queryName("numbered")
    numbered = numbered.option("checkpointLocation", f"{output}/state-of-numbered").trigger(availableNow=True)
    # Without a location: as in Spark, each run reads everything again.
    fresh = rows.where("id < 6").writeStream.foreachBatch(numbered_in(Path(output, "fresh"))).queryName("fresh")
    return [numbered.start(), fresh.trigger(availableNow=True).start(), *_files(rows, output, changed)]


def _files(rows: DataFrame, output: str, changed: str) -> list[StreamingQuery]:
    return [
        frame.writeStream.format("parquet")
        .queryName(name)
        .option("checkpointLocation", f"{output}/state-of-{name}")
        .trigger(availableNow=True)
        .start(f"{output}/{name}")
        for name, frame in (queries(rows.where("id <> 7")) if changed else queries(rows)).items()
    ]


def queries(rows: DataFrame) -> dict[str, DataFrame]:
    """One without state, windows that end with the watermark, and keys that are kept for ever."""
    windows = rows.withWatermark("placed_at", "10 minutes").groupBy(F.window("placed_at", "1 hour"), "country").count()
    return {
        "rows": rows.select("id", F.upper("country").alias("country")),
        "windows": windows.select(F.date_format("window.start", "HH:mm").alias("start"), "country", "count"),
        "countries": rows.select("country").dropDuplicates(),
    }


def numbered_in(directory: Path) -> Callable[[DataFrame, int], None]:
    """Returns a function for ``foreachBatch`` that needs the id 0 to create the directory of its files."""

    def write(batch: DataFrame, batch_id: int) -> None:
        if batch_id == 0:
            directory.mkdir(parents=True, exist_ok=True)
        hidden = directory / f".{batch_id}"
        pq.write_table(batch.withColumn("batch", F.lit(batch_id)).toArrow(), hidden)
        os.replace(hidden, directory / f"{batch_id}.parquet")

    return write
