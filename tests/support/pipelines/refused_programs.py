"""Programs of PySpark with one thing each that the engine does not have."""

from __future__ import annotations

from collections.abc import Callable
from random import random

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F


def pipeline(spark: SparkSession, path: str, output: str, case: str) -> None:
    if case == "legacy option":
        spark.conf.set("spark.sql.legacy.timeParserPolicy", "LEGACY")
    rows = spark.readStream.format("replay").schema("country STRING, placed_at TIMESTAMP").load(path)
    if case == "action":
        rows.show()
    frame = CASES.get(case, lambda unchanged: unchanged)(rows)
    writer = frame.writeStream.format("parquet")
    if case == "memory":
        writer = writer.format("memory")
    if case == "partitions of a function":
        writer = writer.partitionBy("customer").foreach(print)
    writer.start(output)


CASES: dict[str, Callable[[DataFrame], DataFrame]] = {
    "random plan": lambda rows: rows.select(F.lit(random()).alias("number")),
    "function": lambda rows: rows.select(F.sentences("country").alias("sentences")),
    "type": lambda rows: rows.select(F.expr("make_ym_interval(1, 2)").alias("months")),
    "column": lambda rows: rows.select("missing"),
    "operation": lambda rows: rows.orderBy("country"),
    "output mode": lambda rows: rows.groupBy("country").count(),
    "barrier": lambda rows: rows.mapInPandas(lambda frames: frames, rows.schema, barrier=True),
    "generator": lambda rows: rows.select(F.json_tuple("country", F.col("country"))),
    "Python in a lambda": lambda rows: rows.select(F.transform(F.array("country"), F.udf(str, "string"))),
    "observe": lambda rows: rows.observe("seen", F.collect_list("country")),
    "session": lambda rows: (
        rows.withWatermark("placed_at", "1 minute").groupBy(F.session_window("placed_at", "1 minute")).count()
    ),
    "aggregate": lambda rows: (
        rows.withWatermark("placed_at", "1 minute").groupBy("placed_at").agg(F.count_min_sketch("country", 0.5, 0.5, 1))
    ),
    "distinct": lambda rows: rows.groupBy("country").agg(F.expr("corr(DISTINCT length(country), length(country))")),
    "Avro in SQL": lambda rows: rows.select(F.expr("from_avro(CAST(country AS BINARY), '\"string\"', map()) AS text")),
    "pattern": lambda rows: rows.select(F.date_format("placed_at", "GGGG yyyy").alias("era")),
}
