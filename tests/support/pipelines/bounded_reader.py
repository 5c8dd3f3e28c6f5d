"""A PySpark reader that gives all there is as one range, slowly, and then ends. Arguments: OUTPUT ROWS FAULTS.

A file ``read-quick`` among the faults lets the rest come at once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from injected import act
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

ROWS_PER_PARTITION = 10
PAUSE_S = 0.15


class SlowReader(DataSourceStreamReader):
    """A pause for each partition."""

    def __init__(self, options: Any) -> None:
        self.rows, self.faults = int(options["rows"]), options["faults"]

    def initialOffset(self) -> dict[str, Any]:
        return {"n": 0}

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        return {"n": self.rows}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        return [InputPartition(n) for n in range(start["n"], end["n"], ROWS_PER_PARTITION)]

    def read(self, partition: Any) -> Iterator[Any]:
        act(self.faults, "read")
        if not Path(self.faults, "read-quick").exists():
            time.sleep(PAUSE_S)
        yield from ((n,) for n in range(partition.value, min(partition.value + ROWS_PER_PARTITION, self.rows)))


class Slow(DataSource):
    """The reader's source."""

    def schema(self) -> str:
        return "n BIGINT"

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return SlowReader(self.options)


def pipeline(spark: SparkSession, output: str, rows: str, faults: str) -> None:
    """Builds the job."""
    spark.dataSource.register(Slow)
    numbers = spark.readStream.format("Slow").option("rows", rows).option("faults", faults).load().hint("uid", "slow")
    numbers.writeStream.format("parquet").trigger(availableNow=True).queryName("numbers").start(output)
