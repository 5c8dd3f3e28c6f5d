"""Rows per second of Spark's data source ``ckpt-state``: reading the state of a savepoint, and writing a savepoint.

The job of :mod:`benchmarks.savepoint` fills its state, takes a savepoint and ends. Spark reads all values, then writes
the same rows as the state of a new savepoint, which copies everything else from the first one. What is written lies
ready on the disk. Each key has to be read once, with a value of the right size, and the job has to continue from the
new savepoint: each update checks that the state is what the update before it wrote.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from benchmarks import harness
from benchmarks.savepoint import FILL_TIMEOUT_S, PARALLELISM, Pace, check_order, start

NAME = "state_processor"
WARM_ROWS = 1000


def main() -> None:
    """The command line."""
    parser = harness.parser_for(NAME, __doc__ or "")
    parser.add_argument("--state-mb", type=harness.positive_int, default=1000, help="size of the state")
    parser.add_argument("--format", choices=("native", "canonical"), default="native", help="of the read savepoint")
    parser.add_argument("--value-bytes", type=harness.positive_int, default=500, help="size of one value")
    harness.add_backend_option(parser, default="rocksdb")
    options = parser.parse_args()
    with harness.session(PARALLELISM) as running:
        measures = _measured(running, options)
        peak_rss_mb = running.peak_rss_mb
    harness.emit(NAME, options, measures, peak_rss_mb)


def _measured(running: harness.BenchmarkSession, options: argparse.Namespace) -> dict[str, Any]:
    keys = options.state_mb * 1_000_000 // options.value_bytes
    pace = Pace(keys, rows_per_s=0, spread=1)
    of_job = argparse.Namespace(**vars(options), copies=False)
    job = start(running, of_job, pace)
    harness.progress(f"filling {keys:,} keys")
    job.wait_for("the state to be full", lambda: job.report().total("keys") == keys, FILL_TIMEOUT_S)
    savepoint = job.savepoint("NATIVE" if options.format == "native" else "CANONICAL").external_path or ""
    job.cancel()
    with harness.spark_beside(PARALLELISM, "2g") as spark:
        target = f"{running.directory}/small"
        columns = ("struct(id AS key) AS key", "struct(id AS count, encode(string(id), 'UTF-8') AS bytes) AS value")
        _write(spark.range(WARM_ROWS).selectExpr(*columns), target, kind="value")
        found = _state(spark, target).count()
        if found != WARM_ROWS:
            raise harness.BenchmarkError(f"a savepoint of {WARM_ROWS} rows has {found}")
        read_s, write_s = _in_spark(spark, savepoint, f"{running.directory}/written", options, keys)
    restored = start(running, of_job, pace, f"{running.directory}/written")
    restored.let_run(1.0)
    check_order(restored)
    restored.cancel()
    harness.progress("the job has continued from what Spark wrote")
    return {"read_rows_per_s": round(keys / read_s), "write_rows_per_s": round(keys / write_s)}


def _in_spark(
    spark: SparkSession, savepoint: str, target: str, options: argparse.Namespace, keys: int
) -> tuple[float, float]:
    """The seconds of reading and of writing. Raises BenchmarkError for missing, repeated or cut values."""
    begun = time.monotonic()
    facts = ("count(*)", "sum(key.key)", "sum(length(value.bytes))")
    found = tuple(_state(spark, savepoint).selectExpr(*facts).collect()[0])
    read_s = time.monotonic() - begun
    wanted = (keys, keys * (keys - 1) // 2, keys * options.value_bytes)
    if found != wanted:
        raise harness.BenchmarkError(
            f"Spark has read {found} (rows, sum of keys, bytes), and the savepoint holds {wanted}"
        )
    harness.progress(f"read {keys:,} rows in {read_s:.2f} s")
    rows = _state(spark, savepoint).persist(StorageLevel.DISK_ONLY)
    rows.count()
    begun = time.monotonic()
    _write(rows, target, base=savepoint)
    write_s = time.monotonic() - begun
    harness.progress(f"wrote them in {write_s:.2f} s")
    return read_s, write_s


def _state(spark: SparkSession, savepoint: str) -> DataFrame:
    reader = spark.read.format("ckpt-state").option("operator", "state").option("state", "values")
    return reader.load(savepoint)


def _write(rows: DataFrame, target: str, **options: str) -> None:
    writer = rows.write.format("ckpt-state").mode("append").option("operator", "state").option("state", "values")
    writer.options(**options).save(target)


if __name__ == "__main__":
    harness.run_main(main)
