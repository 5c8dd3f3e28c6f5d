"""Count and sum per key by the engine's own aggregate; every update goes to a sink that checks it."""

from __future__ import annotations

from ckpt_runtime.api import StreamSession, functions


def pipeline(session: StreamSession, report: str, keys: str, key: str = "int") -> None:
    """``report`` is the sink's report directory, ``keys`` the number of keys, ``key`` their form."""
    (
        session.readStream.format("numbers")
        .option("keys", keys)
        .option("keyForm", key)
        .option("batchRows", 65_536)
        .load()
        .uid("source")
        .groupBy("key")
        .agg(functions.count().alias("count"), functions.sum("value").alias("sum"))
        .uid("state")
        .writeStream.format("verify")
        .options(key="key", keyForm=key, count="count", sum="sum", report=report, reportIntervalMs=1000)
        .uid("sink")
        .start()
    )
