"""Numbers into a built-in sink whose process is killed at a step when a test drops a file for the step.

The engine's own classes are wrapped in the processes that import this program, so that the format is the one that
programs name. Each sink has the same six steps:

- ``write``: rows have been given to the writer.
- ``prepare``: they are durable, and their checkpoint has not completed.
- ``notify``: the checkpoint has completed, and the commit begins.
- ``publish``: the target has been changed, and the commit is not complete.
- ``commit``: the commit is complete, and nothing in a checkpoint says so.
- ``clean-up``: what an earlier attempt has left is being removed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from ckpt_runtime.connectors import delta_sink, file_sink, kafka_sink, postgres_sink, staged_sinks
from tests.support.killed_steps import killed

Place = tuple[type, str]
"""A class and the name of its method."""

_WRITES: dict[str, Place] = {
    "parquet": (file_sink.PartWriter, "write"),
    "delta": (file_sink.PartWriter, "write"),
    "foreachBatch": (file_sink.PartWriter, "write"),
    "postgresql": (postgres_sink.PostgresWriter, "write"),
    "postgresql-prepared": (postgres_sink.PostgresWriter, "write"),
    "kafka": (kafka_sink._KafkaWriter, "write"),
}
_PREPARES: dict[str, Place] = {
    "parquet": (file_sink.PartWriter, "prepare_commit"),
    "delta": (delta_sink._DeltaWriter, "prepare_commit"),
    "foreachBatch": (file_sink.PartWriter, "prepare_commit"),
    "postgresql": (postgres_sink.PostgresWriter, "prepare_commit"),
    "postgresql-prepared": (postgres_sink.PostgresWriter, "prepare_commit"),
    "kafka": (kafka_sink._TransactionWriter, "prepare_commit"),
}
_COMMITS: dict[str, Place] = {
    "parquet": (file_sink._PartCommitter, "commit"),
    "delta": (delta_sink.DeltaCommitter, "commit"),
    "foreachBatch": (staged_sinks._BatchCommitter, "commit"),
    "postgresql": (postgres_sink.PostgresCommitter, "commit"),
    "postgresql-prepared": (postgres_sink.PostgresCommitter, "commit"),
    "kafka": (kafka_sink.TransactionCommitter, "commit"),
}
_PUBLISHES: dict[str, Place] = {
    "parquet": (file_sink.PartDirectory, "commit"),
    "delta": (delta_sink.DeltaCommitter, "publish"),
    "foreachBatch": (staged_sinks._BatchCommitter, "_call"),
    "postgresql": (postgres_sink.PostgresCommitter, "merge"),
    "postgresql-prepared": (postgres_sink.PostgresCommitter, "commit_prepared"),
    "kafka": (kafka_sink._TransactionalProducer, "commit"),
}
_CLEAN_UPS: dict[str, Place] = {
    "parquet": (file_sink.FileSink, "clean_up"),
    "delta": (file_sink.FileSink, "clean_up"),
    "foreachBatch": (file_sink.FileSink, "clean_up"),
    "postgresql": (postgres_sink.PostgresSink, "clean_up"),
    "postgresql-prepared": (postgres_sink.PostgresSink, "clean_up"),
    "kafka": (kafka_sink.TransactionCommitter, "_abort_subtask"),
}


def wrap(place: Place, before: Callable[[], None] | None, after: Callable[[], None] | None) -> None:
    """Has functions called before and after each call of a method."""
    owner, name = place
    method = getattr(owner, name)

    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before is not None:
            before()
        result = method(*arguments, **named)
        if after is not None:
            after()
        return result

    setattr(owner, name, wrapped)


def arm(format_: str, faults: str) -> None:
    """Wraps the classes of a sink. ``prepare_commit`` of the Delta sink calls that of files: one of both is wrapped."""

    def kills(step: str) -> Callable[[], None]:
        return functools.partial(killed, faults, step)

    wrap(_WRITES[format_], None, kills("write"))
    wrap(_PREPARES[format_], None, kills("prepare"))
    wrap(_COMMITS[format_], kills("notify"), kills("commit"))
    wrap(_PUBLISHES[format_], None, kills("publish"))
    wrap(_CLEAN_UPS[format_], kills("clean-up"), None)


def pipeline(spark: SparkSession, format_: str, source: str, rate: str, options: str, faults: str) -> None:
    arm(format_, faults)
    rows = spark.readStream.format("replay").schema("n BIGINT").option("rowsPerSecond", rate).load(source)
    # Each sink has two inputs, whose barriers arrive at different times.
    parts = rows.hint("uid", "rows").withColumn("part", (F.col("n") % 3).cast("string")).repartition(2)
    _write(parts, format_, json.loads(options))


def _write(rows: DataFrame, format_: str, options: dict[str, str]) -> None:
    if format_ == "foreachBatch":
        path = options["path"]

        def write(batch: DataFrame, batch_id: int) -> None:
            batch.write.mode("overwrite").parquet(f"{path}/{batch_id}")

        rows.writeStream.foreachBatch(write).queryName("sink").start()
        return
    columns: Sequence[str] = ("n", "part")
    if format_ == "kafka":
        columns = (
            "CAST(n AS STRING) AS key",
            "CASE WHEN n % 2 = 0 THEN CAST(n AS STRING) END AS value",
            "array(named_struct('key', 'part', 'value', CAST(part AS BINARY))) AS headers",
        )
    writer = rows.selectExpr(*columns).writeStream.format(format_.removesuffix("-prepared")).options(**options)
    if format_ in ("parquet", "delta"):
        writer = writer.partitionBy("part")
    writer.queryName("sink").start()
