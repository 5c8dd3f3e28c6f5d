"""Generated plans over rows of wide batches, in Spark and in the engine: no row that Spark takes may be late here.

The engine has one to three subtasks, which read the partitions of a batch in any order and with pauses; its event time
may stay behind Spark's, so that the batches hold no row that is late in Spark.
"""

from __future__ import annotations

import datetime as dt
import json
import os
from collections import Counter
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import coalesce, col, expr, lit

from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.effort import THOROUGH
from tests.support.jobs import fast, program_of
from tests.support.pipelines import generated_plans
from tests.support.pipelines.generated_plans import DDL, DELAY, PROCESSORS, WITHIN_S
from tests.support.side_by_side import ROCKSDB

pytestmark = [pytest.mark.spark, pytest.mark.slow]

cloudpickle.register_pickle_by_value(generated_plans)

Plan = dict[str, Any]
SCHEMA = pa.schema([("side", pa.string()), ("k", pa.string()), ("t", pa.timestamp("us", "UTC")), ("v", pa.int64())])

# A processor in front of a join; a deduplication in front of a left join. Both had a second watermark in between.
CHOSEN: list[Plan] = [
    {"left": ["watermark", "timers"], "right": ["watermark"], "join": "inner", "then": []},
    {"left": ["watermark", "distinct"], "right": ["map", "watermark"], "join": "left_outer", "then": ["timers"]},
]


def generated(choice: Random) -> Plan:
    def steps() -> list[str]:
        before = choice.sample(["map", "rename"], choice.randrange(3))
        behind = choice.sample(["rebalance", "union", "rename"], choice.randrange(3))
        stateful = choice.sample(["timers", "distinct"], choice.randrange(2))
        return [*before, "watermark", *behind, *stateful]

    join = choice.choice([None, "inner", "left_outer", "left_semi"])
    then = choice.sample(["timers", "distinct"], choice.randrange(1, 3)) if choice.random() < 0.7 else []
    return {"left": steps(), "right": steps(), "join": join, "then": then}


def batches(choice: Random) -> list[pa.Table]:
    """Two that are much wider than the delay, some rows twice; then one whose time is far ahead, for what waits."""
    numbers = iter(range(1, 500))
    latest = 10
    found = []
    for _ in range(2):
        times = range(2 * (latest - 2) + 1, 2 * (latest + choice.randrange(50, 100)))
        latest = times[-1] // 2
        rows = [(choice.choice("lr"), choice.choice("abc"), choice.choice(times) / 2, next(numbers)) for _ in range(40)]
        found.append(rows + rows[:4])
    found.append([(side, "flush", 100_000, 0) for side in "lr"])
    columns = [zip(*rows, strict=True) for rows in found]
    return [
        pa.table([side, key, [dt.datetime.fromtimestamp(at, dt.UTC) for at in time], number], schema=SCHEMA)
        for side, key, time, number in columns
    ]


def write(directory: Path, tables: list[pa.Table]) -> None:
    """Where both read them."""
    (directory / "in").mkdir()
    for number, table in enumerate(tables):
        pq.write_table(table, directory / "in" / f"batch-{number}.parquet")
        os.utime(directory / "in" / f"batch-{number}.parquet", (number, number))  # Spark reads the oldest first


