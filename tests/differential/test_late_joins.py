"""Joins of streams with late rows: batch by batch the rows of Spark's join of the same streams."""

from __future__ import annotations

import datetime as dt
import json
import os
from collections import Counter
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import coalesce, col, expr, lit

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import fast, program_of
from tests.support.joins import LEFT, RIGHT, Subtask, join_spec
from tests.support.pipelines import side_processors, unbounded_joins
from tests.support.side_by_side import ROCKSDB, Case, EngineRun, process_all_available

pytestmark = [pytest.mark.spark, pytest.mark.slow]

KINDS = ("inner", "left_outer", "right_outer", "full_outer", "left_semi")
DELAY_S, WITHIN_S = int(unbounded_joins.DELAY.split()[0]), 5
SCHEMA = pa.schema([("side", pa.string()), ("k", pa.string()), ("t", pa.timestamp("us", "UTC")), ("v", pa.int64())])
Row = tuple[str, str | None, float | None]
Joined = Callable[[str], DataFrame]

CHOSEN: list[list[Row]] = [
    [
        *[("l", "a", 100), ("l", "a", 100), ("l", "b", 103), ("l", "c", None), ("l", "q", 101)],
        *[("r", "a", 104), ("r", "a", 105), ("r", "a", 106), ("r", "a", 94), ("r", "c", None), ("r", "b", 98)],
        # Event time begins at 1970.
        *[("l", "p", -3), ("r", "p", -2), ("l", "p", 0), ("r", "p", 0), ("l", "p", 1), ("r", "p", 2)],
    ],
    # The watermark is at 93: at it, behind it and in front of it; equal times.
    [
        *[("l", "a", 93), ("l", "a", 92), ("l", "d", 94), ("l", "b", 120), ("l", "g", 95), ("l", "g", 95)],
        *[("r", "d", 93), ("r", "d", 99), ("r", "e", 130), ("r", "g", 95), ("r", "g", 95), ("r", "g", 100)],
        *[("l", None, 99), ("r", None, 130)],
    ],
    # At 110; the right side is idle for two batches, and the watermark stays at 120 in the second.
    [("l", "b", 150), ("l", "a", 104), ("l", "h", 110), ("l", "h", 111)],
    [("l", "b", 160), ("l", "x", 121), ("l", "x", 120), ("l", "w", 122)],
    [("r", "x", 121), ("r", "x", 126), ("r", "x", 127), ("r", "x", 116), ("r", "b", 150), ("r", "y", 200)],
    # At 150.
    [("l", "z", 151), ("l", "z", 150), ("r", "z", 151), ("r", "z", 150), ("l", "y", 300), ("r", "y", 300)],
    [("l", "y", 289), ("r", "y", 290), ("r", "y", 291)],
]  # fmt: skip


def with_more(chosen: list[list[Row]], choice: Random) -> list[list[Row]]:
    """Further rows in each batch, of two keys of their own and some twice, a half second off what is chosen.

    None is the latest of its side, or on the edge where Spark gives a row without a match a batch later.
    """
    latest: dict[str, float] = {}
    batches = []
    for batch in chosen:
        for side, _, second in batch:
            latest[side] = max(latest.get(side, 0), second or 0)
        rows = [
            (side, choice.choice("mn"), latest[side] - choice.randrange(1, 25) + 0.5)
            for side in choice.choices(sorted(latest), k=12)
        ]
        batches.append([*batch, *rows, *rows[:3]])
    return batches


BATCHES = with_more(CHOSEN, Random(3))


def wide_batches(choice: Random) -> list[list[Row]]:
    """Batches much wider than the delay, whose sides reach the same time; some rows are late by that of the last one.

    Where a side is behind the other one, Spark takes rows that are late by their own stream.
    """
    batches: list[list[Row]] = []
    reached = 0
    for latest in (100, 150, 300):
        times = [choice.randrange(max(0, reached - 2 * DELAY_S), latest) + 0.5 for _ in range(24)]
        rows = [(choice.choice("lr"), choice.choice("ab"), time) for time in times]
        batches.append([*rows, ("l", "c", latest), ("r", "d", latest)])
        reached = latest
    return batches


def tables(batches: list[list[Row]] = BATCHES) -> list[pa.Table]:
    """The batches; ``v`` numbers the rows."""
    number = 0
    found = []
    for batch in batches:
        rows = []
        for side, key, second in batch:
            time = None if second is None else dt.datetime.fromtimestamp(second, dt.UTC)
            rows.append({"side": side, "k": key, "t": time, "v": number})
            number += 1
        found.append(pa.Table.from_pylist(rows, schema=SCHEMA))
    return found


