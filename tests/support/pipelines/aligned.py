"""Two streams in one group of aligned sources, each copied into a directory. The second could be read much faster."""

from __future__ import annotations

from pyspark.sql import SparkSession


def pipeline(spark: SparkSession, output: str, drift: str) -> None:
    for name in ("slow", "fast"):
        rows = (
            spark.readStream.format("rate-micro-batch")
            .option("rowsPerBatch", 4)
            .option("numPartitions", 2)
            .option("advanceMillisPerBatch", 1_000)
            .option("scan.watermark.alignment.group", "orders")
            .option("scan.watermark.alignment.max-drift", drift)
            .option("scan.watermark.alignment.update-interval", "100 ms")
            .load()
            .hint("uid", name)
            .withWatermark("timestamp", "0 seconds")
            .hint("uid", f"{name}-time")
        )
        rows.writeStream.format("parquet").queryName(f"{name}-rows").start(f"{output}/{name}")
