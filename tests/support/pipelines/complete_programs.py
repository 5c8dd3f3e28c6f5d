"""Aggregations whose whole result is written each time (output mode complete); Spark and the engine run the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = "country STRING, amount DOUBLE, quantity INT, price DECIMAL(10,2), tags ARRAY<STRING>, placed_at TIMESTAMP"


def pipeline(spark: SparkSession, path: str, output: str, rate: str = "0") -> None:
    """Writes each batch of each query to a file of its own, whose name ends with the batch's id."""
    rows = spark.readStream.format("replay").option("rowsPerSecond", rate).schema(SCHEMA).load(path)
    for name, frame in queries(rows).items():
        writer = frame.writeStream.outputMode("complete").queryName(name)
        writer.foreachBatch(_write_to(Path(output, name))).start()


def _write_to(directory: Path) -> Callable[[DataFrame, int], None]:
    def write(batch: DataFrame, batch_id: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        hidden = directory / f".{batch_id}"
        pq.write_table(batch.toArrow(), hidden)
        os.replace(hidden, directory / f"{batch_id:06}.parquet")

    return write


def queries(rows: DataFrame) -> dict[str, DataFrame]:
    """Returns the result of each query."""
    words = rows.select(F.explode("tags").alias("word")).groupBy("word").agg(F.count("*").alias("n"))
    timed = rows.withWatermark("placed_at", "1 minute")
    hours = timed.groupBy(F.window("placed_at", "1 hour", "30 minutes"), "country").agg(F.max("amount").alias("most"))
    parts = F.when(F.col("quantity") == 7, F.lit(float("nan"))).when(F.col("quantity") == 0, -0.0)
    floats = rows.groupBy(parts.otherwise(F.col("quantity")).alias("part"), "country").agg(F.count("price").alias("n"))
    sessions = timed.groupBy(F.session_window("placed_at", "2 minutes"), "country").agg(
        F.count("*").alias("n"), F.sum("price").alias("price"), F.count_distinct("quantity").alias("quantities")
    )
    gap = (
        F.when(F.col("country") == "DE", "1 minute").when(F.col("country") == "AU", "0 minutes").otherwise("3 minutes")
    )
    gaps = rows.groupBy(F.session_window("placed_at", gap).alias("w"), "country").agg(F.max("amount").alias("most"))
    return {
        "sessions": sessions.select(
            "session_window.start", "session_window.end", "country", "n", "price", "quantities"
        ),
        "gaps": gaps.where("most > 3").select("w.start", "w.end", "country", "most"),
        "limited": rows.limit(7).groupBy().agg(F.count("*").alias("n")),
        "counted": rows.groupBy("country").agg(F.count("*").alias("n"), F.sum("quantity").alias("quantity")),
        "words": words.orderBy(F.desc("n"), F.desc_nulls_first("word")).limit(3),
        "hours": hours.orderBy("window", F.desc_nulls_last("country")).select("window.start", "country", "most"),
        "floats": floats.orderBy(F.desc_nulls_first("part"), F.asc_nulls_last("country")),
        "total": rows.agg(F.count("*").alias("n"), F.sum("price").alias("price")),
        "none": rows.where("amount > 1e9").agg(F.count("*").alias("n"), F.sum("price").alias("price")),
        "vanished": words.where("n < 5"),
    }
