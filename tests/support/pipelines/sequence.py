"""Counted rows through user code, keyed state and transactional sinks; every lost or repeated row shows in the output.

Source ``numbers`` gives (source, n) with n = 0, 1, 2, ... per source. ``order`` gets each row with the number of rows
that keyed state had seen of its source (n + 1, if and only if state and input are exact), ``counts`` the running
aggregate of each source.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from injected import act, leave, sign_in
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

SCHEMA = "source BIGINT, n BIGINT"


class SeenCounter(StatefulProcessor):
    """How many rows of its key came so far."""

    def __init__(self, faults: str | None, sleep_ms: float) -> None:
        self._faults = faults
        self._sleep_s = sleep_ms / 1000

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._seen = handle.getValueState("seen", "seen BIGINT")
        sign_in(self._faults)

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        act(self._faults, "processor")
        known = self._seen.get()
        seen = 0 if known is None else known[0]
        for row in rows:
            seen += 1
            if self._sleep_s:
                time.sleep(self._sleep_s)
            yield Row(source=key[0], n=row.n, seen=seen)
        self._seen.update((seen,))

    def close(self) -> None:
        act(self._faults, "close")


def pipeline(spark: SparkSession, *arguments: str) -> None:
    """Builds the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", required=True)
    parser.add_argument("--rows", default="0")
    parser.add_argument("--rate", default="0")
    parser.add_argument("--batch", default="256")
    parser.add_argument("--faults")
    parser.add_argument("--sleep-ms", default="0", help="per row of the order, so that it holds the sources back")
    parser.add_argument("--uids", default="")
    options = parser.parse_args(arguments)

    counter = SeenCounter(options.faults, float(options.sleep_ms))
    mark = spark.conf.get("sequence.mark", "") or None

    def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            leave(options.faults, mark)
            act(options.faults, "map")
            yield batch

    rows = (
        spark.readStream.format("numbers")
        .option("sequence", True)
        .option("rows", options.rows)
        .option("rowsPerSecond", options.rate)
        .option("batchRows", options.batch)
        .load()
        .hint("uid", f"numbers{options.uids}")
        .mapInArrow(pass_through, SCHEMA)
        .hint("uid", f"map{options.uids}")
    )
    (
        rows.groupBy("source")
        .transformWithState(counter, f"{SCHEMA}, seen BIGINT", "Append", "None")
        .hint("uid", f"order{options.uids}")
        .writeStream.format("parquet")
        .queryName(f"order{options.uids}")
        .start(f"{options.output}/order")
    )
    (
        rows.groupBy("source")
        .agg(F.count("*").alias("rows"), F.max("n").alias("greatest"))
        .hint("uid", f"counts{options.uids}")
        .writeStream.format("parquet")
        .outputMode("update")
        .queryName(f"counts{options.uids}")
        .start(f"{options.output}/counts")
    )
