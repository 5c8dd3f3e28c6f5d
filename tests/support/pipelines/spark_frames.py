"""A program that reads DataFrames of the session's own Spark: all rows of a table, or what a table grows by."""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession

from ckpt_runtime.frame_sources import FrameSource

SCHEMA = "n BIGINT, name STRING, price DECIMAL(10,2), at TIMESTAMP, tags ARRAY<STRING>"


class Whole(FrameSource):
    """The even rows of a directory, sorted."""

    @classmethod
    def name(cls) -> str:
        return "whole"

    def read(self, spark: SparkSession, start: Any, end: Any) -> DataFrame:
        return spark.read.schema(SCHEMA).parquet(self.options["path"]).where("n % 2 = 0").orderBy("n")


class Growing(FrameSource):
    """The rows of a directory by ranges of ``n``, as far as there are any."""

    @classmethod
    def name(cls) -> str:
        return "growing"

    def latest(self, spark: SparkSession) -> int | None:
        greatest: int | None = spark.read.schema(SCHEMA).parquet(self.options["path"]).selectExpr("max(n)").first()[0]
        return greatest

    def first(self) -> int:
        return -1

    def read(self, spark: SparkSession, start: int, end: int) -> DataFrame:
        rows = spark.read.schema(SCHEMA).parquet(self.options["path"])
        return rows.where(f"n > {start} AND n <= {end}").orderBy("n")


def pipeline(spark: SparkSession, format_: str, source: str, output: str) -> None:
    spark.dataSource.register(Whole)
    spark.dataSource.register(Growing)
    rows = spark.readStream.format(format_).schema(SCHEMA).load(source).hint("uid", "rows")
    rows.selectExpr("*", "n * 2 AS twice").writeStream.format("parquet").queryName("copy").start(output)
