"""Rows per second of windows by a string key: with ``--spark``, the same program in the engine and in Structured
Streaming, one after the other on the same files. Both write the windows that have ended to Parquet; the rows have to be
equal. Without ``--spark`` the rows of one file are compared.

The time is from the start of the query, in a process that is warm, to its end. Processor seconds are those of all
processes: on the engine's side also those of planning the program, of starting workers and of this benchmark itself.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession

from benchmarks.harness import (
    PIPELINES,
    BenchmarkError,
    measure_here,
    parser_for,
    positive_int,
    progress,
    run_main,
    spark_beside,
)
from benchmarks.nexmark.processes import CpuTime
from benchmarks.pipelines.windows import SCHEMA, totals
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster

NAME = "windows"
_WINDOW_S = 600


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--keys", type=positive_int, default=100_000, help="number of customers")
    add_orders_options(parser, files=8)
    options = parser.parse_args()
    measure_here(NAME, options, partial(beside_spark, program=PIPELINES / "windows.py", totals=_shown))


def add_orders_options(parser: ArgumentParser, *, files: int) -> None:
    """The options of :func:`beside_spark`."""
    parser.add_argument("--rows", type=positive_int, default=20_000_000, help="rows in all")
    parser.add_argument("--files", type=positive_int, default=files, help="files, each a micro-batch of Spark's")
    parser.add_argument("--windows", type=positive_int, default=4, help="windows that the rows lie in")
    parser.add_argument("--parallelism", type=positive_int, default=2, help="subtasks, cores and shuffle partitions")
    parser.add_argument("--spark", action="store_true", help="measure Spark, too; without, it checks one file's rows")


def _shown(rows: DataFrame) -> DataFrame:
    return totals(rows).select("window.start", "customer", "orders", "total", "amounts")


def beside_spark(
    options: Any, directory: Path, program: Path, totals: Callable[[DataFrame], DataFrame]
) -> dict[str, Any]:
    """Runs a program of the engine, and the same query in Structured Streaming, and compares the rows.

    Each of them runs once before on a part of the rows. Without ``--spark`` Spark computes only that part.
    """
    for name, files in (("warm", 1), ("rows", options.files)):
        write_orders(directory / name, options.rows // options.files, files, options)
    rows = directory / "rows"
    with spark_beside(options.parallelism, "2g") as spark:
        in_spark(spark, directory / "warm", directory / "spark-warm", totals)
        if options.spark:
            with CpuTime() as spark_cpu:
                spark_s = in_spark(spark, rows, directory / "spark-rows", totals)
            progress(f"Spark: {options.rows / spark_s:,.0f} rows/s")
        with MiniCluster() as cluster:
            in_engine(cluster, program, directory / "warm", directory / "engine-warm", options.parallelism)
            with CpuTime() as engine_cpu:
                engine_s = in_engine(cluster, program, rows, directory / "engine-rows", options.parallelism)
        progress(f"engine: {options.rows / engine_s:,.0f} rows/s")
    measures = {
        "rows_per_s": round(options.rows / engine_s),
        "cpu_s": round(engine_cpu.seconds, 2),
        "result_rows": compared(directory, "rows" if options.spark else "warm"),
    }
    if options.spark:
        measures["spark_rows_per_s"] = round(options.rows / spark_s)
        measures["ratio"] = round(spark_s / engine_s, 2)
        measures["spark_cpu_s"] = round(spark_cpu.seconds, 2)
        measures["ratio_core"] = round(spark_cpu.seconds / engine_cpu.seconds, 2)
    return measures


def write_orders(directory: Path, rows: int, files: int, options: Any) -> None:
    """Writes rows in order of time, over all windows; customers and amounts are random."""
    directory.mkdir()
    names = pa.array([f"customer-{number:08d}" for number in range(options.keys)])
    generator = np.random.default_rng(1)
    step = options.windows * _WINDOW_S * 1_000_000 / (rows * files)
    for file in range(files):
        times = ((np.arange(rows) + file * rows) * step).astype(np.int64) + 1_767_225_600_000_000
        columns = {
            "customer": names.take(pa.array(generator.integers(0, options.keys, rows))),
            "amount": pa.array(generator.integers(0, 1_000, rows)),
            "placed_at": pa.array(times).cast(pa.timestamp("us", "UTC")),
        }
        pq.write_table(pa.table(columns), directory / f"{file:04d}.parquet")


def in_spark(spark: SparkSession, source: Path, output: Path, totals: Callable[[DataFrame], DataFrame]) -> float:
    """The seconds that Structured Streaming takes for all files of a directory, one per micro-batch."""
    rows = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", "1").parquet(str(source))
    frame = totals(rows)
    start = time.monotonic()
    writer = frame.writeStream.format("parquet").option("checkpointLocation", f"{output}-checkpoint")
    writer.trigger(availableNow=True).start(str(output)).awaitTermination()
    return time.monotonic() - start


def in_engine(cluster: MiniCluster, program: Path, source: Path, output: Path, parallelism: int) -> float:
    """The seconds that a job of the engine takes from its submission to its end."""
    configuration = {"execution.checkpointing.interval": "1 s"}
    start = time.monotonic()
    job = cluster.submit(
        program, arguments=[str(source), str(output)], configuration=configuration, parallelism=parallelism
    )
    cluster.wait_for_status(job, JobStatus.FINISHED, timeout_s=600)
    return time.monotonic() - start


def compared(directory: Path, part: str) -> int:
    """Returns the number of rows of a result. Raises BenchmarkError for rows that differ from Spark's."""
    order = [("start", "ascending"), ("customer", "ascending")]
    tables = [pq.read_table(directory / f"{side}-{part}").sort_by(order) for side in ("spark", "engine")]
    for name in tables[0].column_names:
        left, right = (table[name].cast(tables[0].schema.field(name).type) for table in tables)
        if len(left) != len(right) or not pc.all(pc.equal(left, right)).as_py():
            raise BenchmarkError(f"column {name} differs from Spark's: {len(right)} rows, {len(left)} in Spark")
    return int(tables[0].num_rows)


if __name__ == "__main__":
    run_main(main)
