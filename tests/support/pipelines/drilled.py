"""A source that is notified of checkpoints, keyed state, a transactional sink and a user's stream writer.

Everything that may be seen of the job lies below one directory: the acknowledgements of the source, the table, the
batches. What steers it - how many numbers there are, whether user code fails - lies in another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader
from user_sources import Batches, BatchWriter, Counting, CountingReader

SCHEMA = "n BIGINT, label STRING"


class AcknowledgedReader(CountingReader):
    """Notes each acknowledgement."""

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        self.acknowledgements = Path(options["acknowledgements"])

    def commit(self, end: dict[str, Any]) -> None:
        with self.acknowledgements.open("a") as file:
            file.write(json.dumps(end) + "\n")


class Acknowledged(Counting):
    """The source."""

    @classmethod
    def name(cls) -> str:
        return "acknowledged"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return AcknowledgedReader(self.options)


class AbortingWriter(BatchWriter):
    """Also notes what is aborted."""

    def abort(self, messages: list[Any], batchId: int) -> None:
        (self.directory / f"aborted-{batchId}").touch()


class AbortedBatches(Batches):
    """The writer's source."""

    @classmethod
    def name(cls) -> str:
        return "aborted-batches"

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return AbortingWriter(self.options)


def pipeline(spark: SparkSession, outside: str, steering: str, ending: str) -> None:
    """Builds the job. ``ending`` is ``finished`` for one that ends with what is there."""
    classes: tuple[type[DataSource], ...] = (Acknowledged, AbortedBatches)
    for source in classes:
        spark.dataSource.register(source)

    def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if Path(steering, "fails").exists():
                raise RuntimeError("user code fails")
            yield batch

    rows = (
        spark.readStream.format("acknowledged")
        .option("limit", f"{steering}/limit")
        .option("acknowledgements", f"{outside}/acknowledgements")
        .load()
        .hint("uid", "numbers")
        .mapInArrow(pass_through, SCHEMA)
        .hint("uid", "map")
    )
    batches = rows.writeStream.format("aborted-batches").option("directory", f"{outside}/batches")
    batches = batches.option("faults", steering).queryName("batches")
    counts = rows.groupBy("n").agg(F.count("*").alias("times")).hint("uid", "counts")
    # Without a name: the derived uid has to be the same in a drill.
    table = counts.writeStream.format("parquet").outputMode("update").option("path", f"{outside}/table")
    for query in (batches, table):
        (query.trigger(availableNow=True) if ending == "finished" else query).start()
