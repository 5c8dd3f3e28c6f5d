"""Spark's own cases of stream writers: a good batch, then one whose ``write`` fails. Spark and the engine run it.

Arguments of the pipeline: DIRECTORY CASE; the case says how ``write`` fails.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import Row, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)

CASES = ("raises", "raises-arrow", "none", "text", "lock")
GOOD, ALL = 30, 60
"""The second range begins when the file ``more`` is there."""


@dataclass
class Count(WriterCommitMessage):
    rows: int
    odd: Any = None


class TwoRanges(DataSourceStreamReader):
    """One partition each; only the second one has rows from ``GOOD`` on."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def initialOffset(self) -> dict[str, int]:
        return {"n": 0}

    def latestOffset(self) -> dict[str, int]:
        return {"n": ALL if (self.directory / "more").exists() else GOOD}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return [InputPartition((start["n"], end["n"]))]

    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield from ((n,) for n in range(*partition.value))


class FailingWriter(DataSourceStreamWriter):
    def __init__(self, options: Any) -> None:
        self.directory = Path(options["directory"])
        self.case = options["case"]

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        return self.answer(row.n for row in iterator)

    def answer(self, numbers: Iterator[int]) -> Any:
        rows, last = 0, 0
        for last in numbers:
            rows += 1
            if last >= GOOD and self.case.startswith("raises"):
                raise ValueError("invalid value")
        odd = {"none": None, "text": "a text", "lock": Count(rows, threading.Lock())}
        return odd[self.case] if last >= GOOD else Count(rows)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.tell("committed", batchId, sum(message.rows for message in messages if isinstance(message, Count)))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.tell("aborted", batchId, messages)

    def tell(self, event: str, batch: int, what: Any) -> None:
        with (self.directory / "calls").open("a") as log:
            log.write(json.dumps([event, batch, what]) + "\n")


class FailingArrowWriter(FailingWriter, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:  # type: ignore[override]
        return self.answer(n for batch in iterator for n in batch.column("n").to_pylist())


class Failing(DataSource):
    """Options ``directory`` and ``case``."""

    @classmethod
    def name(cls) -> str:
        return "failing"

    def schema(self) -> str:
        return "n INT"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return TwoRanges(Path(self.options["directory"]))

    def streamWriter(self, schema: Any, overwrite: bool) -> DataSourceStreamWriter:
        kind = FailingArrowWriter if self.options["case"] == "raises-arrow" else FailingWriter
        return kind(self.options)


def pipeline(spark: SparkSession, directory: str, case: str) -> None:
    """Builds the job."""
    spark.dataSource.register(Failing)
    rows = spark.readStream.format("failing").options(directory=directory, case=case).load().hint("uid", "rows")
    rows.writeStream.format("failing").options(directory=directory, case=case).queryName("failing").start()
