"""PySpark programs as authors write them. Spark and the engine run the same functions; only the format differs."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = "country STRING, amount DOUBLE, quantity INT, price DECIMAL(10,2), tags ARRAY<STRING>, placed_at TIMESTAMP"


def orders(spark: SparkSession, source: str, path: str) -> DataFrame:
    return spark.readStream.format(source).schema(SCHEMA).load(path)


def pipeline(spark: SparkSession, source: str, path: str, output: str) -> None:
    """Starts all queries below."""
    rows = orders(spark, source, path)
    rows.createOrReplaceTempView("orders")
    for name, (frame, mode) in queries(spark, rows).items():
        writer = frame.writeStream.format("parquet").outputMode(mode).queryName(name)
        writer.option("checkpointLocation", f"{output}/checkpoint-{name}").start(f"{output}/{name}")


def queries(spark: SparkSession, rows: DataFrame) -> dict[str, tuple[DataFrame, str]]:
    """Returns each query with its output mode."""
    computed = rows.select(
        F.upper("country").alias("country"),
        (F.col("quantity") + 1).alias("more"),
        F.when(F.col("quantity") > 0, F.lit(10) / F.col("quantity")).otherwise(0).alias("share"),
        (F.col("price") * F.col("quantity")).alias("worth"),
        F.date_format("placed_at", "yyyy-MM-dd HH:mm").alias("minute"),
        F.transform("tags", lambda tag: F.concat(tag, F.lit("!"))).alias("tags"),
        F.col("placed_at").cast("date").alias("day"),
        F.concat_ws(".", F.current_user(), F.current_catalog(), F.current_database()).alias("session"),
        F.current_timezone().alias("zone"),
    )
    sql = spark.sql(
        "SELECT country, count(*) AS n FROM (SELECT substring(country, 1, 1) AS country FROM orders "
        "WHERE amount BETWEEN 2 AND 8 AND country LIKE 'A%') GROUP BY country"
    )
    windows = (
        rows.withWatermark("placed_at", "10 minutes")
        .groupBy(F.window("placed_at", "1 hour"), "country")
        .agg(
            F.sum("amount").alias("total"),
            F.count("*").alias("n"),
            (F.max("quantity") - F.min("quantity")).alias("spread"),
        )
        .hint("uid", "by_hour")
        .select("window.start", "window.end", "country", "total", "n", "spread")
    )
    both = (
        rows.filter("quantity < 0")
        .select("country", "quantity")
        .unionByName(rows.where(F.col("quantity") > 4).select("quantity", "country"))
    )
    return {
        "computed": (computed, "append"),
        "by_letter": (sql, "update"),
        "windows": (windows, "update"),
        "both": (both, "append"),
        "dealt": (rows.repartition(3).withWatermark("placed_at", "1 hour").select("country", "quantity"), "append"),
    }
