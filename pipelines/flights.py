"""Example pipeline, version 1: delays per carrier and rotations per aircraft, exactly once into Parquet directories.

    ckpt run pipelines/flights.py --input /data/flights.parquet --output /data/out --rows-per-second 20000

``--input`` is written by ``prepare_flights.py``; ``--output`` gets ``carrier_delays`` (one row per flight: its
carrier's running aggregates) and ``rotations`` (one row per flight, see ``rotations.py``).
"""

# ruff: noqa: A004

from __future__ import annotations

import argparse
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
from rotations import OUTPUT_SCHEMA, RotationTracker

from ckpt_runtime.api import Stream, StreamSession, avg, count, sum


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """The pipeline's arguments, the same in both versions."""
    parser = argparse.ArgumentParser(prog="flights")
    parser.add_argument("--input", required=True, help="Parquet file written by prepare_flights.py")
    parser.add_argument("--output", required=True, help="directory for the results")
    parser.add_argument("--rows-per-second", type=float, default=0, help="0 replays as fast as possible")
    return parser.parse_args(list(arguments))


def read_flights(session: StreamSession, options: argparse.Namespace) -> Stream:
    """The flights, each aircraft's in time order.

    A flight whose aircraft is unknown gets one of its own, named after the row, so that results never depend on the
    order in which flights of different subtasks meet.
    """
    row_name = pc.binary_join_element_wise(pc.scalar("row"), pc.field("row_id").cast(pa.string()), pc.scalar("-"))
    return (
        session.readStream.format("replay")
        .option("path", options.input)
        .option("rowsPerSecond", options.rows_per_second)
        .option("partitionBy", "tailnum,row_id")
        .load()
        .uid("flights")
        .withColumn("tailnum", pc.coalesce(pc.field("tailnum"), row_name))
        .uid("aircraft")
        .withWatermark("event_time", "1 hour")
        .uid("event-time")
    )


def write_rotations(flights: Stream, options: argparse.Namespace) -> None:
    """The branch with user code: one row per flight with what the aircraft did before."""
    (
        flights.groupBy("tailnum")
        .transformWithState(RotationTracker(), OUTPUT_SCHEMA, "Append", "EventTime")
        .uid("rotations")
        .writeStream.format("parquet")
        .uid("rotations-sink")
        .start(f"{options.output}/rotations")
    )


def pipeline(session: StreamSession, *arguments: str) -> None:
    """Builds the job."""
    options = parse_arguments(arguments)
    flights = read_flights(session, options)
    (
        flights.groupBy("carrier")
        .agg(
            count().alias("flights"),
            sum("dep_delay").alias("total_dep_delay"),
            avg("dep_delay").alias("avg_dep_delay"),
            avg("arr_delay").alias("avg_arr_delay"),
        )
        .uid("carrier-delays")
        .writeStream.format("parquet")
        .uid("carrier-delays-sink")
        .start(f"{options.output}/carrier_delays")
    )
    write_rotations(flights, options)