def pairs_of(*kinds: str) -> Callable[[Joined], DataFrame]:
    """What several joins give, as (kind of join, number of the left row, that of the right one)."""

    def united(joined: Joined) -> DataFrame:
        pairs = []
        for kind in kinds:
            right = lit(-1) if kind == "left_semi" else coalesce(col("rv"), lit(-1))
            pairs.append(joined(kind).select(lit(kind).alias("kind"), coalesce(col("lv"), lit(-1)), right))
        return reduce(DataFrame.union, pairs)

    return united


def of_bounded_joins(made_of: Callable[[Joined], DataFrame]) -> Callable[[DataFrame], DataFrame]:
    """What is made of the join of two sides, which is given by its kind, as a function of the rows of both."""
    on = expr(f"lk = rk and rt >= lt - interval {WITHIN_S} seconds and rt <= lt + interval {WITHIN_S} seconds")

    def made(stream: DataFrame) -> DataFrame:
        return made_of(lambda kind: unbounded_joins.side(stream, "l").join(unbounded_joins.side(stream, "r"), on, kind))

    return made


def in_spark(
    spark: SparkSession, directory: Path, batches: list[pa.Table], made_of: Callable[[DataFrame], DataFrame]
) -> list[Counter[Any]]:
    """The rows that each batch gives of what is made of the stream."""
    source = directory / "in"
    source.mkdir()
    spark = spark.newSession()
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)  # processors have no other one
    spark.conf.set("spark.sql.streaming.join.stateFormatVersion", "3")  # one store for each join, not four
    pq.write_table(SCHEMA.empty_table(), directory / "schema.parquet")
    schema = spark.read.parquet(str(directory / "schema.parquet")).schema
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(source))
    made = made_of(stream)
    seen: list[Any] = []
    query = (
        made.writeStream.foreachBatch(lambda frame, _batch: seen.extend(map(tuple, frame.collect())))
        .option("checkpointLocation", str(directory / "state"))
        .start()
    )
    results = []
    try:
        for number, table in enumerate(batches):
            before = len(seen)
            pq.write_table(table, directory / "next.parquet")
            os.rename(directory / "next.parquet", source / f"{number}.parquet")
            process_all_available(query)
            results.append(Counter(seen[before:]))
    finally:
        query.stop()
    return results


def in_the_engine() -> list[Counter[Any]]:
    """The same; both watermarks move behind the rows of a batch, the lesser one counts."""
    time = pa.timestamp("us", "UTC")
    within = (-WITHIN_S * 1000, WITHIN_S * 1000)
    spec = {kind: join_spec(kind, within, [("k", pa.string())], time=time) for kind in KINDS}
    joins = {kind: Subtask(spec[kind]) for kind in KINDS}
    latest: dict[str, int] = {}
    results = []
    for batch in tables():
        rows = batch.to_pylist()
        events: Counter[Any] = Counter()
        for row in rows:
            if row["t"] is not None:
                latest[row["side"]] = max(latest.get(row["side"], 0), int(row["t"].timestamp()))
        for kind, join in joins.items():
            for number, letter in ((LEFT, "l"), (RIGHT, "r")):
                mine = [{"k": r["k"], f"{letter}t": r["t"], letter: r["v"]} for r in rows if r["side"] == letter]
                if mine:
                    schema = spec[kind].sides[number].schema
                    join.operator.process_batch(pa.RecordBatch.from_pylist(mine, schema), number)
            if len(latest) == 2:
                join.operator.process_watermark((min(latest.values()) - DELAY_S) * 1000)
            for event in join.take():
                if not isinstance(event, int):
                    events[kind, *(-1 if event.get(name) is None else event[name] for name in "lr")] += 1
        results.append(events)
    return results


@pytest.mark.long
def test_late_rows_of_joins(spark: SparkSession, tmp_path: Path) -> None:
    theirs, ours = in_spark(spark, tmp_path, tables(), of_bounded_joins(pairs_of(*KINDS))), in_the_engine()
    assert ours == theirs
    assert {kind for kind, *_ in sum(ours[1:], Counter())} == set(KINDS)


def latest_first(batches: list[pa.Table]) -> list[pa.Table]:
    return [table.sort_by([("t", "descending")]) for table in batches]


