"""Says how many rows each call of ``handleInputRows`` got, from a processor whose slowness is an argument."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from pyspark.sql import Row, SparkSession
from pyspark.sql.streaming.stateful_processor import StatefulProcessor


class Calls(StatefulProcessor):
    """One row for each call."""

    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        values = []
        for row in rows:
            time.sleep(self._sleep_s)
            values.append(row.v)
        yield Row(k=key[0], rows=len(values), total=sum(values))

    def close(self) -> None:
        pass


def pipeline(spark: SparkSession, rows: str, output: str, sleep_ms: str) -> None:
    """``rows`` is a Parquet file with the columns k and v."""
    (
        spark.readStream.format("replay")
        .load(rows)
        .hint("uid", "rows")
        .groupBy("k")
        .transformWithState(Calls(float(sleep_ms) / 1000), "k STRING, rows INT, total INT", "Append", "None")
        .hint("uid", "calls")
        .writeStream.format("parquet")
        .queryName("calls")
        .start(output)
    )
