"""Queries whose reports of progress are compared with Spark's: frames with observed metrics, and state of each kind."""

from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = "country STRING, amount DOUBLE, quantity INT, price DECIMAL(10, 2), tags ARRAY<STRING>, placed_at TIMESTAMP"


def metrics() -> list[Any]:
    """Made when a session is active, because functions build another kind of columns for a remote one."""
    return [
        F.count(F.lit(1)).alias("rows"),
        F.count("amount").alias("amounts"),
        F.sum("quantity").alias("quantity"),
        F.avg("price").alias("price"),
        F.min("country").alias("country"),
        F.max("placed_at").alias("latest"),
        F.expr("count_if(quantity > 1)").alias("many"),
        F.approx_count_distinct("placed_at").alias("times"),
        (F.sum("amount") / F.count("*") + 1).alias("computed"),
        F.max(F.struct("country", "quantity")).alias("greatest"),
        F.max("tags").alias("tags"),
        F.stddev("amount").alias("deviation"),
        F.sum(F.lit(None).cast("int")).alias("nothing"),
    ]


def queries(rows: DataFrame) -> dict[str, DataFrame]:
    """The queries by name."""
    timed = rows.withWatermark("placed_at", "10 minutes")
    return {
        "observed": rows.observe("all", *metrics())
        .where("quantity > 0")
        .observe("positive", F.count("*").alias("rows"), F.min("quantity").alias("least")),
        "windows": timed.groupBy(F.window("placed_at", "1 hour"), "country").agg(F.count("*").alias("orders")),
        "distinct": timed.withColumn("copy", F.explode(F.array(F.lit(1), F.lit(2))))
        .dropDuplicates(["country", "placed_at"])
        .select("country"),
        "joined": timed.select("country", "placed_at", "quantity").join(
            timed.where("quantity > 6").selectExpr("country AS place", "placed_at AS later"),
            F.expr("country = place AND later BETWEEN placed_at AND placed_at + INTERVAL 1 MINUTE"),
        ),
    }


def pipeline(spark: SparkSession, orders: str, output: str) -> None:
    rows = spark.readStream.schema(SCHEMA).parquet(orders)
    for name, frame in queries(rows).items():
        frame.writeStream.format("parquet").queryName(name).trigger(availableNow=True).start(f"{output}/{name}")
