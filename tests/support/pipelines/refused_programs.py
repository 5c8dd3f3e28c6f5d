"""Programs of PySpark with one thing each that the engine does not have."""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


def pipeline(spark: SparkSession, path: str, output: str, case: str) -> None:
    rows = spark.readStream.format("replay").schema("country STRING, placed_at TIMESTAMP").load(path)
    if case == "action":
        rows.show()
    frame = changed(rows, case)
    writer = frame.writeStream.format("parquet")
    if case == "foreachBatch":
        writer = writer.foreachBatch(lambda batch, batch_id: None)
    writer.start(output)


def changed(rows: DataFrame, case: str) -> DataFrame:
    match case:
        case "random plan":
            return rows.select(F.uuid().alias("id"))
        case "function":
            return rows.select(F.randn(1).alias("n"))
        case "type":
            return rows.select(F.expr("make_ym_interval(1, 2)").alias("months"))
        case "column":
            return rows.select("missing")
        case "operation":
            return rows.dropDuplicates(["country"])
        case "output mode":
            return rows.groupBy("country").count()
        case "pattern":
            return rows.select(F.date_format("placed_at", "GGGG yyyy").alias("era"))
    return rows
