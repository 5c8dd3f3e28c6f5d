"""The same processor on the same batches in Spark and in the engine."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark import cloudpickle
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import program_of
from tests.support.pipelines import arrow_processors, group_functions, side_processors, unusual_processors

ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

Rows = list[dict[str, Any]]

PROCESSORS = (side_processors, unusual_processors, arrow_processors)

for module in (group_functions, *PROCESSORS):
    cloudpickle.register_pickle_by_value(module)


@dataclass
class Case:
    """A processor and how it is used; ``watermark`` is column and delay, ``in_pandas`` for processors of frames.
    With a ``timeout`` it is a function for ``applyInPandasWithState``.

    ``encoding`` is Spark's of its states: schemas evolve with ``avro`` only, which has not all types. ``chunk``: how
    many rows the engine's reader gives at a time. ``ends``: the first batch is all that this reader has. ``entry``: the
    engine's pipeline.
    """

    processor: str
    batches: Sequence[pa.Table]
    schema: str
    keys: Sequence[str] = ("k",)
    mode: str = "Update"
    time_mode: str = "None"
    watermark: tuple[str, str] | None = None
    second: str = ""
    encoding: str = "unsaferow"
    in_pandas: bool = False
    timeout: str = ""
    chunk: int = 0
    ends: bool = False
    entry: str = "side_by_side:pipeline"
    configuration: dict[str, str] = field(default_factory=dict)

    def described(self, **more: str) -> str:
        """What the test pipeline takes."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("batches", "configuration")}
        return json.dumps({**facts, **more})


def in_spark(spark: SparkSession, case: Case, directory: Path, *, first: int = 0) -> list[Rows]:
    """The rows that each batch gives, those of the batch without data behind it included.

    A second call with the number of batches so far continues from the first one's checkpoint.
    """
    source = directory / "spark-in"
    source.mkdir(parents=True, exist_ok=True)
    pq.write_table(case.batches[0].schema.empty_table(), directory / "schema.parquet")
    spark = spark.newSession()  # its settings are its own
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    spark.conf.set("spark.sql.streaming.stateStore.encodingFormat", case.encoding)
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    # With the clock as time, batches without data would never end.
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", str(case.time_mode == "EventTime").lower())
    schema = spark.read.parquet(str(directory / "schema.parquet")).schema
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(source))
    if case.watermark is not None:
        stream = stream.withWatermark(*case.watermark)
    for name in filter(None, (case.processor, case.second)):
        grouped = stream.groupBy(*case.keys)
        if case.timeout:
            function = getattr(group_functions, name)
            stream = grouped.applyInPandasWithState(
                function, case.schema, group_functions.STATE, case.mode, case.timeout
            )
            continue
        processor = next(getattr(module, name) for module in PROCESSORS if hasattr(module, name))
        transform = grouped.transformWithStateInPandas if case.in_pandas else grouped.transformWithState
        stream = transform(processor(), case.schema, case.mode, case.time_mode)
    seen: list[Rows] = []

    def collect(frame: DataFrame, _batch: int) -> None:
        seen.append([row.asDict(recursive=True) for row in frame.collect()])

    query = (
        stream.writeStream.foreachBatch(collect)
        .option("checkpointLocation", str(directory / "spark-checkpoint"))
        .outputMode(case.mode.lower())
        .start()
    )
    results = []
    try:
        for number, batch in enumerate(case.batches, start=first):
            before = len(seen)
            pq.write_table(batch, directory / "next.parquet")
            os.rename(directory / "next.parquet", source / f"{number}.parquet")
            process_all_available(query)
            results.append([row for rows in seen[before:] for row in rows])
    finally:
        query.stop()
    return results


@dataclass
class EngineRun:
    """A job of the engine whose checkpoints are the batches.

    It starts from ``savepoint``, which covers the batches before ``first``.
    """

    cluster: MiniCluster
    case: Case
    directory: Path
    savepoint: str | None = None
    first: int = 0
    parallelism: int = 1

    def rows(self, *, drain: bool = False) -> Rows:
        """All rows, after a stop with a savepoint, which ``savepoint`` names then, or after the end of the data."""
        source, output = self.directory / "in", self.directory / "out"
        source.mkdir(parents=True, exist_ok=True)
        for number in range(self.first):
            pq.write_table(self.case.batches[0].schema.empty_table(), source / f"batch-{number}.parquet")
            (source / f"committed-{number}").touch()
        for number, batch in enumerate(self.case.batches, start=self.first):
            pq.write_table(batch, source / f"batch-{number}.parquet")
        job = self.cluster.submit(
            program_of(self.case.entry.partition(":")[0]),
            entry=self.case.entry,
            arguments=[self.case.described(source=str(source), output=str(output))],
            configuration={
                "execution.checkpointing.interval": "100 ms",
                "execution.checkpointing.dir": str(self.directory / "checkpoints"),
                "execution.stateful-processor.trigger.type": "CHECKPOINT",
                "restart-strategy.type": "none",
                **self.case.configuration,
            },
            savepoint=self.savepoint,
            parallelism=self.parallelism,
        )
        try:
            if not self.case.ends:
                self.cluster.wait_until(lambda: self._committed(job, source), "all batches to be committed")
                self.savepoint = self.cluster.savepoint(job, self.directory / "savepoints", stop=True, drain=drain)
            self.cluster.wait_for_status(job, JobStatus.FINISHED)
        finally:
            if not self.cluster.status(job).is_globally_terminal:
                self.cluster.call(self.cluster.dispatcher.cancel_job(job))
                self.cluster.wait_for_status(job, JobStatus.CANCELED, JobStatus.FAILED)
        files = sorted(output.glob("[!.]*.parquet"))
        return [row for file in files for row in pq.read_table(file).to_pylist()]

    def _committed(self, job: str, source: Path) -> bool:
        assert self.cluster.status(job) is not JobStatus.FAILED, self.cluster.failure(job)
        return len(list(source.glob("committed-*"))) == self.first + len(self.case.batches)


def process_all_available(query: StreamingQuery) -> None:
    """Returns when Spark has processed what is there, and has done the batch without data behind it.

    It tells the first call that there is nothing new when it had looked for data before that was there.
    """
    query.processAllAvailable()
    query.processAllAvailable()


def flat(results: list[Rows]) -> Rows:
    """The rows of all batches."""
    return [row for rows in results for row in rows]


def ordered(rows: Rows) -> Rows:
    """For comparing what has no order."""
    return sorted(rows, key=repr)
