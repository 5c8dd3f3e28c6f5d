"""Example pipeline, version 1: delays per carrier and rotations per aircraft, exactly once into Parquet directories.

    ckpt run pipelines/flights.py --input /data/flights.parquet --output /data/out --rows-per-second 20000

``--input`` is written by ``prepare_flights.py``; ``--output`` gets ``carrier_delays`` (one row per flight: its
carrier's running aggregates) and ``rotations`` (one row per flight, see ``rotations.py``).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, SparkSession, functions
from rotations import OUTPUT_SCHEMA, RotationTracker


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The pipeline's arguments, the same in both versions."""
    parser = argparse.ArgumentParser(prog="flights")
    parser.add_argument("--input", required=True, help="Parquet file written by prepare_flights.py")
    parser.add_argument("--output", required=True, help="directory for the results")
    parser.add_argument("--rows-per-second", type=float, default=0, help="0 replays as fast as possible")
    return parser.parse_args(list(arguments))


def read_flights(spark: SparkSession, options: argparse.Namespace) -> DataFrame:
    """The flights, each aircraft's in time order.

    A flight whose aircraft is unknown gets one of its own, named after the row, so that results never depend on the
    order in which flights of different subtasks meet.
    """
    row_name = functions.concat(functions.lit("row-"), functions.col("row_id").cast("string"))
    return (
        spark.readStream.format("replay")
        .option("rowsPerSecond", options.rows_per_second)
        .option("partitionBy", "tailnum,row_id")
        .load(options.input)
        .hint("uid", "flights")
        .withColumn("tailnum", functions.coalesce("tailnum", row_name))
        .hint("uid", "aircraft")
        .withWatermark("event_time", "1 hour")
        .hint("uid", "event-time")
    )


def carrier_delays() -> list[Column]:
    """What both versions say of a carrier."""
    return [
        functions.count("*").alias("flights"),
        functions.sum("dep_delay").alias("total_dep_delay"),
        functions.avg("dep_delay").alias("avg_dep_delay"),
        functions.avg("arr_delay").alias("avg_arr_delay"),
    ]


def write_delays(flights: DataFrame, name: str, keys: Sequence[str], delays: Sequence[Column], output: str) -> None:
    """Writes running aggregates of ``keys``: one row for each flight."""
    delayed = flights.groupBy(*keys).agg(*delays).hint("uid", name)
    delayed.writeStream.format("parquet").outputMode("update").queryName(name).start(output)


def write_rotations(flights: DataFrame, options: argparse.Namespace) -> None:
    """The branch with user code: one row per flight with what the aircraft did before."""
    (
        flights.groupBy("tailnum")
        .transformWithState(RotationTracker(), OUTPUT_SCHEMA, "Append", "EventTime")
        .hint("uid", "rotations")
        .writeStream.format("parquet")
        .queryName("rotations")
        .start(f"{options.output}/rotations")
    )


def pipeline(spark: SparkSession, *arguments: str) -> None:
    """Builds the job."""
    options = parse_arguments(arguments)
    flights = read_flights(spark, options)
    write_delays(flights, "carrier-delays", ["carrier"], carrier_delays(), f"{options.output}/carrier_delays")
    write_rotations(flights, options)
