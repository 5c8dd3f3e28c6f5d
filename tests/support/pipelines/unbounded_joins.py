"""Joins of two streams without bounds of time, which differ in the columns that are read behind them."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

DELAY = "10 seconds"
READ = {
    "both times": "concat_ws(' ', lt, rt)",
    "left time": "string(lt)",
    "no time": "'none'",
    "windows": "string(lw = rw)",
    "end of a window": "string(lw.end)",
}
"""What each of the joins reads of its sides, besides the numbers of their rows."""


def side(rows: DataFrame, letter: str) -> DataFrame:
    """One of the two streams, with the names of its columns behind ``l`` or ``r``."""
    named = rows.where(F.col("side") == letter).select(*(F.col(name).alias(letter + name) for name in "ktv"))
    return named.withWatermark(f"{letter}t", DELAY)


def pairs(left: DataFrame, right: DataFrame) -> DataFrame:
    """What all joins give, as (kind, what is read, number of the left row, that of the right one)."""
    windows = [
        rows.select(f"{letter}k", f"{letter}v", F.window(f"{letter}t", "30 seconds").alias(f"{letter}w"))
        for letter, rows in (("l", left), ("r", right))
    ]
    frames = []
    for kind, read in READ.items():
        one, other = windows if "window" in kind else (left, right)
        joined = one.join(other, F.expr("lk = rk"))
        frames.append(joined.select(F.lit(kind).alias("kind"), F.expr(read).alias("read"), "lv", "rv"))
    filtered = left.join(right, F.expr("lk = rk AND lt > TIMESTAMP '1960-01-01'"))
    frames.append(filtered.select(F.lit("filter").alias("kind"), F.lit("none").alias("read"), "lv", "rv"))
    return reduce(DataFrame.union, frames)
