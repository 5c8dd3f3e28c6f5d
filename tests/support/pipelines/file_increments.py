"""Queries that read what has arrived since their last run, one file in each of Spark's batches."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.streaming.query import StreamingQuery

from tests.support.killed_steps import killed

MODES = {"counts": "complete"}
"""The output modes of the queries that do not append."""


class FileByFileReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A batch is a file, and a partition is a line of it."""

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def files(self) -> list[Path]:
        return sorted(Path(self.directory).iterdir())

    def prepareForTriggerAvailableNow(self) -> None:
        self.end = len(self.files())

    def initialOffset(self) -> dict[str, Any]:
        return {"files": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"files": min(start["files"] + 1, self.end)}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        files = self.files()[start["files"] : end["files"]]
        return [InputPartition(line) for file in files for line in file.read_text().split()]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        yield (partition.value,)


class FileByFile(DataSource):
    @classmethod
    def name(cls) -> str:
        return "filebyfile"

    def schema(self) -> str:
        return "value STRING"

    def streamReader(self, schema: Any) -> FileByFileReader:
        return FileByFileReader(self.options["path"])


def pipeline(spark: SparkSession, directory: str, output: str, name: str, faults: str) -> None:
    started(spark, directory, output, name, faults, beside_windows=name == "short")


def started(
    spark: SparkSession, directory: str, output: str, name: str, faults: str, *, beside_windows: bool = False
) -> StreamingQuery:
    """A query whose function writes the rows of each call to a file of its own; files in ``faults`` kill it.

    ``beside_windows``: another query of the same files has a batch more, behind the last file.
    """
    rows = spark.readStream.option("maxFilesPerTrigger", 1).text(directory)
    times = rows.select(F.timestamp_seconds(F.col("value").cast("long")).alias("at")).withWatermark("at", "10 seconds")
    spark.dataSource.register(FileByFile)
    queries = {
        "rows": rows,
        "once": rows,
        "short": rows.where("length(value) < 2"),
        "unlimited": spark.readStream.text(directory).where("INT(value) > 50"),
        "reader": spark.readStream.format("filebyfile").load(directory),
        "counts": rows.groupBy(F.substring("value", 1, 1).alias("key")).count(),
        "windows": times.groupBy(F.window("at", "10 seconds")).count().selectExpr("window.start", "count"),
    }

    def write(batch: DataFrame, batch_id: int) -> None:
        killed(faults, f"called-{batch_id}")
        values = sorted(" ".join(map(str, row)) for row in batch.collect())
        Path(output, f"{batch_id}.json").write_text(json.dumps(values))
        killed(faults, f"written-{batch_id}")

    if beside_windows:
        windows = queries["windows"].writeStream.format("noop").option("checkpointLocation", f"{output}/windows")
        windows.queryName("beside").trigger(availableNow=True).start()
    writer = queries[name].writeStream.outputMode(MODES.get(name, "append")).foreachBatch(write)
    writer = writer.option("checkpointLocation", f"{output}/state")
    return (writer.trigger(once=True) if name == "once" else writer.trigger(availableNow=True)).start()
