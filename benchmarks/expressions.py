"""Rows per second of ten expressions and a filter over Parquet files: the same program in the engine, as a batch of
Spark's, and by hand with Arrow's functions.

Each of them also computes a part of the rows, and these results have to be equal. The measured runs read all rows and
write none. Spark's time is that of the batch in a session that is warm, the engine's is from RUNNING to the end of the
job, with a checkpoint per second. Processor seconds are those of all processes of a side. The hand-written program has
a thread per subtask, and each takes the next file.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

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
from benchmarks.nexmark.processes import CpuTime, Timed
from benchmarks.pipelines.expressions import SCHEMA, computed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster

NAME = "expressions"
_COUNTRIES = ("DE", "FR", "GB", "IT", "JP", "NL", "PL", "US")
_TIMEOUT_S = 1_800


def main() -> None:
    """The command line."""
    parser = parser_for(NAME, __doc__ or "")
    parser.add_argument("--rows", type=positive_int, default=20_000_000, help="rows that are measured")
    parser.add_argument("--check-rows", type=positive_int, default=100_000, help="rows of the compared results")
    parser.add_argument("--files", type=positive_int, default=8, help="files that the rows lie in")
    parser.add_argument("--customers", type=positive_int, default=20_000, help="different texts in one of the columns")
    parser.add_argument("--parallelism", type=positive_int, default=2, help="subtasks, cores and threads")
    parser.add_argument("--spark", action="store_true", help="measure Spark, too; its result is always compared")
    options = parser.parse_args()
    measure_here(NAME, options, _measured)


def _measured(options: Namespace, directory: Path) -> dict[str, Any]:
    _write_orders(directory / "part", options.check_rows, options)
    _write_orders(directory / "rows", options.rows, options)
    pa.set_cpu_count(1)
    with spark_beside(options.parallelism, "2g") as spark:
        with MiniCluster() as cluster:
            _in_engine(cluster, directory / "part", directory / "engine", options)
            engine = _in_engine(cluster, directory / "rows", None, options)
        measures = _figures("", options.rows, engine)
        by_hand = _by_hand(directory / "rows", options)
        measures |= _figures("handwritten_", options.rows, by_hand)
        progress(f"engine and by hand: {measures}")
        computed(spark.read.schema(SCHEMA).parquet(str(directory / "part"))).write.parquet(str(directory / "spark"))
        compared = _compared(directory)
        if options.spark:
            in_spark = _in_spark(spark, directory / "rows")
            measures |= _figures("spark_", options.rows, in_spark)
            measures["ratio"] = round(in_spark.seconds / engine.seconds, 2)
            measures["ratio_core"] = round(in_spark.cpu_s / engine.cpu_s, 2)
    return {**measures, "handwritten_ratio": round(by_hand.cpu_s / engine.cpu_s, 2), "compared": compared}


def _figures(prefix: str, rows: int, run: Timed) -> dict[str, Any]:
    return {
        f"{prefix}rows_per_s": round(rows / run.seconds),
        f"{prefix}cpu_s_per_million": round(run.cpu_s / rows * 1e6, 3),
    }


def _write_orders(directory: Path, rows: int, options: Namespace) -> None:
    directory.mkdir()
    generator = np.random.default_rng(1)
    names = pa.array([f"customer-{number:08d}" for number in range(options.customers)])
    notes = pa.array([None, "by post", "fragile", "gift"])
    countries = pa.array(_COUNTRIES)
    bounds = np.linspace(0, rows, options.files + 1).astype(np.int64)
    for file, (first, end) in enumerate(pairwise(bounds)):
        count = int(end - first)
        ids = np.arange(first, end)
        columns = {
            "id": pa.array(ids),
            "customer": names.take(pa.array(generator.integers(0, len(names), count))),
            "country": countries.take(pa.array(generator.integers(0, len(countries), count))),
            "amount": pa.array(generator.integers(0, 1_000, count)),
            "price": pa.array(generator.random(count) * 1_000),
            "note": notes.take(pa.array(generator.integers(0, len(notes), count))),
            "placed_at": pa.array(1_767_225_600_000_000 + ids * 1_000).cast(pa.timestamp("us", "UTC")),
        }
        pq.write_table(pa.table(columns), directory / f"{file:04d}.parquet")


def _in_engine(cluster: MiniCluster, source: Path, output: Path | None, options: Namespace) -> Timed:
    job = cluster.submit(
        PIPELINES / "expressions.py",
        arguments=[str(source), str(output or "")],
        configuration={"execution.checkpointing.interval": "1 s", "restart-strategy.type": "none"},
        parallelism=options.parallelism,
    )
    cluster.wait_for_status(job, JobStatus.RUNNING, JobStatus.FINISHED)
    start = time.monotonic()
    with CpuTime() as cpu:
        cluster.wait_for_status(job, JobStatus.FINISHED, timeout_s=_TIMEOUT_S, clean_up=False)
        seconds = time.monotonic() - start
    cluster.wait_for_clean_up(job)
    return Timed(seconds, cpu.seconds)


def _in_spark(spark: SparkSession, source: Path) -> Timed:
    """The second of two runs."""
    for _ in range(2):
        start = time.monotonic()
        with CpuTime() as cpu:
            computed(spark.read.schema(SCHEMA).parquet(str(source))).write.format("noop").mode("overwrite").save()
        run = Timed(time.monotonic() - start, cpu.seconds)
    return run


def _by_hand(source: Path, options: Namespace) -> Timed:
    """Reads, filters and computes, and counts the rows of the results."""
    start = time.monotonic()
    with CpuTime() as cpu, ThreadPoolExecutor(options.parallelism) as pool:
        rows = sum(pool.map(lambda path: sum(part.num_rows for part in _results(path)), sorted(source.iterdir())))
    if not 0 < rows < options.rows:
        raise BenchmarkError(f"{rows} of {options.rows} rows passed the filter")
    return Timed(time.monotonic() - start, cpu.seconds)


def _results(path: Path) -> Iterator[pa.Table]:
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(32_768, use_threads=False):
            rows = pa.Table.from_batches([batch])
            passes = pc.and_(pc.greater_equal(rows["amount"], 200), pc.not_equal(rows["country"], "FR"))
            yield _computed_by_hand(rows.filter(passes))


def _computed_by_hand(rows: pa.Table) -> pa.Table:
    ids, amount, price = rows["id"], rows["amount"], rows["price"]
    seventh = pc.subtract(ids, pc.multiply(pc.divide(ids, 7), 7))
    return pa.table(
        {
            "id": ids,
            "points": pc.add_checked(pc.multiply_checked(amount, 2), seventh),
            "gross": pc.multiply(price, 1.19),
            "size": pc.if_else(pc.greater(amount, 500), "large", "small"),
            "nation": pc.utf8_upper(rows["country"]),
            "label": pc.binary_join_element_wise(rows["customer"], rows["country"], "-"),
            "region": pc.utf8_slice_codeunits(rows["customer"], 9, 13),
            "letters": pc.utf8_length(rows["customer"]),
            "remark": pc.fill_null(rows["note"], "none"),
            "hour": pc.hour(rows["placed_at"]).cast(pa.int32()),
            "most": pc.max_element_wise(amount, pc.floor(price).cast(pa.int64())),
        }
    )


def _compared(directory: Path) -> int:
    """Returns the number of rows of the part. Raises BenchmarkError for rows that differ from Spark's."""
    expected = pq.read_table(directory / "spark").sort_by("id")
    by_hand = pa.concat_tables(part for path in sorted((directory / "part").iterdir()) for part in _results(path))
    for side, found in (("the engine", pq.read_table(directory / "engine")), ("the program by hand", by_hand)):
        ordered = found.sort_by("id")
        for name in expected.column_names:
            wanted = expected[name]
            values = ordered[name].cast(wanted.type)
            if len(values) != len(wanted) or not pc.all(pc.equal(values, wanted)).as_py():
                raise BenchmarkError(f"{side}: column {name} differs from Spark's ({len(values)}, {len(wanted)} rows)")
    return int(expected.num_rows)


if __name__ == "__main__":
    run_main(main)
