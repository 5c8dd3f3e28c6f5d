"""PySpark data sources as written for Structured Streaming, through the engine unchanged.

The readers know offsets, the writer publishes each batch id once; both are classes that ``spark.readStream`` and
``df.writeStream`` would take as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from injected import act
from pyspark import TaskContext
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    SimpleDataSourceStreamReader,
    WriterCommitMessage,
)

ROWS_PER_RANGE = 40


class Range(InputPartition):
    """Numbers from ``start`` to before ``end``."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__((start, end))
        self.start, self.end = start, end


class CountingReader(DataSourceStreamReader):
    """Numbers below the limit in a file; several partitions per range."""

    def __init__(self, options: Any) -> None:
        self.limit_file = Path(options["limit"])

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"n": min(start["n"] + ROWS_PER_RANGE, int(self.limit_file.read_text()))}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [Range(n, min(n + 7, end["n"])) for n in range(start["n"], end["n"], 7)]

    def read(self, partition: Any) -> Iterator[Any]:
        yield from ((n, "partitioned") for n in range(partition.start, partition.end))


class Counting(DataSource):
    """New-style reader."""

    @classmethod
    def name(cls) -> str:
        return "counting"

    def schema(self) -> str:
        return "n BIGINT, label STRING"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return CountingReader(self.options)


class SimpleReader(SimpleDataSourceStreamReader):
    """Hands rows out with their offsets."""

    def __init__(self, options: Any) -> None:
        self.limit_file = Path(options["limit"])

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def read(self, start: dict[str, Any]) -> tuple[Iterator[Any], dict[str, Any]]:
        end = min(start["n"] + ROWS_PER_RANGE, int(self.limit_file.read_text()))
        return self.readBetweenOffsets(start, {"n": end}), {"n": end}

    def readBetweenOffsets(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any]:
        return iter([(n, "simple") for n in range(start["n"], end["n"])])


class Simple(Counting):
    """Simple reader."""

    @classmethod
    def name(cls) -> str:
        return "simple"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        raise NotImplementedError

    def simpleStreamReader(self, schema: Any) -> SimpleDataSourceStreamReader:
        return SimpleReader(self.options)


@dataclass
class Staged(WriterCommitMessage):
    """A file that a task wrote for the batch."""

    name: str


class BatchWriter(DataSourceStreamWriter):
    """Tasks stage files, the commit publishes one file per batch id; a repeated commit of a batch changes nothing."""

    def __init__(self, options: Any) -> None:
        self.directory = Path(options["directory"])
        self.faults = options["faults"]

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        name = f"staged-{task.partitionId()}-{os.urandom(6).hex()}"
        with (self.directory / name).open("w") as staged:
            for row in iterator:
                act(self.faults, "write")
                staged.write(json.dumps(row.asDict()) + "\n")
            act(self.faults, "snapshot")
        return Staged(name)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        act(self.faults, "commit")
        target = self.directory / f"batch-{batchId}"
        staged = [self.directory / message.name for message in messages if isinstance(message, Staged)]
        if not target.exists():
            partial = self.directory / f"partial-{batchId}-{os.urandom(6).hex()}"
            partial.write_text("".join(file.read_text() for file in staged))
            partial.replace(target)
        for file in staged:
            file.unlink(missing_ok=True)


class Batches(DataSource):
    """The writer's source."""

    @classmethod
    def name(cls) -> str:
        return "batches"

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return BatchWriter(self.options)


def pipeline(spark: SparkSession, directory: str, faults: str) -> None:
    """Builds the job: both readers, united, into the writer."""
    for source in (Counting, Simple, Batches):
        spark.dataSource.register(source)
    limit = f"{directory}/limit"
    partitioned = spark.readStream.format("counting").option("limit", limit).load().hint("uid", "partitioned")
    simple = spark.readStream.format("simple").option("limit", limit).load().hint("uid", "simple")
    (
        partitioned.union(simple)
        .writeStream.format("batches")
        .option("directory", f"{directory}/batches")
        .option("faults", faults)
        .queryName("batches")
        .start()
    )
