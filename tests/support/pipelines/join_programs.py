"""Joins of two streams in PySpark. Spark and the engine run the same functions."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

LEFT = "id LONG, k STRING, lt TIMESTAMP"
RIGHT = "n LONG, key STRING, rt TIMESTAMP"
NEAR = "k = key AND rt BETWEEN lt - INTERVAL 3 SECONDS AND lt + INTERVAL 5 SECONDS"

OR_NULL = "nullif(key, 'A')"


def pipeline(spark: SparkSession, source: str, directory: str, output: str, names: str) -> None:
    """Starts the queries with these names, which commas separate."""
    left = spark.readStream.format(source).schema(LEFT).load(f"{directory}/left")
    right = spark.readStream.format(source).schema(RIGHT).load(f"{directory}/right")
    found = queries(left, right)
    for name in names.split(","):
        found[name].writeStream.format("parquet").queryName(name).start(f"{output}/{name}")


def _windows(left: DataFrame, right: DataFrame) -> dict[str, DataFrame]:
    """Joins on windows of event time, without a row of Spark's that is null in a column of ``USING``."""
    one = left.select("key", F.window("lt", "20 seconds").alias("w"), "id")
    other = right.select("key", F.window("rt", "20 seconds").alias("w"), "n")
    joined = {f"window_{how}": one.join(other, ["key", "w"], how) for how in ("inner", "left", "right", "semi")}
    return {
        **{name: frame.select("w.start", "w.end", *frame.columns[:1], "id") for name, frame in joined.items()},
        "window_full": one.alias("a")
        .join(other.alias("b"), F.expr("a.key = b.key AND a.w = b.w AND id > 9"), "full")
        .selectExpr("a.key", "a.w", "id", "b.key AS other_key", "b.w AS other_w", "n"),
    }


def queries(left: DataFrame, right: DataFrame) -> dict[str, DataFrame]:
    """Returns all queries by their names. No row is late."""
    one, other = left.withWatermark("lt", "1 day"), right.withWatermark("rt", "2 days")
    same = F.col("key") == F.upper("k")
    again = F.expr("a.k = b.k AND a.lt = b.lt AND a.id < b.id")
    return {
        "inner": one.join(other, F.expr("k = key AND rt >= lt AND rt < lt + INTERVAL 4 SECONDS AND n > id AND id > 9")),
        "left": one.join(other, F.expr(f"{NEAR} AND n % 2 = 0"), "leftOuter"),
        "right": one.join(other, F.expr(NEAR), "rightOuter"),
        "full": one.join(other, same & (F.col("lt") < F.col("rt")) & F.expr("rt - INTERVAL 1 MINUTE <= lt"), "full"),
        "semi": one.join(other, F.expr(f"{NEAR} AND id % 3 = 1"), "left_semi"),
        "same_time": one.join(other, (F.col("lt") == F.col("rt")) & (F.col("k") == F.col("key"))),
        **_windows(one.withColumnRenamed("k", "key"), other),
        "needed_left": one.join(other, F.expr(f"{NEAR} AND id > 20 AND (n < 90 OR n > 95)"), "left"),
        "needed_full": one.join(other, F.expr(f"{NEAR} AND id % 3 > 0 AND lt > '2020-01-01' AND n % 4 < 3"), "full"),
        "mixed_left": one.join(other, F.expr(f"{NEAR} AND (id + n) % 3 = 0 AND id > 9"), "left"),
        "mixed_right": one.join(other, F.expr(f"{NEAR} AND id < n"), "right"),
        "mixed_full": one.join(other, F.expr(f"{NEAR} AND (id < n OR k = 'b') AND n > 3"), "full"),
        "mixed_semi": one.join(other, F.expr(f"{NEAR} AND (id + n) % 5 = 0"), "left_semi"),
        "after": one.join(other, F.expr("k = key AND rt > lt + INTERVAL 40 SECONDS")),
        "after_right": one.join(other, F.expr("k = key AND rt > lt + INTERVAL 20 SECONDS"), "right"),
        "before_left": one.join(other, F.expr("k = key AND rt < lt - INTERVAL 20 SECONDS AND id < 99"), "left"),
        "distinct": one.dropDuplicates(["id", "lt"]).join(other, F.expr(NEAR), "left"),
        "nulls_match": one.join(other, F.expr(f"k <=> {OR_NULL} AND {NEAR.partition('AND ')[2]}"), "left"),
        "same_struct": one.join(
            other, F.expr(f"struct(k, id % 2 AS m) = struct({OR_NULL} AS k, n % 2 AS m) AND lt = rt"), "full"
        ),
        "same_struct_or_null": left.join(right, F.expr(f"struct(lt, k) <=> struct(rt, {OR_NULL})")),
        "unbounded": left.join(right.withColumnRenamed("key", "k"), ["k"]).filter("id + n < 40"),
        "self": one.alias("a").join(one.alias("b"), again).select("a.id", "b.lt"),
    }
