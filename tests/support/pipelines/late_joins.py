"""Joins of two streams that one reader gives, as (kind, number of the left row, that of the right one)."""

from __future__ import annotations

import json
from typing import Any

from batches import Batches
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

PAIRED = "lk = rk AND rt >= lt - INTERVAL 5 SECONDS AND rt <= lt + INTERVAL 5 SECONDS"


def sides(spark: SparkSession, given: dict[str, Any]) -> tuple[DataFrame, DataFrame]:
    """Both streams, with the names of their columns behind ``l`` and ``r``."""
    spark.dataSource.register(Batches)
    rows = spark.readStream.format("batches").options(path=given["source"], chunk=given["chunk"]).load()
    rows = rows.hint("uid", "source")

    def side(letter: str) -> DataFrame:
        one = rows.filter(F.col("side") == letter).hint("uid", f"{letter}-side")
        renamed = one.select(*(F.col(name).alias(letter + name) for name in "ktv")).hint("uid", f"{letter}-columns")
        return renamed.withWatermark(f"{letter}t", given["watermark"][1]).hint("uid", f"{letter}-time")

    return side("l"), side("r")


def pipeline(spark: SparkSession, case: str) -> None:
    """``case`` is JSON: source, output, chunk and watermark (of ``t``); kinds of join stand for a processor."""
    given = json.loads(case)
    left, right = sides(spark, given)
    united: DataFrame | None = None
    for kind in json.loads(given["processor"]):
        joined = left.join(right, F.expr(PAIRED), kind).hint("uid", kind)
        number = F.lit(-1).cast("bigint") if kind == "left_semi" else F.coalesce("rv", F.lit(-1))
        pair = F.coalesce("lv", F.lit(-1)).alias("l"), number.alias("r")
        named = joined.select(F.lit(kind).alias("kind"), *pair).hint("uid", f"{kind}-pairs")
        united = named if united is None else united.union(named)
    assert united is not None
    united.writeStream.format("parquet").queryName("pairs").start(given["output"])
