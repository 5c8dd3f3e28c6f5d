"""The sink of PostgreSQL, whose process is killed at a step of a commit when a test drops a file for the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from ckpt_runtime.connectors.postgres_sink import Database, PostgresCommitter, PostgresSink, StagingTable
from ckpt_runtime.sinks import CommitOutcome, SinkWriter, Transaction
from tests.support.killed_steps import killed, killed_while_writing


class KilledCommitter(PostgresCommitter):
    faults = ""

    def commit(self, transaction: Transaction, committables: Sequence[StagingTable]) -> CommitOutcome:
        killed(self.faults, "notified")
        outcome = super().commit(transaction, committables)
        killed(self.faults, "committed")
        return outcome

    def merge(self, staging: StagingTable) -> None:
        super().merge(staging)
        killed(self.faults, "merged")


class KilledPostgres(PostgresSink):
    def __init__(self, options: Mapping[str, str]) -> None:
        self.faults = options["faults"]
        super().__init__({key: value for key, value in options.items() if key != "faults"})

    @classmethod
    def name(cls) -> str:
        return "killed"

    def open_writer(self, schema: pa.Schema, context: Any) -> SinkWriter:
        return killed_while_writing(super().open_writer(schema, context), self.faults)

    def open_committer(self, schema: pa.Schema | None, context: Any) -> PostgresCommitter:
        assert schema is not None
        committer = KilledCommitter(Database(self.parsed), schema, self.parsed)
        committer.faults = self.faults
        return committer


def pipeline(spark: SparkSession, source: str, rate: str, url: str, faults: str) -> None:
    spark.dataSource.register(KilledPostgres)
    rows = spark.readStream.format("replay").schema("n BIGINT").option("rowsPerSecond", rate).load(source)
    writer = rows.hint("uid", "rows").writeStream.format("killed").option("faults", faults)
    writer.option("url", url).option("dbtable", "numbers").queryName("postgres").start()


def written(spark: SparkSession, source: str, url: str) -> None:
    """The format as programs use it."""
    rows = spark.readStream.format("replay").load(source)
    rows.writeStream.format("postgresql").option("url", url).option("dbtable", "numbers").queryName("postgres").start()
