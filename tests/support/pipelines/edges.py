"""Ways from one operator to the next: union, and rows in turn; each row must arrive, in the right number."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from injected import act
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from sequence import SCHEMA


def pipeline(spark: SparkSession, output: str, rows: str, rate: str, faults: str) -> None:
    """Builds the job: two sources of ``rows`` rows each."""

    def numbers(name: str) -> DataFrame:
        return (
            spark.readStream.format("numbers")
            .option("sequence", True)
            .option("rows", rows)
            .option("rowsPerSecond", rate)
            .option("batchRows", 64)
            .load()
            .hint("uid", name)
        )

    def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            act(faults, "map")
            yield batch

    first = numbers("first")
    second = numbers("second").withColumn("source", F.col("source") + 1000).hint("uid", "renamed")
    united = first.union(second).repartition(2).mapInArrow(pass_through, SCHEMA).hint("uid", "united")
    united.writeStream.format("parquet").queryName("united").start(f"{output}/united")
    doubled = first.union(first).mapInArrow(pass_through, SCHEMA).hint("uid", "doubled")
    doubled.writeStream.format("parquet").queryName("doubled").start(f"{output}/doubled")
    totals = first.union(first).groupBy("source").agg(F.count("*").alias("rows"), F.max("n").alias("greatest"))
    write = totals.hint("uid", "totals").writeStream.format("parquet").outputMode("update").queryName("totals")
    write.start(f"{output}/totals")
