"""The first example pipeline with one more operator behind its source, which fails on demand.

Lies beside copies of the example's own files when it is packed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import flights
import pyarrow as pa
from injected import act

from ckpt_runtime.api import Stream, StreamSession

_read = flights.read_flights


def pipeline(session: StreamSession, faults: str, *arguments: str) -> None:
    """Builds the job."""

    def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            act(faults, "map")
            yield batch

    def read(own: StreamSession, options: argparse.Namespace) -> Stream:
        rows = _read(own, options)
        return rows.mapInArrow(pass_through, rows.schema).uid("failing")

    flights.read_flights = read
    flights.pipeline(session, *arguments)
