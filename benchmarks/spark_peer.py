"""The keyed benchmarks' work on Spark Structured Streaming: its ``rows_per_s``, as a peer of ours.

The same rows (``splitmix64``) come from Parquet files that are written once, several files per micro-batch, in update
mode into the noop sink: ``count`` is ``groupBy.agg``, ``process`` is ``transformWithState`` with the
``StatefulProcessor`` of our benchmark, unchanged. Rate: rows of all micro-batches after the warm-up, over the time
from the start of the first of them to the end of the last. Each of them ends with a commit, as checkpoints do.

Spark emits one row per key and micro-batch from ``agg``, where we emit one per input row: the comparison favours Spark.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession, functions
from pyspark.sql.streaming.query import StreamingQuery

from benchmarks.expected import splitmix64
from benchmarks.harness import BenchmarkError, measure_here, parser_for, positive_int, progress, run_main
from benchmarks.pipelines.keyed_process import OUTPUT_SCHEMA, CountAndSum

NAME = "spark_peer"
WARM_UP_BATCHES = 3
WARM_UP_S = 15.0
STATE_STORES = {
    "rocksdb": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    "hdfs": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
}


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument(
        "--what", choices=("count", "process"), default="count", help="groupBy.agg or transformWithState"
    )
    parser.add_argument("--keys", type=positive_int, default=100_000, help="number of keys")
    parser.add_argument("--parallelism", type=positive_int, default=2, help="local cores and shuffle partitions")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the measured stretch, at least")
    parser.add_argument("--file-rows", type=positive_int, help="rows per file (default 1000000, or 50000 for process)")
    parser.add_argument("--files-per-batch", type=positive_int, default=2, help="files per micro-batch")
    parser.add_argument("--state", choices=STATE_STORES, default="rocksdb", help="state store; process needs rocksdb")
    options = parser.parse_args()
    options.file_rows = options.file_rows or (1_000_000 if options.what == "count" else 50_000)
    if options.what == "process" and options.state == "hdfs":
        parser.error("--state hdfs: transformWithState needs rocksdb")
    measure_here(NAME, options, _measure)


def rows_batch(first: int, rows: int, keys: int) -> pa.RecordBatch:
    """Rows ``first`` to ``first + rows - 1`` of the generator, computed with NumPy (arithmetic modulo 2**64)."""
    z = splitmix64(np.arange(first, first + rows, dtype=np.uint64))
    key, value = (z % np.uint64(keys)).astype(np.int64), (z & np.uint64(1023)).astype(np.int64)
    return pa.RecordBatch.from_arrays([pa.array(key), pa.array(value)], names=["key", "value"])


def _measure(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    spark = (
        SparkSession.builder.master(f"local[{options.parallelism}]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", options.parallelism)
        .config("spark.sql.streaming.numRecentProgressUpdates", 10_000)
        .config("spark.sql.streaming.stateStore.providerClass", STATE_STORES[options.state])
        .config("spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled", "true")
        .getOrCreate()
    )
    try:
        spark.sparkContext.setLogLevel("ERROR")
        files = _Files(directory / "rows", options.file_rows, options.keys)
        files.write((WARM_UP_BATCHES + 2) * options.files_per_batch)
        query = _start(spark, options, directory)
        return _follow(query, files, options)
    finally:
        spark.stop()


class _Files:
    """The input files. One pool of rows is written once; further files are hard links to it, under new names."""

    POOL = 16

    def __init__(self, directory: Path, rows: int, keys: int) -> None:
        self._directory = directory
        self._rows = rows
        self._keys = keys
        self._pool: list[Path] = []
        self.written = 0
        directory.mkdir()

    def write(self, count: int) -> None:
        """Adds that many files."""
        for _ in range(count):
            target = self._directory / f"rows-{self.written:06}.parquet"
            if len(self._pool) < self.POOL:
                batch = rows_batch(self.written * self._rows, self._rows, self._keys)
                partial = self._directory / f"_{target.name}"
                pq.write_table(pa.Table.from_batches([batch]), partial)
                partial.rename(target)
                self._pool.append(target)
            else:
                os.link(self._pool[self.written % self.POOL], target)
            self.written += 1


def _start(spark: SparkSession, options: argparse.Namespace, directory: Path) -> StreamingQuery:
    source = (
        spark.readStream.schema("key BIGINT, value BIGINT")
        .option("maxFilesPerTrigger", options.files_per_batch)
        .parquet(str(directory / "rows"))
    )
    result: DataFrame
    if options.what == "count":
        result = source.groupBy("key").agg(functions.count("*").alias("count"), functions.sum("value").alias("sum"))
    else:
        result = source.groupBy("key").transformWithState(CountAndSum(), OUTPUT_SCHEMA, "Update", "None")
    writer = result.writeStream.outputMode("update").format("noop")
    return writer.option("checkpointLocation", str(directory / "checkpoint")).start()


def _follow(query: StreamingQuery, files: _Files, options: argparse.Namespace) -> dict[str, Any]:
    """Keeps some micro-batches of files ahead of the query until the measured stretch is long enough."""
    ahead = 8 * options.files_per_batch
    try:
        while True:
            if (failure := query.exception()) is not None:
                raise BenchmarkError(str(failure))
            batches = _batches(query)
            measured = [b for b in batches[WARM_UP_BATCHES:] if b["start"] >= batches[0]["start"] + WARM_UP_S]
            if sum(batch["seconds"] for batch in measured) >= options.seconds:
                break
            done = sum(batch["rows"] for batch in batches) // options.file_rows
            files.write(max(0, done + ahead - files.written))
            time.sleep(0.1)
    finally:
        query.stop()
    span = measured[-1]["start"] + measured[-1]["seconds"] - measured[0]["start"]
    rows = sum(batch["rows"] for batch in measured)
    progress(f"{len(measured)} micro-batches of {rows // len(measured):,} rows")
    return {
        "rows_per_s": round(rows / span),
        "micro_batches": len(measured),
        "batch_s_p50": round(statistics.median(batch["seconds"] for batch in measured), 3),
    }


def _batches(query: StreamingQuery) -> list[dict[str, float]]:
    """The micro-batches that had rows: rows, start (s since epoch) and length (s)."""
    found = []
    for entry in query.recentProgress:
        progress_of = json.loads(entry.json) if not isinstance(entry, dict) else entry
        if progress_of["numInputRows"]:
            start = datetime.fromisoformat(progress_of["timestamp"].replace("Z", "+00:00")).timestamp()
            seconds = progress_of["durationMs"]["triggerExecution"] / 1000
            found.append({"rows": progress_of["numInputRows"], "start": start, "seconds": seconds})
    return found


if __name__ == "__main__":
    run_main(main)
