"""Windows whose aggregates the arguments choose. Spark and the engine run the same function."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = "country STRING, amount DOUBLE, quantity INT, price DECIMAL(10,2), tags ARRAY<STRING>, placed_at TIMESTAMP"


def pipeline(spark: SparkSession, orders: str, output: str, aggregates: str) -> None:
    """Starts a query of each kind of window, and one that writes each row; semicolons separate the aggregates."""
    rows = spark.readStream.schema(SCHEMA).parquet(orders).hint("uid", "orders")
    for name, frame in {"seen": rows.select("placed_at"), **windows(rows, aggregates.split(";"))}.items():
        frame.writeStream.format("parquet").queryName(name).start(f"{output}/{name}")


def windows(rows: DataFrame, aggregates: list[str]) -> dict[str, DataFrame]:
    """Each kind of window; none ends before a row comes that is half a day younger."""
    timed = rows.withWatermark("placed_at", "12 hours")
    kinds = {
        "tumbling": F.window("placed_at", "3 hours"),
        "sliding": F.window("placed_at", "4 hours", "1 hour"),
        "sessions": F.session_window("placed_at", "3 minutes"),
    }
    columns = [F.expr(aggregate) for aggregate in aggregates]
    return {
        name: timed.groupBy(window.alias("w"), "country").agg(*columns).hint("uid", name)
        for name, window in kinds.items()
    }
