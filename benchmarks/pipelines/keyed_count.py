"""Count and sum per key by the engine's own aggregate; every update goes to a sink that checks it."""

from __future__ import annotations

from ckpt_runtime.api import StreamSession, count, sum


def pipeline(session: StreamSession, report: str, keys: str) -> None:
    """``report`` is the sink's report directory, ``keys`` the number of keys."""
    (
        session.readStream.format("numbers")
        .option("keys", keys)
        .load()
        .uid("source")
        .groupBy("key")
        .agg(count().alias("count"), sum("value").alias("sum"))
        .uid("state")
        .writeStream.format("verify")
        .options(key="key", count="count", sum="sum", report=report, reportIntervalMs=200)
        .uid("sink")
        .start()
    )
