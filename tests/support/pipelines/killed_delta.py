"""The sink of Delta tables, whose process is killed at a step of a commit when a test drops a file for the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from ckpt_runtime.connectors.delta_sink import DeltaCommitter, DeltaFile, DeltaSink
from ckpt_runtime.sinks import CommitOutcome, SinkWriter, Transaction
from tests.support.killed_steps import killed, killed_while_writing


class KilledCommitter(DeltaCommitter):
    faults = ""

    def commit(self, transaction: Transaction, committables: Sequence[DeltaFile]) -> CommitOutcome:
        killed(self.faults, "notified")
        outcome = super().commit(transaction, committables)
        killed(self.faults, "committed")
        return outcome

    def add(self, table: Any, transaction: Transaction, files: Sequence[DeltaFile]) -> None:
        killed(self.faults, "published")
        super().add(table, transaction, files)


class KilledDelta(DeltaSink):
    def __init__(self, options: Mapping[str, str]) -> None:
        self.faults = options["faults"]
        super().__init__({key: value for key, value in options.items() if key != "faults"})

    @classmethod
    def name(cls) -> str:
        return "killed"

    def open_writer(self, schema: pa.Schema, context: Any) -> SinkWriter:
        return killed_while_writing(super().open_writer(schema, context), self.faults)

    def open_committer(self, schema: pa.Schema | None, context: Any) -> DeltaCommitter:
        assert schema is not None
        self.directory.create()
        committer = KilledCommitter(self.directory, schema, self.parsed)
        committer.faults = self.faults
        return committer


def pipeline(spark: SparkSession, source: str, rate: str, output: str, faults: str) -> None:
    spark.dataSource.register(KilledDelta)
    rows = spark.readStream.format("replay").schema("n BIGINT").option("rowsPerSecond", rate).load(source)
    parts = rows.hint("uid", "rows").withColumn("part", (F.col("n") % 3).cast("string"))
    writer = parts.writeStream.format("killed").option("partitionBy", "part").option("faults", faults)
    writer.queryName("delta").start(output)


def written(spark: SparkSession, source: str, output: str) -> None:
    """The format as programs use it."""
    rows = spark.readStream.format("replay").load(source)
    rows.writeStream.format("delta").partitionBy("name").queryName("delta").start(output)
