"""Numbers that are counted per key for ever, in two vertices."""

from __future__ import annotations

from ckpt_runtime.api import StreamSession, functions


def pipeline(session: StreamSession, directory: str) -> None:
    """Builds the job. ``directory`` is for what the sink reports."""
    rows = session.readStream.format("numbers").options(keys="20", rowsPerSecond="100", batchRows="16")
    counted = (
        rows.load()
        .uid("source")
        .groupBy("key")
        .agg(functions.count().alias("count"), functions.sum("value").alias("sum"))
    )
    report = counted.uid("count").writeStream.format("verify").options(key="key", count="count", sum="sum")
    report.options(report=f"{directory}/report", reportIntervalMs=200).uid("sink").start()
