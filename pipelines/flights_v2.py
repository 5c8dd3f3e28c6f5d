"""Example pipeline, version 2: continues from a snapshot of version 1 with more in it.

New: the greatest departure delay in the carriers' aggregate (its state evolves; null until a flight comes after the
upgrade), and a branch of its own for delays per route, which starts empty. Everything else keeps its state by uid.
"""

# ruff: noqa: A004

from __future__ import annotations

import pyarrow.compute as pc
from flights import parse_arguments, read_flights, write_rotations

from ckpt_runtime.api import StreamSession, avg, count, max, sum


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
            max("dep_delay").alias("max_dep_delay"),
        )
        .uid("carrier-delays")
        .writeStream.format("parquet")
        .uid("carrier-delays-sink")
        .start(f"{options.output}/carrier_delays")
    )
    write_rotations(flights, options)
    (
        flights.filter(pc.field("dep_delay") > 0)
        .uid("delayed")
        .groupBy("origin", "dest")
        .agg(count().alias("delayed_flights"), max("dep_delay").alias("max_dep_delay"))
        .uid("route-delays")
        .writeStream.format("parquet")
        .uid("route-delays-sink")
        .start(f"{options.output}/route_delays")
    )