@pytest.mark.long
@pytest.mark.row("io.2")
def test_rows_of_a_readers_batch_have_no_order(spark: SparkSession, cluster: MiniCluster, tmp_path: Path) -> None:
    """The whole engine, with a reader that gives the latest rows first, one by one, and two streams made of it."""
    kinds = ("full_outer", "left_semi")
    batches = tables(wide_batches(Random(5)))
    theirs = sum(in_spark(spark, tmp_path, batches, of_bounded_joins(pairs_of(*kinds))), Counter())
    case = Case(
        json.dumps(kinds), latest_first(batches), "", watermark=("t", f"{DELAY_S} seconds"), chunk=1,
        entry="late_joins:pipeline",
        configuration={"execution.buffer-timeout.interval": "0 ms"},
    )  # fmt: skip
    ours = Counter((row["kind"], row["l"], row["r"]) for row in EngineRun(cluster, case, tmp_path).rows())
    assert ours == theirs
    passed = {number for _, *pair in theirs for number in pair}
    assert 0 < sum(table.num_rows for table in batches) - len(passed - {-1}) < 12, "some rows are late"


@pytest.mark.long
@pytest.mark.row("io.2")
def test_processor_after_an_outer_join_gives_the_rows_of_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """It gets the same rows, none of them late, and the same timers; Spark gives unmatched rows a call of their own."""
    batches = tables(wide_batches(Random(5)))

    def pairs_of_a_processor(joined: Joined) -> DataFrame:
        pairs = joined("left_outer").select(col("lk").alias("k"), col("lt").alias("t"), col("rv").alias("v"))
        processor = side_processors.RowsAndTimers()
        return pairs.groupBy("k").transformWithState(processor, side_processors.SCHEMA, "Append", "EventTime")

    theirs = sum(in_spark(spark, tmp_path, batches, of_bounded_joins(pairs_of_a_processor)), Counter())
    case = Case(
        "RowsAndTimers", latest_first(batches), side_processors.SCHEMA, ("left_outer",), "Append", "EventTime",
        ("t", f"{DELAY_S} seconds"), chunk=1, entry="behind_a_join:pipeline",
        configuration={"execution.buffer-timeout.interval": "0 ms"},
    )  # fmt: skip
    ours = Counter((row["k"], row["what"], row["said"]) for row in EngineRun(cluster, case, tmp_path).rows())
    assert ours == theirs
    assert {what for _, what, _ in theirs} == {"row", "fired"}


UNBOUNDED: list[list[Row]] = [
    [("l", "a", 100), ("r", "a", 100), ("l", "b", 100), ("r", "b", 100)],
    # Where nothing is removed from state, Spark drops the rows of a batch that are late by the one before the last.
    [("l", "f", 100), ("r", "g", 100)],
    # The watermark is at 90.
    [("l", "a", 50), ("r", "b", 50), ("l", "a", 95), ("r", "a", 90), ("r", "b", 91), ("l", "a", None)],
]


@pytest.mark.long
@pytest.mark.row("io.2")
def test_joins_without_bounds_drop_the_late_rows_of_a_side_whose_event_time_is_read(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    """Spark prunes event time that nothing reads, and then no row of that side is late."""
    batches = tables(UNBOUNDED)
    theirs = sum(
        in_spark(
            spark,
            tmp_path,
            batches,
            lambda rows: unbounded_joins.pairs(unbounded_joins.side(rows, "l"), unbounded_joins.side(rows, "r")),
        ),
        Counter(),
    )
    source = tmp_path / "batches"
    source.mkdir()
    for number, table in enumerate(batches):
        pq.write_table(table, source / f"batch-{number}.parquet")
    job = cluster.submit(
        program_of("unbounded_joins_job"),
        entry="unbounded_joins_job:pipeline",
        arguments=[str(source), str(tmp_path / "out")],
        configuration=fast(restart_strategy__type="none"),
        parallelism=2,
    )
    cluster.wait_until((source / f"committed-{len(batches) - 1}").exists, "the last batch")
    cluster.savepoint(job, tmp_path / "savepoints", stop=True)
    cluster.wait_for_status(job, JobStatus.FINISHED)
    ours = Counter(tuple(row.values()) for row in pq.read_table(tmp_path / "out").to_pylist())
    assert ours == theirs
    numbers = {kind: {row[2:] for row in theirs if row[0] == kind} for kind in (*unbounded_joins.READ, "filter")}
    assert numbers["both times"] < numbers["left time"] < numbers["no time"], "some rows are late"
