"""Programs about what Spark's own suites for stateful streams look at. Spark and the engine run the same functions.

Rows arrive in several files, which Spark reads one in each micro-batch. Between the files event time moves far, so that
a row is late for both systems or for none of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = (
    "id INT, k STRING, v DOUBLE, n INT, s STRUCT<a: INT, b: STRING>, arr ARRAY<INT>, text STRING, at TIMESTAMP, "
    "at2 TIMESTAMP, local TIMESTAMP_NTZ, nested STRUCT<at: TIMESTAMP, x: INT>, gap STRING, price DECIMAL(10,2)"
)

Program: TypeAlias = Callable[[DataFrame, DataFrame], DataFrame]
"""Makes a frame of two streams."""


def pipeline(spark: SparkSession, directory: str, output: str, name: str) -> None:
    """Starts one query."""
    frame, mode, _ = build(spark, directory, name)
    writer = frame.writeStream.outputMode(mode).queryName(name).trigger(availableNow=True)
    if mode == "complete":
        writer.foreachBatch(_write_to(Path(output, "rows"))).start()
    else:
        writer.format("parquet").start(f"{output}/rows")


def _write_to(directory: Path) -> Callable[[DataFrame, int], None]:
    def write(batch: DataFrame, batch_id: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        hidden = directory / ".result"
        pq.write_table(batch.toArrow(), hidden)
        os.replace(hidden, directory / "result.parquet")

    return write


def build(spark: SparkSession, directory: str, name: str) -> tuple[DataFrame, str, tuple[str, ...]]:
    """Returns the frame of a query, its output mode and, for mode update, the columns of its key."""
    mode, keys, program = CASES[name]
    for key, value in OPTIONS.get(name, {}).items():
        spark.conf.set(key, value)
    one, other = (
        spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", 1).parquet(f"{directory}/{side}")
        for side in ("one", "other")
    )
    one.createOrReplaceTempView("one")
    other.createOrReplaceTempView("other")
    return program(one, other), mode, keys


def marked(rows: DataFrame, delay: str = "10 seconds") -> DataFrame:
    return rows.withWatermark("at", delay)


def renamed(rows: DataFrame) -> DataFrame:
    return rows.selectExpr("id AS id2", "k AS k2", "v AS v2", "n AS n2", "s AS s2", "at AS at_2", "at2 AS at2_2")


def near(one: DataFrame, other: DataFrame, how: str, condition: str = "true") -> DataFrame:
    right = renamed(marked(other))
    bounds = "k = k2 AND at_2 BETWEEN at - INTERVAL 5 SECONDS AND at + INTERVAL 5 SECONDS"
    joined = marked(one).join(right, F.expr(f"{bounds} AND {condition}"), how)
    return joined.select("id", "k", "at") if how == "left_semi" else joined.select("id", "k", "at", "id2", "k2", "at_2")


def sql(text: str) -> Program:
    return lambda one, _: one.sparkSession.sql(text)


_WINDOW = F.window("at", "10 seconds")
_OF_TWO = "SELECT * FROM one_m JOIN two_m ON k = k2 AND at_2 BETWEEN at AND at + INTERVAL 5 SECONDS"

CASES: dict[str, tuple[str, tuple[str, ...], Program]] = {
    # Aggregations.
    "count by key": ("update", ("k",), lambda one, _: one.groupBy("k").count()),
    "count by key complete": ("complete", (), lambda one, _: one.groupBy("k").count().orderBy("k")),
    "global count": ("complete", (), lambda one, _: one.groupBy().agg(F.count("*").alias("c"), F.sum("n").alias("s"))),
    "global count of nothing": (
        "complete",
        (),
        lambda one, _: one.where("id > 1000").groupBy().agg(F.count("*").alias("c"), F.max("n").alias("m")),
    ),
    "global count of nothing update": (
        "update",
        (),
        lambda one, _: one.where("id > 1000").groupBy().agg(F.count("*").alias("c")),
    ),
    "key of doubles": ("complete", (), lambda one, _: one.groupBy("v").count().selectExpr("v", "1 / v AS i", "count")),
    "key of structs": ("complete", (), lambda one, _: one.groupBy("s").agg(F.count("*").alias("c"))),
    "key of arrays": ("update", ("arr",), lambda one, _: one.groupBy("arr").agg(F.count("*").alias("c"))),
    "key of decimals": ("complete", (), lambda one, _: one.groupBy("price").agg(F.avg("price").alias("a"))),
    "key without a name": (
        "complete",
        (),
        lambda one, _: one.groupBy(F.col("n") % 2, F.upper("k")).count().toDF(*"abc"),
    ),
    "having": (
        "complete",
        (),
        sql("SELECT k, count(*) c, sum(v) FILTER (WHERE n > 2) f FROM one GROUP BY k HAVING c > 3"),
    ),
    "cube": ("complete", (), lambda one, _: one.cube("k", F.col("n") % 2).agg(F.count("*").alias("c")).toDF(*"abc")),
    "rollup": ("complete", (), lambda one, _: one.rollup("k").agg(F.sum("n").alias("c"), F.grouping("k").alias("g"))),
    "grouping sets": (
        "complete",
        (),
        sql("SELECT k, n % 2 m, count(*) c FROM one GROUP BY GROUPING SETS ((k), (n % 2), ())"),
    ),
    "many aggregates": (
        "complete",
        (),
        lambda one, _: one.groupBy("k").agg(
            F.min("at").alias("a"),
            F.max("s").alias("b"),
            F.avg("price").alias("c"),
            F.approx_count_distinct("n").alias("d"),
            F.sum_distinct("n").alias("e"),
            F.count("v").alias("f"),
            F.max_by("id", "at").alias("g"),
            F.sort_array(F.collect_set("n")).alias("h"),
            F.stddev("v").alias("i"),
            F.bool_or(F.col("n") > 2).alias("j"),
        ),
    ),
    "pivot": ("complete", (), lambda one, _: one.groupBy("k").pivot("n", [1, 2]).agg(F.count("*"))),
    "expressions of aggregates": (
        "update",
        ("k",),
        lambda one, _: one.groupBy("k").agg(
            (F.sum("n") / F.count("*") + F.lit(1)).alias("r"), F.max(F.col("n") * 2).alias("m")
        ),
    ),
    "limit of a result": ("complete", (), lambda one, _: one.groupBy("id").count().orderBy(F.desc("id")).limit(3)),
    "filter of a result": ("complete", (), lambda one, _: one.groupBy("k").count().where("count > 3").select("k")),
    # Event time.
    "windows": ("append", (), lambda one, _: marked(one).groupBy(_WINDOW, "k").count()),
    "windows update": (
        "update",
        ("window", "k"),
        lambda one, _: marked(one).groupBy(_WINDOW, "k").agg(F.sum("n").alias("s")),
    ),
    "windows complete": ("complete", (), lambda one, _: marked(one).groupBy(_WINDOW).count()),
    "time as a key": ("append", (), lambda one, _: marked(one).groupBy("at").count()),
    "sliding windows": (
        "append",
        (),
        lambda one, _: marked(one).groupBy(F.window("at", "10 seconds", "4 seconds", "1 second")).count(),
    ),
    "start time": (
        "append",
        (),
        lambda one, _: marked(one).groupBy(F.window("at", "7 seconds", "7 seconds", "-3 seconds")).count(),
    ),
    "window before its use": (
        "append",
        (),
        lambda one, _: (
            marked(one).select(_WINDOW.alias("w"), "n").where("n > 1").groupBy("w").agg(F.sum("n").alias("s"))
        ),
    ),
    "end of a window as a key": (
        "append",
        (),
        lambda one, _: marked(one).select(F.window("at", "10 seconds").end.alias("e"), "n").groupBy("e").count(),
    ),
    "local time": (
        "append",
        (),
        lambda one, _: one.withWatermark("local", "10 seconds").groupBy(F.window("local", "10 seconds")).count(),
    ),
    "alias of event time": (
        "append",
        (),
        lambda one, _: marked(one).select(F.col("at").alias("x"), "k").groupBy(F.window("x", "10 seconds")).count(),
    ),
    "watermark of an alias": (
        "append",
        (),
        lambda one, _: one.select(F.col("at").alias("x"), "k").withWatermark("x", "10 seconds").groupBy("x").count(),
    ),
    "watermark of a field": (
        "append",
        (),
        lambda one, _: (
            one.withWatermark("nested.at", "10 seconds").groupBy(F.window("nested.at", "10 seconds")).count()
        ),
    ),
    "watermark of a computed column": (
        "append",
        (),
        lambda one, _: (
            one.withColumn("ts", F.col("text").cast("timestamp"))
            .withWatermark("ts", "5 seconds")
            .groupBy(F.window("ts", "10 seconds"))
            .count()
        ),
    ),
    "event time in another column": (
        "append",
        (),
        lambda one, _: (
            marked(one)
            .withColumn("later", F.expr("at + INTERVAL 1 SECOND"))
            .groupBy(F.window("later", "10 seconds"))
            .count()
        ),
    ),
    "two watermarks": (
        "append",
        (),
        lambda one, _: marked(one).withWatermark("at2", "20 seconds").groupBy(F.window("at2", "10 seconds")).count(),
    ),
    "watermark twice": (
        "append",
        (),
        lambda one, _: marked(one).withWatermark("at", "40 seconds").groupBy(F.window("at", "10 seconds")).count(),
    ),
    "watermark of zero": ("append", (), lambda one, _: marked(one, "0 seconds").groupBy(_WINDOW).count()),
    "watermark of a month": ("append", (), lambda one, _: marked(one, "1 month").groupBy(_WINDOW).count()),
    "watermark behind a filter": ("append", (), lambda one, _: marked(one.where("n > 1")).groupBy(_WINDOW).count()),
    "watermark before a filter": ("append", (), lambda one, _: marked(one).where("n > 1").groupBy(_WINDOW).count()),
    "windows of a union": (
        "append",
        (),
        lambda one, other: marked(one).union(marked(other)).groupBy(_WINDOW, "k").count(),
    ),
    "windows of a union with two delays": (
        "append",
        (),
        lambda one, other: marked(one).union(marked(other, "25 seconds")).groupBy(_WINDOW).count(),
    ),
    "windows of a union, latest watermark": (
        "append",
        (),
        lambda one, other: marked(one).union(marked(other, "25 seconds")).groupBy(_WINDOW).count(),
    ),
    "windows of a union with itself": (
        "append",
        (),
        lambda one, _: marked(one).union(marked(one)).groupBy(_WINDOW).count(),
    ),
    "windows of days in a zone": ("append", (), lambda one, _: marked(one).groupBy(F.window("at", "1 day")).count()),
    "windows of event time behind an aggregation": (
        "append",
        (),
        lambda one, _: (
            marked(one)
            .groupBy(_WINDOW, "k")
            .count()
            .groupBy(F.window("window", "20 seconds"))
            .agg(F.sum("count").alias("c"))
        ),
    ),
    "aggregation of an aggregation": (
        "append",
        (),
        lambda one, _: marked(one).groupBy(_WINDOW, "k").count().groupBy("window").agg(F.max("count").alias("c")),
    ),
    "aggregation of an aggregation update": (
        "update",
        ("window",),
        lambda one, _: marked(one).groupBy(_WINDOW, "k").count().groupBy("window").agg(F.max("count").alias("c")),
    ),
    "aggregation of an aggregation complete": (
        "complete",
        (),
        lambda one, _: one.groupBy("k").count().groupBy("count").agg(F.count("*").alias("c")),
    ),
    "windows of SQL": (
        "append",
        (),
        lambda one, _: _view(marked(one)).sql(
            "SELECT window.start s, k, count(*) c FROM m GROUP BY window(at, '10 seconds'), k"
        ),
    ),
    "time of windows": (
        "append",
        (),
        lambda one, _: (
            marked(one)
            .groupBy(_WINDOW, "k")
            .count()
            .select(F.window_time("window").alias("t"), "count")
            .groupBy(F.window("t", "20 seconds"))
            .count()
        ),
    ),
    # Deduplication.
    "duplicates of all columns": ("append", (), lambda one, _: one.select("k", "n").dropDuplicates()),
    "duplicates of a key": ("append", (), lambda one, _: one.select("k", "n").dropDuplicates(["k"]).select("k")),
    "duplicates of a key update": ("update", (), lambda one, _: one.dropDuplicates(["k"]).select("k")),
    "duplicates with event time": (
        "append",
        (),
        lambda one, _: marked(one).dropDuplicates(["k", "at"]).select("k", "at"),
    ),
    "duplicates behind a watermark": ("append", (), lambda one, _: marked(one).dropDuplicates(["k"]).select("k")),
    "duplicates of a struct": ("append", (), lambda one, _: one.select("s").dropDuplicates(["s"])),
    "duplicates of an array": ("append", (), lambda one, _: one.select("arr").dropDuplicates()),
    "duplicates of doubles": ("append", (), lambda one, _: one.select("v").distinct().selectExpr("v", "1 / v AS i")),
    "duplicates of windows": (
        "append",
        (),
        lambda one, _: marked(one).select(_WINDOW.alias("w"), "k").dropDuplicates(["w", "k"]),
    ),
    "duplicates within": (
        "append",
        (),
        lambda one, _: marked(one).dropDuplicatesWithinWatermark(["k"]).select("k", "at"),
    ),
    "duplicates within of all": (
        "append",
        (),
        lambda one, _: marked(one.select("at", "k", "n")).dropDuplicatesWithinWatermark(),
    ),
    "duplicates within without event time": ("append", (), lambda one, _: one.dropDuplicatesWithinWatermark(["k"])),
    "windows of distinct rows": (
        "append",
        (),
        lambda one, _: marked(one).dropDuplicates(["k", "at"]).groupBy(_WINDOW).agg(F.count("*").alias("c")),
    ),
    "windows of distinct rows within": (
        "append",
        (),
        lambda one, _: marked(one).dropDuplicatesWithinWatermark(["id"]).groupBy(_WINDOW).agg(F.count("*").alias("c")),
    ),
    "distinct windows": (
        "append",
        (),
        lambda one, _: marked(one).groupBy(_WINDOW, "k").count().dropDuplicates(["window"]).select("window"),
    ),
    "distinct rows of a union": ("append", (), lambda one, other: one.union(other).select("id").distinct()),
    # Sessions.
    "sessions": ("append", (), lambda one, _: marked(one).groupBy(F.session_window("at", "5 seconds"), "k").count()),
    "sessions complete": (
        "complete",
        (),
        lambda one, _: marked(one).groupBy(F.session_window("at", "5 seconds"), "k").count(),
    ),
    "sessions update": (
        "update",
        (),
        lambda one, _: marked(one).groupBy(F.session_window("at", "5 seconds"), "k").count(),
    ),
    "sessions of all rows": (
        "append",
        (),
        lambda one, _: marked(one).groupBy(F.session_window("at", "5 seconds")).count(),
    ),
    "sessions with a gap in the row": (
        "append",
        (),
        lambda one, _: marked(one).groupBy(F.session_window("at", F.col("gap")), "k").count(),
    ),
    "sessions with gaps": (
        "append",
        (),
        lambda one, _: (
            marked(one)
            .groupBy(
                F.session_window(
                    "at", F.expr("CASE WHEN k = 'a' THEN '3 seconds' WHEN n > 2 THEN '9 seconds' ELSE '6 seconds' END")
                ),
                "k",
            )
            .agg(F.count("*").alias("c"), F.max("n").alias("m"))
        ),
    ),
    "sessions with gaps of nothing": (
        "append",
        (),
        lambda one, _: (
            marked(one)
            .groupBy(
                F.session_window("at", F.expr("CASE WHEN k = 'a' THEN '3 seconds' WHEN k = 'b' THEN '-1 seconds' END")),
                "k",
            )
            .agg(F.count("*").alias("c"))
        ),
    ),
    "windows of sessions": (
        "append",
        (),
        lambda one, _: (
            marked(one)
            .groupBy(F.session_window("at", "5 seconds"), "k")
            .count()
            .groupBy(F.window("session_window", "30 seconds"))
            .agg(F.sum("count").alias("c"))
        ),
    ),
    "sessions of SQL": (
        "append",
        (),
        lambda one, _: _view(marked(one)).sql(
            "SELECT session_window, k, count(*) c FROM m GROUP BY session_window(at, '5 seconds'), k"
        ),
    ),
    # Joins.
    **{
        f"join {how}": ("append", (), lambda one, other, how=how: near(one, other, how))
        for how in ("inner", "left_outer", "right_outer", "full_outer", "left_semi", "left_anti")
    },
    "join with a condition": ("append", (), lambda one, other: near(one, other, "left_outer", "n > n2")),
    "join with or": ("append", (), lambda one, other: near(one, other, "inner", "(n > n2 OR id = id2)")),
    "join of doubles": (
        "append",
        (),
        lambda one, other: one.select("v").join(renamed(other).select("v2"), F.expr("v = v2")),
    ),
    "join of nulls": (
        "append",
        (),
        lambda one, other: one.select("k", "id").join(renamed(other).select("k2", "id2"), F.expr("k <=> k2")),
    ),
    "join of structs": (
        "append",
        (),
        lambda one, other: one.select("s", "id").join(renamed(other).select("s2", "id2"), F.expr("s = s2")),
    ),
    "join of types": (
        "append",
        (),
        lambda one, other: one.select("n", "id").join(other.selectExpr("CAST(n AS BIGINT) m"), F.expr("n = m")),
    ),
    "join without keys": (
        "append",
        (),
        lambda one, other: one.select("id").join(other.selectExpr("id AS id2"), F.expr("id < id2")),
    ),
    "join crossed": ("append", (), lambda one, other: one.select("id").crossJoin(other.selectExpr("id AS id2"))),
    "join update": ("update", (), lambda one, other: near(one, other, "inner")),
    "join left update": ("update", (), lambda one, other: near(one, other, "left_outer")),
    "join left without watermark": (
        "append",
        (),
        lambda one, other: one.join(renamed(other), F.expr("k = k2"), "left_outer"),
    ),
    "join of windows": (
        "append",
        (),
        lambda one, other: (
            marked(one)
            .select("id", F.window("at", "10 seconds").alias("w"))
            .join(marked(other).selectExpr("id AS id2", "window(at, '10 seconds') AS w"), "w", "left_outer")
        ),
    ),
    "join of itself": (
        "append",
        (),
        lambda one, _: (
            marked(one)
            .alias("l")
            .join(marked(one).alias("r"), F.expr("l.k = r.k AND l.at = r.at AND l.id < r.id"))
            .selectExpr("l.id AS a", "r.id AS b")
        ),
    ),
    "windows of a join": (
        "append",
        (),
        lambda one, other: near(one, other, "inner").groupBy(F.window("at", "10 seconds"), "k").count(),
    ),
    "windows of an outer join": (
        "append",
        (),
        lambda one, other: (
            near(one, other, "left_outer")
            .groupBy(F.window("at", "10 seconds"))
            .agg(F.count("*").alias("c"), F.count("id2").alias("d"))
        ),
    ),
    "distinct rows of a join": (
        "append",
        (),
        lambda one, other: near(one, other, "inner").dropDuplicates(["id", "at"]).select("id", "at"),
    ),
    "join of aggregations": (
        "append",
        (),
        lambda one, other: (
            marked(one)
            .groupBy(_WINDOW)
            .count()
            .join(marked(other).groupBy(_WINDOW).agg(F.sum("n").alias("s")), "window", "left_outer")
        ),
    ),
    "join of joins": (
        "append",
        (),
        lambda one, other: near(one, other, "inner").join(
            marked(one).selectExpr("id AS id3", "k AS k3", "at AS at3"),
            F.expr("k = k3 AND at3 BETWEEN at AND at + INTERVAL 3 SECONDS"),
            "left_outer",
        ),
    ),
    "join of SQL": (
        "append",
        (),
        lambda one, other: _view(marked(one), "one_m", renamed(marked(other)), "two_m").sql(
            f"SELECT id, id2 FROM ({_OF_TWO})"
        ),
    ),
    "limit": ("append", (), lambda one, _: one.select("k").where("k = 'a'").limit(2)),
    "sorted stream": ("append", (), lambda one, _: one.orderBy("id")),
    "windows without watermark": ("append", (), lambda one, _: one.groupBy(_WINDOW).count()),
    "exploded windows": (
        "append",
        (),
        lambda one, _: marked(one).select("at", F.explode_outer("arr").alias("e")).groupBy(_WINDOW, "e").count(),
    ),
    "lateral column aliases": ("append", (), lambda one, _: one.selectExpr("n + 1 AS m", "m * 2 AS mm", "id")),
    "lateral view": ("append", (), sql("SELECT id, e FROM one LATERAL VIEW OUTER explode(arr) t AS e")),
    "lateral explode": ("append", (), sql("SELECT id, e FROM one, LATERAL explode(arr) AS t(e)")),
    "lateral subquery": ("append", (), sql("SELECT id, d FROM one, LATERAL (SELECT n * 2 AS d)")),
    "values of a common table": (
        "append",
        (),
        sql("WITH c AS (SELECT id, n FROM one WHERE n > 1) SELECT id, n FROM c UNION ALL SELECT id, -n FROM c"),
    ),
    "piped SQL": ("append", (), sql("FROM one |> WHERE n > 1 |> EXTEND n * 2 AS d |> SELECT id, d")),
}

OPTIONS: dict[str, dict[str, str]] = {
    "windows of a union, latest watermark": {"spark.sql.streaming.multipleWatermarkPolicy": "max"},
    "windows of days in a zone": {"spark.sql.session.timeZone": "America/New_York"},
    "aggregation of an aggregation update": {},
}
"""Options of the session that a program sets first."""


def _view(frame: DataFrame, name: str = "m", other: DataFrame | None = None, second: str = "") -> SparkSession:
    frame.createOrReplaceTempView(name)
    if other is not None:
        other.createOrReplaceTempView(second)
    return frame.sparkSession
