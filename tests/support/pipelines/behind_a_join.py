"""A stateful processor behind a join of two streams that one reader gives."""

from __future__ import annotations

import json

import side_processors
from late_joins import PAIRED, sides
from pyspark.sql import SparkSession
from pyspark.sql import functions as F


def pipeline(spark: SparkSession, case: str) -> None:
    """``case`` is JSON: source, chunk, output, watermark (of ``t``), processor, schema, mode, time_mode.

    The kind of join stands for the key.
    """
    given = json.loads(case)
    left, right = sides(spark, given)
    joined = left.join(right, F.expr(PAIRED), given["keys"][0]).hint("uid", "join")
    named = joined.select(F.col("lk").alias("k"), F.col("lt").alias("t"), F.col("rv").alias("v")).hint("uid", "pairs")
    processor = getattr(side_processors, given["processor"])()
    reported = named.groupBy("k").transformWithState(processor, given["schema"], given["mode"], given["time_mode"])
    reported.hint("uid", "processor").writeStream.format("parquet").queryName("reported").start(given["output"])
