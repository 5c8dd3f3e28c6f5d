"""What is put through chaos: aggregates, windows with timers, a join, a union with rows in turn, a filter.

Orders are (id, key, amount, at), payments (number, key, paid_at). Rows of one key come in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

WINDOW_MS = 2_000
PAYMENT_BASE = 1_000_000_000


class Windows(StatefulProcessor):
    """Counts and sums per key and tumbling window; a timer at the window's end emits it."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._handle = handle
        self._windows = handle.getMapState("windows", "start BIGINT", "orders BIGINT, amount BIGINT")

    def handleInputRows(self, key: tuple[Any, ...], rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            start = int(row.at.timestamp() * 1000) // WINDOW_MS * WINDOW_MS
            known = self._windows.getValue((start,)) if self._windows.containsKey((start,)) else (0, 0)
            self._windows.updateValue((start,), (known[0] + 1, known[1] + row.amount))
            self._handle.registerTimer(start + WINDOW_MS)
        return iter(())

    def handleExpiredTimer(self, key: tuple[Any, ...], timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        start = expiredTimerInfo.getExpiryTimeInMs() - WINDOW_MS
        orders, amount = self._windows.getValue((start,))
        self._windows.removeKey((start,))
        yield Row(key=key[0], start=start, orders=orders, amount=amount)

    def close(self) -> None:
        pass


def pass_through(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A function of the user in the chain."""
    yield from batches


def pipeline(spark: SparkSession, directory: str, output: str, rate: str) -> None:
    """Builds the job: ``rate`` in rows per second of the orders, 0 for as fast as possible."""

    def read(name: str, event_time: str, share: int) -> DataFrame:
        return (
            spark.readStream.format("replay")
            .option("path", f"{directory}/{name}.parquet")
            .option("partitionBy", "key")
            .option("batchRows", 64)
            .option("rowsPerSecond", int(rate) // share)
            .load()
            .hint("uid", name)
            .withWatermark(event_time, "1 second")
            .hint("uid", f"{name}-event-time")
        )

    def write(frame: DataFrame, name: str, mode: str = "append") -> None:
        query = frame.hint("uid", name).writeStream.format("parquet").outputMode(mode).queryName(name)
        query.start(f"{output}/{name}")

    orders, payments = read("orders", "at", 1), read("payments", "paid_at", 3)
    totals = F.count("*").alias("orders"), F.sum("amount").alias("amount"), F.max("id").alias("id")
    write(orders.groupBy("key").agg(*totals), "totals", "update")
    windows = orders.groupBy("key").transformWithState(
        Windows(), "key BIGINT, start BIGINT, orders BIGINT, amount BIGINT", "Append", "EventTime"
    )
    write(windows, "windows")
    paid = orders.select(F.col("key").alias("order_key"), "at", F.col("id").alias("order_id")).hint("uid", "numbers")
    condition = "key = order_key AND number = order_id AND paid_at BETWEEN at AND at + INTERVAL 3 SECONDS"
    joined = paid.join(payments, F.expr(condition), "left_outer").hint("uid", "pairs")
    write(joined.select(F.col("order_id").alias("number"), "paid_at"), "joined")
    numbers = payments.select((F.col("number") + PAYMENT_BASE).alias("id")).hint("uid", "payment-ids")
    united = orders.select("id").hint("uid", "order-ids").union(numbers).repartition(2)
    write(united.mapInArrow(pass_through, "id BIGINT"), "united")
    some = payments.filter("number % 30 = 0").hint("uid", "some").select("number").hint("uid", "some-numbers")
    write(some.mapInArrow(pass_through, "number BIGINT"), "thirtieth")
