"""Two streams of counted rows that meet: every lost, repeated or wrongly unmatched row shows in the output.

Both sources give (source, n) with n = 0, 1, 2, ... per source; a row's event time is n + 1 milliseconds. ``thirds``
gets each left row with the right one of the same number, of which every third exists; ``near`` each left row with the
right rows whose number is at most 2 less or 3 more.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.api import Stream, StreamSession


def pipeline(session: StreamSession, output: str, rows: str, rate: str) -> None:
    """Builds the job: two sources of ``rows`` rows each."""

    def numbers(name: str, column: str) -> Stream:
        return (
            session.readStream.format("numbers")
            .option("sequence", True)
            .option("rows", rows)
            .option("rowsPerSecond", rate)
            .option("batchRows", 64)
            .load()
            .uid(name)
            .withColumn(column, pc.add(pc.field("n"), 1).cast(pa.timestamp("ms")))
            .uid(f"{name}-time")
            .withWatermark(column, "1 s")
            .uid(f"{name}-watermark")
        )

    left, right = numbers("left", "left_at"), numbers("right", "right_at")
    every_third = right.filter(pc.equal(pc.subtract(pc.field("n"), pc.multiply(pc.divide(pc.field("n"), 3), 3)), 0))
    (
        left.join(every_third.uid("every-third"), ["source", "n"], "left_outer", within=("0 ms", "0 ms"))
        .uid("thirds")
        .writeStream.format("parquet")
        .uid("thirds-sink")
        .start(f"{output}/thirds")
    )
    others = right.select("source", "right_at", m="n").uid("others")
    (
        left.join(others, on="source", within=("-2 ms", "3 ms"))
        .uid("near")
        .writeStream.format("parquet")
        .uid("near-sink")
        .start(f"{output}/near")
    )
