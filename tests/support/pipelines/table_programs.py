"""Programs whose streams write and read tables of Spark's catalog."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession

SCHEMA = "country STRING, amount DOUBLE, quantity INT, price DECIMAL(10,2), placed_at TIMESTAMP"


def frame(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("quantity", "amount * 2 AS `a total`", "price", "placed_at", "country")


def write(rows: DataFrame, table: str, format_: str, columns: str, **options: Any) -> Any:
    """Starts a query that writes a table; ``columns`` are those of ``partitionBy``, with commas."""
    return (
        frame(rows)
        .writeStream.partitionBy(*filter(None, columns.split(",")))
        .options(**options)
        .trigger(availableNow=True)
        .toTable(table, format_ or None)
    )


def pipeline(spark: SparkSession, source: str, table: str, format_: str, columns: str, path: str = "") -> None:
    options = {"path": path} if path else {}
    write(spark.readStream.schema(SCHEMA).parquet(source), table, format_, columns, **options)


def copy(spark: SparkSession, table: str, output: str) -> None:
    rows = spark.readStream.option("maxFilesPerTrigger", 1).table(table)
    rows.writeStream.trigger(availableNow=True).start(output)


def both(spark: SparkSession, source: str, table: str, output: str) -> None:
    """Writes a table, and reads it in the same program."""
    write(spark.readStream.schema(SCHEMA).parquet(source), table, "", "")
    rows = spark.readStream.table(table)
    rows.createOrReplaceTempView("seen")
    spark.readStream.table("seen").select("quantity").writeStream.start(output)