def in_spark(spark: SparkSession, directory: Path, plans: list[Plan]) -> Counter[Any]:
    spark = spark.newSession()
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "true")
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    spark.conf.set("spark.sql.streaming.join.stateFormatVersion", "3")
    schema = spark.read.parquet(str(directory / "in" / "batch-0.parquet")).schema
    rows = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(directory / "in"))
    made = [made_in_spark(rows, plan).select(lit(number), "k", "v") for number, plan in enumerate(plans)]
    seen: Counter[Any] = Counter()
    query = (
        reduce(DataFrame.union, made)
        .writeStream.foreachBatch(lambda frame, _batch: seen.update(map(tuple, frame.collect())))
        .option("checkpointLocation", str(directory / "state"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return seen


def made_in_spark(rows: DataFrame, plan: Plan) -> DataFrame:
    def side(letter: str, steps: list[str]) -> DataFrame:
        return reduce(stepped_in_spark, steps, rows.where(col("side") == letter).select("k", "t", "v"))

    one = side("l", plan["left"])
    if plan["join"]:
        bounds = f"rt >= t - interval {WITHIN_S} seconds and rt <= t + interval {WITHIN_S} seconds"
        right = side("r", plan["right"]).toDF("rk", "rt", "rv")
        one = one.join(right, expr(f"k = rk and {bounds}"), plan["join"])
        if plan["join"] != "left_semi":
            one = one.select("k", "t", (col("v") * 1000 + coalesce(col("rv"), lit(999))).alias("v"))
    return reduce(stepped_in_spark, plan["then"], one)


def stepped_in_spark(stream: DataFrame, step: str) -> DataFrame:
    match step:
        case "watermark":
            return stream.withWatermark("t", DELAY)
        case "map":
            return stream.mapInArrow(lambda parts: parts, DDL)
        case "rename":
            return stream.toDF("a", "b", "c").toDF("k", "t", "v")
        case "rebalance":
            return stream.repartition(2)
        case "union":
            return stream.where("v & 1 = 1").union(stream.where("v & 1 = 0"))
    grouped = stream.groupBy("k")
    return grouped.transformWithState(PROCESSORS[step](), DDL, "Append", "EventTime", eventTimeColumnName="t")


def submitted(cluster: MiniCluster, directory: Path, plans: list[Plan], seed: int, parallelism: int) -> str:
    """The id of the job, which writes to ``out-<parallelism>``."""
    return cluster.submit(
        program_of("generated_plans"),
        entry="generated_plans:pipeline",
        arguments=[json.dumps(plans), str(directory / "in"), str(seed), str(directory / f"out-{parallelism}")],
        configuration={
            **fast(restart_strategy__type="none", execution__buffer_timeout__interval="0 ms"),
            "execution.checkpointing.dir": str(directory / f"checkpoints-{parallelism}"),
        },
        parallelism=parallelism,
    )


def in_the_engine(
    cluster: MiniCluster, directory: Path, plans: list[Plan], seed: int, parallelism: int
) -> Counter[Any]:
    cluster.wait_for_status(submitted(cluster, directory, plans, seed, parallelism), JobStatus.FINISHED)
    files = (directory / f"out-{parallelism}").glob("*/[!.]*.parquet")
    return Counter((r["plan"], r["k"], r["v"]) for file in files for r in pq.read_table(file).to_pylist())


@pytest.mark.row("io.2")
@pytest.mark.parametrize("seed", [None, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(12))])
def test_generated_plans_give_the_rows_that_they_give_in_spark(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, seed: int | None
) -> None:
    """Without a seed it is the first of the chosen plans."""
    choice = Random(seed or 0)
    if seed is None:
        plans = CHOSEN[:1]
    elif seed == 0:
        plans = [*CHOSEN, generated(choice)]
    else:
        plans = [generated(choice) for _ in range(3)]
    write(tmp_path, batches(choice))
    theirs = in_spark(spark, tmp_path, plans)
    kept = {event: count for event, count in theirs.items() if event[1] != "flush"}
    assert {plan for plan, _, _ in kept} == set(range(len(plans))), plans
    for parallelism in (1, 2, 3) if THOROUGH else (2,):
        ours = in_the_engine(cluster, tmp_path, plans, seed or 0, parallelism)
        assert {event: count for event, count in ours.items() if event[1] != "flush"} == kept, (parallelism, plans)


def test_a_processor_that_gives_late_rows_fails_the_query_in_spark_and_the_job_in_the_engine(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    plans: list[Plan] = [{"left": ["watermark", "earlier"], "right": [], "join": None, "then": []}]
    write(tmp_path, batches(Random(0)))
    with pytest.raises(StreamingQueryException, match="EMITTING_ROWS_OLDER_THAN_WATERMARK_NOT_ALLOWED"):
        in_spark(spark, tmp_path, plans)
    job = submitted(cluster, tmp_path, plans, 0, 1)
    cluster.wait_for_status(job, JobStatus.FAILED)
    assert "LateResultError" in cluster.failure(job)
