"""Processors with an initial state. Spark and the engine run the same functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

SCHEMA = "country STRING, amount DOUBLE, quantity INT, price DECIMAL(10,2), tags ARRAY<STRING>, placed_at TIMESTAMP"
RESULT = "country STRING, quantity INT, orders LONG, first_day DATE, calls INT"


class OfRows(StatefulProcessor):
    """Counts orders, from the number that the initial state has."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.state = handle.getValueState("orders", "orders LONG, first_day DATE, calls INT")

    def known(self) -> Any:
        return self.state.get() if self.state.exists() else (0, None, 0)

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        orders, day, calls = self.known()
        day = min(filter(None, [day, initialState.day]), default=None)
        assert initialState.land == key[0]
        self.state.update((orders + (initialState.orders or 0), day, calls + 1))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        orders, day, calls = self.known()
        orders += sum(1 for _ in rows)
        self.state.update((orders, day, calls))
        yield Row(country=key[0], quantity=key[1], orders=orders, first_day=day, calls=calls)

    def close(self) -> None: ...


class OfFrames(OfRows):
    """The same, with frames."""

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        orders, day, calls = self.known()
        days = [day, *(None if pd.isna(each) else each for each in initialState["day"])]
        more = int(initialState["orders"].fillna(0).sum())
        self.state.update((orders + more, min(filter(None, days), default=None), calls + len(initialState)))

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        orders, day, calls = self.known()
        orders += sum(len(frame) for frame in rows)
        self.state.update((orders, day, calls))
        country = pd.Series([key[0]], dtype=object)  # Spark cannot take the texts of pandas 3
        quantity = pd.Series([key[1]], dtype="Int32")
        yield pd.DataFrame(
            {"country": country, "quantity": quantity, "orders": [orders], "first_day": [day], "calls": [calls]}
        )


def results(rows: DataFrame, initial: DataFrame, form: str) -> DataFrame:
    if form == "frames":  # pandas has no keys that are null
        initial = initial.where("land IS NOT NULL AND number IS NOT NULL")
        rows = rows.where("country IS NOT NULL AND quantity IS NOT NULL")
    before = initial.groupBy("land", "number")
    grouped = rows.groupBy("country", "quantity")
    if form == "rows":
        return grouped.transformWithState(OfRows(), RESULT, "Update", "None", initialState=before)
    return grouped.transformWithStateInPandas(OfFrames(), RESULT, "Update", "None", initialState=before)


def initial_state(spark: SparkSession, path: str) -> DataFrame:
    """Several rows of a key, keys that no order has, keys with nulls, and columns in an order of their own."""
    more = spark.range(40).select(
        (F.col("id") * 10).alias("orders"),
        F.when(F.col("id") % 3 > 0, F.date_add(F.lit("1999-12-30"), F.col("id").cast("int"))).alias("day"),
        F.element_at(F.array(*map(F.lit, ["at", "AU", None, "ZZ"])), (F.col("id") % 4 + 1).cast("int")).alias("land"),
        F.when(F.col("id") % 5 > 0, (F.col("id") % 5 - 1).cast("int")).alias("number"),
    )
    stored = spark.read.schema(SCHEMA).parquet(path).where("quantity = 7")
    counted = stored.groupBy("country", "quantity").agg(F.count("*").alias("orders"), F.min("placed_at").alias("day"))
    return more.union(counted.selectExpr("orders", "CAST(day AS DATE)", "country", "quantity"))


def pipeline(spark: SparkSession, path: str, output: str, form: str, rate: str = "0") -> None:
    rows = spark.readStream.format("replay").option("rowsPerSecond", rate).schema(SCHEMA).load(path)
    frame = results(rows, initial_state(spark, path), form).hint("uid", "orders")
    frame.writeStream.outputMode("update").queryName("orders").start(output)
