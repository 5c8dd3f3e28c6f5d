"""One offset range that takes long to read, as a reader without a read limit makes it at its start.

Arguments: OUTPUT QUICK, a file; once that is there, the rest comes at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

PARTITIONS = 3
BATCHES = 60
BATCH_ROWS = 20
SCHEMA = pa.schema([("part", pa.int64()), ("n", pa.int64())])


class BulkReader(DataSourceStreamReader):
    """Gives everything at once, slowly."""

    def __init__(self, quick: str) -> None:
        self._quick = Path(quick)

    def initialOffset(self) -> dict[str, Any]:
        return {"ranges": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"ranges": 2}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(number) for number in range(PARTITIONS)]

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:
        for batch in range(BATCHES):
            if not self._quick.exists():
                time.sleep(0.2)
            numbers = range(batch * BATCH_ROWS, (batch + 1) * BATCH_ROWS)
            columns = [pa.array([partition.value] * BATCH_ROWS), pa.array(numbers, pa.int64())]
            yield pa.record_batch(columns, schema=SCHEMA)


class Bulk(DataSource):
    """The reader's source."""

    @classmethod
    def name(cls) -> str:
        return "bulk"

    def schema(self) -> str:
        return "part BIGINT, n BIGINT"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return BulkReader(self.options["quick"])


def pipeline(spark: SparkSession, output: str, quick: str) -> None:
    """Builds the job."""
    spark.dataSource.register(Bulk)
    rows = spark.readStream.format("bulk").option("quick", quick).option("orderedReads", True).load()
    rows.hint("uid", "bulk").writeStream.format("parquet").queryName("rows").start(output)
