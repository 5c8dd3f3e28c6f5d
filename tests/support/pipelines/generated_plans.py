"""Plans that are lists of steps on streams of (k, t, v), read from batches by a reader whose rows have no order.

A plan is a JSON object: ``left`` and, for a join, ``right`` are the steps of a side, ``join`` is the kind of join, and
``then`` are the steps behind it. See :func:`stepped`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

DELAY = "2 seconds"
WITHIN_S = 5
TIMER_MS = 3000
DDL = "k STRING, t TIMESTAMP, v BIGINT"


class Timers(StatefulProcessor):
    """Passes rows on; three seconds behind each one comes a row whose ``v`` says when, below zero."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(int(row.t.timestamp() * 1000) + TIMER_MS)
            yield Row(k=row.k, t=row.t, v=row.v)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        at = expiredTimerInfo.getExpiryTimeInMs()
        yield Row(k=key[0], t=datetime.fromtimestamp(at / 1000, UTC), v=-at)

    def close(self) -> None:
        pass


class Distinct(StatefulProcessor):
    """Passes the first row of each ``v`` on."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.seen = handle.getMapState("seen", "v BIGINT", "seen BOOLEAN")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if not self.seen.containsKey((row.v,)):
                self.seen.updateValue((row.v,), (True,))
                yield Row(k=row.k, t=row.t, v=row.v)

    def close(self) -> None:
        pass


class Earlier(Distinct):
    """Gives rows an event time that lies a second before the watermark."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        before = timerValues.getCurrentWatermarkInMs() / 1000 - 1
        for row in rows:
            yield Row(k=row.k, t=datetime.fromtimestamp(before, UTC), v=row.v)


PROCESSORS: dict[str, type[StatefulProcessor]] = {"timers": Timers, "distinct": Distinct, "earlier": Earlier}


class Unordered(DataSource):
    """``batch-<n>.parquet`` in directory ``path`` is a range; option ``seed`` deals its rows out and orders them."""

    def schema(self) -> Any:
        return from_arrow_schema(pq.read_schema(Path(self.options["path"], "batch-0.parquet")))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return UnorderedReader(
            Path(self.options["path"]), to_arrow_schema(schema, timezone="UTC"), self.options["seed"]
        )


class UnorderedReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One to four partitions for each range, in any order, with pauses between the rows."""

    def __init__(self, directory: Path, schema: pa.Schema, seed: str) -> None:
        self.directory, self.schema, self.seed = directory, schema, seed

    def prepareForTriggerAvailableNow(self) -> None:
        pass

    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def latestOffset(self, start: dict[str, int], limit: Any) -> dict[str, int]:
        return {"next": min(start["next"] + 1, len(list(self.directory.glob("batch-*"))))}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        choice = Random(f"{self.seed} {start['next']}")
        count = choice.randrange(1, 5)
        parts = [InputPartition((start["next"], part, count)) for part in range(count)]
        return choice.sample(parts, count)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch, part, count = partition.value
        choice = Random(f"{self.seed} {batch} {part}")
        table = pq.read_table(self.directory / f"batch-{batch}.parquet").cast(self.schema)
        rows = choice.sample(range(part, table.num_rows, count), len(range(part, table.num_rows, count)))
        while rows:
            taken, rows = rows[:5], rows[5:]
            time.sleep(choice.choice([0, 0, 0.002]))
            yield from table.take(taken).combine_chunks().to_batches()


def pipeline(spark: SparkSession, plans: str, source: str, seed: str, output: str) -> None:
    """Writes (plan, k, v) for each of the plans, by their numbers."""
    spark.dataSource.register(Unordered)
    rows = spark.readStream.format("Unordered").options(path=source, seed=seed).load().hint("uid", "source")
    for number, plan in enumerate(json.loads(plans)):
        one = side(rows, "l", plan["left"])
        if plan["join"]:
            one = joined(one, side(rows, "r", plan["right"]), plan["join"])
        for step in plan["then"]:
            one = stepped(one, step)
        named = one.select("k", "v", F.lit(number).alias("plan"))
        named.writeStream.format("parquet").trigger(availableNow=True).start(f"{output}/{number}")


def side(rows: DataFrame, letter: str, steps: list[str]) -> DataFrame:
    stream = rows.filter(F.col("side") == letter).select("k", "t", "v")
    for step in steps:
        stream = stepped(stream, step)
    return stream


def stepped(stream: DataFrame, step: str) -> DataFrame:
    """The stream behind one step; a sum is there for ``rebalance`` to have an operator behind it."""
    match step:
        case "watermark":
            return stream.withWatermark("t", DELAY)
        case "map":
            return stream.mapInArrow(lambda batches: batches, DDL)
        case "rename":
            return stream.toDF("a", "b", "c").toDF("k", "t", "v")
        case "rebalance":
            return stream.repartition(2).select("k", "t", (F.col("v") + 0).alias("v"))
        case "union":
            return stream.where("v & 1 = 1").union(stream.where("v & 1 = 0"))
    return stream.groupBy("k").transformWithState(
        PROCESSORS[step](), DDL, "Append", "EventTime", eventTimeColumnName="t"
    )


def joined(left: DataFrame, right: DataFrame, kind: str) -> DataFrame:
    within = f"rt BETWEEN t - INTERVAL {WITHIN_S} SECONDS AND t + INTERVAL {WITHIN_S} SECONDS"
    pairs = left.join(right.toDF("rk", "rt", "rv"), F.expr(f"k = rk AND {within}"), kind)
    if kind == "left_semi":
        return pairs
    return pairs.select("k", "t", F.expr("v * 1000 + coalesce(rv, 999)").alias("v"))
