"""The job of the golden snapshots without its join, and later versions of it.

``same`` is the job as it is; ``evolved`` has another field in two of its states; ``upgraded`` has another operator in
front of these states, so that their rows come by another edge, and more aggregates.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from golden import Remembering, numbers, write, write_kept_and_totals
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from ckpt_runtime.api import Stream, StreamSession, count, max


class Evolved(Remembering):
    """Has more to remember."""

    more_fields = ", note STRING"
    more_values = ("new",)


class Passing(StatefulProcessor):
    """Gives rows as they come."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        pass

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            yield Row(source=key[0], n=row.n)

    def close(self) -> None:
        pass


def passed(left: Stream) -> Stream:
    """The same rows, through one more operator."""
    stream = left.groupBy("source").transformWithState(Passing(), "source BIGINT, n BIGINT", "Append", "None")
    timed = stream.uid("passing").withColumn("at", pc.add(pc.field("n"), 1).cast(pa.timestamp("ms")))
    return timed.uid("passed-time").withWatermark("at", "1 hour").uid("passed-watermark")


def pipeline(session: StreamSession, directory: str, rate: str, sleep_ms: str, version: str) -> None:
    """Builds the job in a version."""
    left = numbers(session, directory, "left", int(rate))
    if version == "upgraded":
        left = passed(left)
    processor = (Evolved if version == "evolved" else Remembering)(float(sleep_ms))
    write_kept_and_totals(left, directory, processor)
    if version == "upgraded":
        write(left.groupBy("source").agg(count().alias("rows"), max("n").alias("max")), directory, "more")
