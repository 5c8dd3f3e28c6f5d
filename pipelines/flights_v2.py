"""Example pipeline, version 2: continues from a snapshot of version 1 with more in it.

New: the greatest departure delay in the carriers' aggregate (its state evolves; null until a flight comes after the
upgrade), and a branch of its own for delays per route, which starts empty. Everything else keeps its state by uid.
"""

from __future__ import annotations

from flights import carrier_delays, parse_arguments, read_flights, write_delays, write_rotations
from pyspark.sql import SparkSession, functions


def pipeline(spark: SparkSession, *arguments: str) -> None:
    """Builds the job."""
    options = parse_arguments(arguments)
    flights = read_flights(spark, options)
    greatest = functions.max("dep_delay").alias("max_dep_delay")
    delays = [*carrier_delays(), greatest]
    write_delays(flights, "carrier-delays", ["carrier"], delays, f"{options.output}/carrier_delays")
    write_rotations(flights, options)
    routes = [functions.count("*").alias("delayed_flights"), greatest]
    delayed = flights.filter("dep_delay > 0").hint("uid", "delayed")
    write_delays(delayed, "route-delays", ["origin", "dest"], routes, f"{options.output}/route_delays")
