"""The documentation's sink, whose process is killed at a step of its protocol when a test drops a file for the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from documented import Committer, SqliteSink, Writer
from pyspark.sql import SparkSession

from ckpt_runtime.sinks import CommitOutcome, Transaction
from tests.support.killed_steps import killed


class KilledWriter(Writer):  # type: ignore[misc]
    def __init__(self, schema: pa.Schema, faults: str) -> None:
        super().__init__(schema)
        self.faults = faults

    def write(self, batch: pa.RecordBatch) -> None:
        super().write(batch)
        killed(self.faults, "write")

    def prepare_commit(self, checkpoint_id: int) -> Sequence[Any]:
        committables = super().prepare_commit(checkpoint_id)
        if committables:
            killed(self.faults, "prepare")
        return committables  # type: ignore[no-any-return]


class KilledCommitter(Committer):  # type: ignore[misc]
    def __init__(self, path: str, columns: list[str], faults: str) -> None:
        super().__init__(path, columns)
        self.faults = faults

    def commit(self, transaction: Transaction, committables: Sequence[Any]) -> CommitOutcome:
        killed(self.faults, "notified")
        outcome: CommitOutcome = super().commit(transaction, committables)
        killed(self.faults, "committed")
        return outcome


class KilledSink(SqliteSink):  # type: ignore[misc]
    @classmethod
    def name(cls) -> str:
        return "killed"

    def open_writer(self, schema: pa.Schema, context: Any) -> Writer:
        return KilledWriter(schema, self.options["faults"])

    def open_committer(self, schema: pa.Schema, context: Any) -> Committer:
        return KilledCommitter(self.options["path"], schema.names, self.options["faults"])


def pipeline(spark: SparkSession, source: str, rate: str, database: str, faults: str) -> None:
    spark.dataSource.register(KilledSink)
    rows = spark.readStream.format("replay").schema("n BIGINT").option("rowsPerSecond", rate).load(source)
    writer = rows.hint("uid", "rows").writeStream.format("killed").option("faults", faults)
    writer.queryName("numbers").start(database)
