"""Two streams of counted rows that meet: every lost, repeated or wrongly unmatched row shows in the output.

Both sources give (source, n) with n = 0, 1, 2, ... per source; a row's event time is n + 1 milliseconds. ``thirds``
gets each left row with the right one of the same number, of which every third exists; ``near`` each left row with the
right rows whose number is at most 2 less or 3 more.
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


def pipeline(spark: SparkSession, output: str, rows: str, rate: str) -> None:
    """Builds the job: two sources of ``rows`` rows each."""

    def numbers(name: str, column: str) -> DataFrame:
        return (
            spark.readStream.format("numbers")
            .option("sequence", True)
            .option("rows", rows)
            .option("rowsPerSecond", rate)
            .option("batchRows", 64)
            .load()
            .hint("uid", name)
            .withColumn(column, F.timestamp_millis(F.col("n") + 1))
            .hint("uid", f"{name}-time")
            .withWatermark(column, "1 second")
            .hint("uid", f"{name}-watermark")
        )

    left, right = numbers("left", "left_at"), numbers("right", "right_at").toDF("right_source", "m", "right_at")
    every_third = right.filter("m % 3 = 0").hint("uid", "every-third")
    same = F.expr("source = right_source AND n = m AND right_at >= left_at AND right_at <= left_at")
    (
        left.join(every_third, same, "left_outer")
        .hint("uid", "thirds")
        .select("source", "n", "left_at", "right_at")
        .writeStream.format("parquet")
        .queryName("thirds")
        .start(f"{output}/thirds")
    )
    bounds = "right_at BETWEEN left_at - INTERVAL 0.002 SECONDS AND left_at + INTERVAL 0.003 SECONDS"
    (
        left.join(right, F.expr(f"source = right_source AND {bounds}"))
        .hint("uid", "near")
        .select("source", "n", "left_at", "right_at", "m")
        .writeStream.format("parquet")
        .queryName("near")
        .start(f"{output}/near")
    )
