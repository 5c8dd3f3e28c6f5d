"""Ten expressions over the rows that pass a filter: what both sides run in ``benchmarks.expressions``."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

SCHEMA = "id BIGINT, customer STRING, country STRING, amount BIGINT, price DOUBLE, note STRING, placed_at TIMESTAMP"


def computed(rows: DataFrame) -> DataFrame:
    """Returns the id of each row that passes, and ten columns that are computed of it."""
    amount, price = fn.col("amount"), fn.col("price")
    return rows.where("amount >= 200 AND country <> 'FR'").select(
        "id",
        (amount * 2 + fn.col("id") % 7).alias("points"),
        (price * 1.19).alias("gross"),
        fn.when(amount > 500, "large").otherwise("small").alias("size"),
        fn.upper("country").alias("nation"),
        fn.concat("customer", fn.lit("-"), "country").alias("label"),
        fn.substring("customer", 10, 4).alias("region"),
        fn.length("customer").alias("letters"),
        fn.coalesce("note", fn.lit("none")).alias("remark"),
        fn.hour("placed_at").alias("hour"),
        fn.greatest(amount, fn.floor(price)).alias("most"),
    )


def pipeline(spark: SparkSession, path: str, output: str) -> None:
    """Reads the files that are there. Writes Parquet to ``output``; if that is empty, nothing."""
    rows = spark.readStream.schema(SCHEMA).parquet(path)
    writer = computed(rows).writeStream.format("parquet" if output else "noop").outputMode("append")
    writer.queryName("expressions").trigger(availableNow=True).start(output or None)
