"""A sink whose ``write`` returns before its rows end, beside another that fails then; Spark and the engine run it.

Arguments of the pipeline: DIRECTORY FAILING.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)

PARTITIONS = 4
WAIT_SECONDS = 60


@dataclass
class Staged(WriterCommitMessage):
    path: Path


class EarlyReader(DataSourceStreamReader):
    """One range with a few rows per partition, and no end: nothing comes behind a failure that would show it."""

    def initialOffset(self) -> dict[str, int]:
        return {"n": 0}

    def latestOffset(self) -> dict[str, int]:
        return {"n": 1}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition(n) for n in range(PARTITIONS)]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield from ((partition.value,) for _ in range(3))


class EarlyWriter(DataSourceStreamWriter):
    """Stages a file with the first row and returns; in the task ``failing`` it fails when another one has."""

    def __init__(self, options: Any) -> None:
        self.directory = Path(options["directory"])
        self.failing = int(options["failing"])

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        task = TaskContext.get()
        assert task is not None
        if task.partitionId() == self.failing:
            deadline = time.monotonic() + WAIT_SECONDS
            while not (self.directory / "returning").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
            raise ValueError("this task fails")
        path = self.directory / f"staged-{task.taskAttemptId()}"
        path.write_text(str(next(iterator)))
        (self.directory / "returning").touch()
        return Staged(path)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        (self.directory / "committed").touch()

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        assert TaskContext.get() is None
        staged = [message.path for message in messages if isinstance(message, Staged)]
        with (self.directory / "aborted").open("a") as log:
            log.write(json.dumps([batchId, [path.name for path in staged]]) + "\n")
        for path in staged:
            path.unlink()


class Early(DataSource):
    """Options ``directory`` and ``failing``."""

    @classmethod
    def name(cls) -> str:
        return "early"

    def schema(self) -> str:
        return "n INT"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return EarlyReader()

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        return EarlyWriter(self.options)


def pipeline(spark: SparkSession, directory: str, failing: str) -> None:
    """Builds the job."""
    spark.dataSource.register(Early)
    rows = spark.readStream.format("early").load().hint("uid", "rows")
    rows.writeStream.format("early").options(directory=directory, failing=failing).queryName("early").start()
