"""The first example pipeline with one more operator behind its source, which fails on demand.

Lies beside copies of the example's own files when it is packed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import flights
import pyarrow as pa
from injected import act
from pyspark.sql import DataFrame, SparkSession

_read = flights.read_flights


def pipeline(spark: SparkSession, faults: str, *arguments: str) -> None:
    """Builds the job."""

    def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            act(faults, "map")
            yield batch

    def read(own: SparkSession, options: argparse.Namespace) -> DataFrame:
        rows = _read(own, options)
        failing = rows.mapInArrow(pass_through, rows.schema).hint("uid", "failing")
        # Behind a function of the author's, a column is no event time any more.
        return failing.withWatermark("event_time", "1 hour")

    flights.read_flights = read
    flights.pipeline(spark, *arguments)
