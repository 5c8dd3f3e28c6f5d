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
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from ckpt_runtime.connectors import delta_sink, file_sink, kafka_sink, postgres_sink, staged_sinks
from tests.support.killed_steps import killed

Place = tuple[type, str]
"""A class and the name of its method."""


class Steps(NamedTuple):
    """Where a sink writes, prepares, commits, shows its rows, and cleans up."""

    write: Place
    prepare: Place
    commit: Place
    publish: Place
    clean_up: Place


_WRITES_PART, _CLEANS_PARTS = (file_sink.PartWriter, "write"), (file_sink.FileSink, "clean_up")
_POSTGRES = Steps(
    (postgres_sink.PostgresWriter, "write"),
    (postgres_sink.PostgresWriter, "prepare_commit"),
    (postgres_sink.PostgresCommitter, "commit"),
    (postgres_sink.PostgresCommitter, "merge"),
    (postgres_sink.PostgresSink, "clean_up"),
)
_STEPS = {
    "parquet": Steps(
        _WRITES_PART,
        (file_sink.PartWriter, "prepare_commit"),
        (file_sink._PartCommitter, "commit"),
        (file_sink.PartDirectory, "commit"),
        _CLEANS_PARTS,
    ),
    "delta": Steps(
        _WRITES_PART,
        (delta_sink._DeltaWriter, "prepare_commit"),
        (delta_sink.DeltaCommitter, "commit"),
        (delta_sink.DeltaCommitter, "publish"),
        _CLEANS_PARTS,
    ),
    "foreachBatch": Steps(
        _WRITES_PART,
        (file_sink.PartWriter, "prepare_commit"),
        (staged_sinks._BatchCommitter, "commit"),
        (staged_sinks._BatchCommitter, "_call"),
        _CLEANS_PARTS,
    ),
    "postgresql": _POSTGRES,
    "postgresql-prepared": _POSTGRES._replace(publish=(postgres_sink.PostgresCommitter, "commit_prepared")),
    "kafka": Steps(
        (kafka_sink._KafkaWriter, "write"),
        (kafka_sink._TransactionWriter, "prepare_commit"),
        (kafka_sink.TransactionCommitter, "commit"),
        (kafka_sink._TransactionalProducer, "commit"),
        (kafka_sink.TransactionCommitter, "_abort_subtask"),
    ),
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

    steps = _STEPS["parquet" if format_ == "json-s3" else format_.removesuffix("-s3")]
    wrap(steps.write, None, kills("write"))
    wrap(steps.prepare, None, kills("prepare"))
    wrap(steps.commit, kills("notify"), kills("commit"))
    wrap(steps.publish, None, kills("publish"))
    wrap(steps.clean_up, kills("clean-up"), None)


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
    writer = rows.selectExpr(*columns).writeStream.format(format_.split("-", maxsplit=1)[0]).options(**options)
    if format_.removesuffix("-s3") in ("parquet", "delta", "json"):
        writer = writer.partitionBy("part")
    writer.queryName("sink").start()
