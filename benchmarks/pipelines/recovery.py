"""A paced count and sum per key with small state: what is timed is the restart, not the work."""

from __future__ import annotations

from ckpt_runtime.api import StreamSession, functions


def pipeline(session: StreamSession, report: str, keys: str, rows_per_second: str) -> None:
    """``report`` is the sink's report directory; ``rows_per_second`` is the rate of all subtasks together."""
    (
        session.readStream.format("numbers")
        .options(keys=keys, rowsPerSecond=rows_per_second)
        .load()
        .uid("source")
        .groupBy("key")
        .agg(functions.count().alias("count"), functions.sum("value").alias("sum"))
        .uid("state")
        .writeStream.format("verify")
        .options(key="key", count="count", sum="sum", report=report, reportIntervalMs=50)
        .uid("sink")
        .start()
    )
