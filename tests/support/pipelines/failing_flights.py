"""The first example pipeline with one more function behind its source, which fails on demand.

Lies beside copies of the example's own files when it is packed.
"""

from __future__ import annotations

import argparse

import flights
import pyarrow as pa
from injected import act
from pyspark.sql import DataFrame, SparkSession, functions

_read = flights.read_flights


def pipeline(spark: SparkSession, faults: str, *arguments: str) -> None:
    """Builds the job."""

    @functions.arrow_udf("string")
    def pass_through(carriers: pa.Array) -> pa.Array:
        act(faults, "map")
        return carriers

    def read(own: SparkSession, options: argparse.Namespace) -> DataFrame:
        # A function of columns: behind mapInArrow, no column is the event time.
        return _read(own, options).withColumn("carrier", pass_through("carrier")).hint("uid", "failing")

    flights.read_flights = read
    flights.pipeline(spark, *arguments)
