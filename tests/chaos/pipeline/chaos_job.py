"""What is put through chaos: aggregates, windows with timers, a join, a union behind rebalance, and broadcast.

Orders are (id, key, amount, at), payments (number, key, paid_at). Rows of one key come in the order of the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from ckpt_runtime.api import Stream, StreamSession, count
from ckpt_runtime.api import max as max_of
from ckpt_runtime.api import sum as sum_of

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


def pipeline(session: StreamSession, directory: str, output: str, rate: str) -> None:
    """Builds the job: ``rate`` in rows per second of the orders, 0 for as fast as possible."""

    def read(name: str, event_time: str, share: int) -> Stream:
        return (
            session.readStream.format("replay")
            .option("path", f"{directory}/{name}.parquet")
            .option("partitionBy", "key")
            .option("batchRows", 64)
            .option("rowsPerSecond", int(rate) // share)
            .load()
            .uid(name)
            .withWatermark(event_time, "1 second")
            .uid(f"{name}-event-time")
        )

    def write(stream: Stream, name: str) -> None:
        stream.writeStream.format("parquet").uid(f"{name}-sink").start(f"{output}/{name}")

    orders, payments = read("orders", "at", 1), read("payments", "paid_at", 3)
    totals = orders.groupBy("key").agg(
        count().alias("orders"), sum_of("amount").alias("amount"), max_of("id").alias("id")
    )
    write(totals.uid("totals"), "totals")
    windows = orders.groupBy("key").transformWithState(
        Windows(), "key BIGINT, start BIGINT, orders BIGINT, amount BIGINT", "Append", "EventTime"
    )
    write(windows.uid("windows"), "windows")
    paid = orders.select("key", "at", number="id").uid("numbers")
    joined = paid.join(payments, ["key", "number"], "left_outer", within=("0 ms", "3 seconds"))
    write(joined.uid("joined"), "joined")
    numbers = payments.select(id=pc.add(pc.field("number"), PAYMENT_BASE)).uid("payment-ids")
    united = orders.select("id").uid("order-ids").union(numbers).rebalance()
    write(united.mapInArrow(pass_through, "id BIGINT").uid("united"), "united")
    thirtieth = pc.multiply(pc.divide(pc.field("number"), 30), 30)
    some = (
        payments.filter(pc.equal(pc.field("number"), thirtieth))
        .uid("some")
        .select("number")
        .uid("some-numbers")
        .broadcast()
    )
    everywhere = some.mapInArrow(pass_through, "number BIGINT").uid("everywhere").setParallelism(2)
    write(everywhere, "everywhere")
