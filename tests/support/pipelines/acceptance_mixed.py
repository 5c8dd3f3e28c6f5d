"""Programs that combine what the other modules have one at a time, as people write them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as F
from pyspark.sql.streaming.state import GroupState

from tests.support.pipelines.acceptance import pipeline, program
from tests.support.pipelines.acceptance_aggregations import PAIRS, seconds, timed
from tests.support.pipelines.acceptance_joins import RANGED, RANGES, of_ranges
from tests.support.pipelines.acceptance_processors import ROCKSDB, Processor

__all__ = ["pipeline"]

EVENTS = ([("a", 1), ("b", 2), ("a", 12)], [("b", 14), ("a", 15)], [("c", 33), ("a", 30)], [("b", 80)], [("a", 120)])
WITHIN = "l = r AND rt BETWEEN lt AND lt + INTERVAL 5 SECONDS"


@program("append", schemas=PAIRS, rows=EVENTS)
def sessions_of_rows_without_duplicates(rows: DataFrame) -> DataFrame:
    once = timed(rows).dropDuplicatesWithinWatermark(["k", "v"])
    sessions = once.groupBy(F.session_window("t", "10 seconds").alias("s"), "k")
    return sessions.agg(F.min("v").alias("low"), F.max("v").alias("high")).selectExpr("k", *seconds("s"), "low", "high")


@program("append", schemas=PAIRS, rows=EVENTS)
def sliding_windows_with_a_start_time(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "20 seconds", "10 seconds", "3 seconds"), "k")
    made = windows.agg(F.max_by("v", "t").alias("latest"), F.sort_array(F.collect_set("v")).alias("vs"))
    return made.selectExpr("k", *seconds(), "latest", "vs")


@program("update", schemas=PAIRS, rows=EVENTS)
def windows_with_a_condition_behind_them(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "20 seconds"), "k").agg(F.sum("v").alias("s"), F.count("*").alias("n"))
    return windows.where("s > 10 OR n > 1").selectExpr("k", *seconds(), "s", "n")


@program("append", schemas=PAIRS, rows=EVENTS)
def windows_of_times_in_texts(rows: DataFrame) -> DataFrame:
    texts = rows.selectExpr("k", "concat('2026-01-01 00:', lpad(v div 60, 2, '0'), ':', lpad(v % 60, 2, '0')) AS at")
    times = texts.withColumn("t", F.to_timestamp("at", "yyyy-MM-dd HH:mm:ss")).withWatermark("t", "5 seconds")
    windows = times.groupBy(F.window("t", "10 seconds")).agg(F.approx_count_distinct("k").alias("ks"))
    return windows.select(F.date_format("window.end", "HH:mm:ss").alias("end"), "ks")


program("append", schemas=PAIRS, rows=EVENTS)(
    windows_and_the_rollup_of_a_key=lambda rows: (
        timed(rows).rollup(F.window("t", "20 seconds"), "k").count().where("window IS NOT NULL")
    ),
    delay_of_zero_and_rows_at_the_watermark=lambda rows: (
        timed(rows, "0 seconds").groupBy(F.window("t", "1 second"), "k").count().selectExpr("k", *seconds(), "count")
    ),
    intervals_as_texts=lambda rows: rows.selectExpr(
        "cast(timestamp_seconds(v) - timestamp_seconds(13.25) AS STRING) AS second",
        "cast(make_dt_interval(v % 3, -v, 5, v / 7) AS STRING) AS made",
        "cast(make_ym_interval(v % 5, -v) AS STRING) AS months",
        "cast(INTERVAL '1 02' DAY TO HOUR * v AS STRING) AS product",
        "cast(struct(timestamp_seconds(v) - timestamp_seconds(90000) AS i, v) AS STRING) AS inside",
    ),
)


@program("append", schemas=PAIRS, rows=EVENTS)
def windows_of_exploded_arrays(rows: DataFrame) -> DataFrame:
    many = timed(rows).select("t", F.explode(F.sequence(F.lit(1), F.col("v") % 3 + 1)).alias("e"))
    return many.groupBy(F.window("t", "20 seconds"), "e").count().selectExpr(*seconds(), "e", "count")


@program("append", schemas=PAIRS, rows=EVENTS)
def windows_of_frames_that_a_function_has_made(rows: DataFrame) -> DataFrame:
    def doubled(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            yield pd.DataFrame({"k": frame["k"].str.upper(), "v": frame["v"] * 2})

    made = timed(rows.mapInPandas(doubled, "k STRING, v LONG"))
    return made.groupBy(F.window("t", "20 seconds"), "k").agg(F.avg("v").alias("a")).selectExpr("k", *seconds(), "a")


@program("append", schemas=PAIRS, rows=EVENTS)
def windows_of_decimals_and_dates(rows: DataFrame) -> DataFrame:
    typed = timed(rows).selectExpr("t", "cast(v AS DECIMAL(10, 2)) AS d", "date_add(DATE'2026-01-01', v) AS day")
    windows = typed.groupBy(F.window("t", "20 seconds")).agg(
        F.sum("d").alias("s"),
        F.avg("d").alias("a"),
        F.max("day").alias("latest"),
    )
    return windows.selectExpr(*seconds(), "s", "a", "latest")


@program("append", schemas=RANGES, **RANGED)
def windows_of_a_left_join(left: DataFrame, right: DataFrame) -> DataFrame:
    one = left.selectExpr("l", "timestamp_seconds(lv) AS lt").withWatermark("lt", "10 seconds")
    other = right.selectExpr("r", "timestamp_seconds(rv) AS rt").withWatermark("rt", "10 seconds")
    joined = one.join(other, F.expr(WITHIN), "left")
    return (
        joined.groupBy(F.window("lt", "10 seconds"))
        .agg(F.count("r").alias("matched"), F.count("*").alias("n"))
        .selectExpr(*seconds(), "matched", "n")
    )


program("append", schemas=RANGES, **RANGED)(
    duplicates_of_a_right_join=lambda left, right: of_ranges(left, right, WITHIN, "right_outer").dropDuplicates(
        ["r", "rv"]
    ),
    left_join_by_two_keys_and_a_comparison=lambda left, right: of_ranges(
        left, right, f"{WITHIN} AND lv % 2 = rv % 2 AND lv < rv", "left_outer"
    ),
)


@program("append", schemas=RANGES, **RANGED)
def windows_of_a_semi_join(left: DataFrame, right: DataFrame) -> DataFrame:
    one = left.selectExpr("l", "timestamp_seconds(lv) AS lt").withWatermark("lt", "10 seconds")
    other = right.selectExpr("r", "timestamp_seconds(rv) AS rt").withWatermark("rt", "10 seconds")
    joined = one.join(other, F.expr(WITHIN), "left_semi")
    return joined.groupBy(F.window("lt", "10 seconds")).count().selectExpr(*seconds(), "count")


@program("append", schemas=RANGES, **RANGED)
def full_join_by_a_computed_key(left: DataFrame, right: DataFrame) -> DataFrame:
    condition = "l * 2 = r + r AND rt BETWEEN lt - INTERVAL 2 SECONDS AND lt + INTERVAL 5 SECONDS"
    return of_ranges(left, right, condition, "full_outer")


@program("append", schemas=RANGES, **RANGED)
def joined_streams_and_a_table_in_windows(left: DataFrame, right: DataFrame) -> DataFrame:
    names = left.sparkSession.createDataFrame([(1, "one"), (4, "four")], "id INT, name STRING")
    one = left.selectExpr("l", "timestamp_seconds(lv) AS lt").withWatermark("lt", "10 seconds")
    other = right.selectExpr("r", "timestamp_seconds(rv) AS rt").withWatermark("rt", "10 seconds")
    joined = one.join(other, F.expr(WITHIN)).join(names, F.col("l") == F.col("id"), "left")
    return joined.groupBy(F.window("lt", "10 seconds"), "name").count().selectExpr("name", *seconds(), "count")


@program("append", schemas=RANGES, **RANGED)
def duplicates_on_both_sides_of_an_outer_join(left: DataFrame, right: DataFrame) -> DataFrame:
    one = (
        left.selectExpr("l", "timestamp_seconds(lv) AS lt")
        .withWatermark("lt", "10 seconds")
        .dropDuplicates(["l", "lt"])
    )
    other = right.selectExpr("r", "timestamp_seconds(rv) AS rt").withWatermark("rt", "10 seconds")
    other = other.dropDuplicatesWithinWatermark(["r"])
    return one.join(other, F.expr(WITHIN), "left").selectExpr("l", "cast(lt AS long) AS lt", "cast(rt AS long) AS rt")


@program("append", schemas=PAIRS, rows=EVENTS)
def windows_joined_with_their_rows(rows: DataFrame) -> DataFrame:
    frame = timed(rows)
    totals = frame.groupBy(F.window("t", "20 seconds"), "k").agg(F.sum("v").alias("s"))
    return totals.join(frame.select("k", F.window("t", "20 seconds"), "v"), ["k", "window"]).selectExpr(
        "k", *seconds(), "s", "v"
    )


@program("complete", schemas=PAIRS, rows=EVENTS)
def greatest_totals_of_all_windows(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "20 seconds"), "k").agg(F.sum("v").alias("s"))
    return windows.selectExpr("k", *seconds(), "s").orderBy(F.desc("s"), "k").limit(3)


@program("update", schemas=PAIRS, rows=EVENTS)
def counts_of_documents_in_json(rows: DataFrame) -> DataFrame:
    texts = rows.select(
        F.to_json(F.struct("k", F.struct("v", F.array("v", "v").alias("vs")).alias("in"))).alias("value")
    )
    parsed = texts.select(F.from_json("value", "k STRING, in STRUCT<v INT, vs ARRAY<INT>>").alias("d")).select("d.*")
    summed = parsed.withColumn("s", F.aggregate("in.vs", F.lit(0), lambda total, v: total + v))
    return summed.groupBy("k").agg(F.sum("s").alias("s"), F.max("in").alias("greatest"))


program("update", schemas=PAIRS, rows=EVENTS)(
    lists_ordered_by_another_column=lambda rows: rows.groupBy("k").agg(
        F.expr("listagg(cast(v AS STRING), ',') WITHIN GROUP (ORDER BY v % 10 DESC, v)").alias("vs")
    ),
    percentiles_with_frequencies=lambda rows: rows.groupBy("k").agg(
        F.expr("percentile(v, array(0.25, 0.5), v % 4)").alias("p"), F.percentile("v", 0.5, F.col("v") % 3).alias("q")
    ),
    aggregates_by_a_dictionary=lambda rows: (
        rows.groupBy("k").agg({"v": "max", "*": "count"}).withColumnRenamed("count(1)", "n")
    ),
)


@program("append", schemas=PAIRS, rows=EVENTS)
def group_by_all_in_sql(rows: DataFrame) -> DataFrame:
    timed(rows).createOrReplaceTempView("all_rows")
    return rows.sparkSession.sql(
        "SELECT k, cast(window.start AS long) AS start, count(*) AS n, any_value(v) IS NOT NULL AS some "
        "FROM all_rows GROUP BY k, window(t, '20 seconds') HAVING count(*) > 0"
    )


@program("update", schemas=PAIRS, rows=EVENTS)
def conditional_aggregates_in_sql(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("some_rows")
    return rows.sparkSession.sql(
        "SELECT k, sum(CASE WHEN v > 13 THEN 1 ELSE 0 END) AS many, count_if(v % 2 = 0) AS even, "
        "max(v) FILTER (WHERE v < 100) AS below, round(avg(v), 2) AS mean, "
        "min_by(v, -v) AS top FROM some_rows GROUP BY k"
    )


class Alarms(Processor):
    """A timer that sets the next one when it fires, until three have fired."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if not self.state.exists():
                self.state.update((0,))
                self.handle.registerTimer(1000 * (row.v + 5))
        yield Row(k=key[0], n=-timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        fired = self.number() + 1
        self.state.update((fired,))
        if fired < 3:
            self.handle.registerTimer(expiredTimerInfo.getExpiryTimeInMs() + 40_000)
        yield Row(k=key[0], n=expiredTimerInfo.getExpiryTimeInMs())


program("update", schemas=PAIRS, rows=EVENTS, settings=ROCKSDB)(
    timers_that_set_the_next_timer=lambda rows: (
        timed(rows).groupBy("k").transformWithState(Alarms(), "k STRING, n LONG", "Update", "EventTime")
    )
)


class Waiting(Processor):
    """Has a timer from its initial state."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.state.update((self.number() + sum(row.v for row in rows),))
        return iter(())

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.state.update((initialState.n,))
        self.handle.registerTimer(1000 * initialState.n)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=self.number())
        self.state.clear()


@program("append", schemas=PAIRS, rows=EVENTS, settings=ROCKSDB)
def timers_of_an_initial_state(rows: DataFrame) -> DataFrame:
    initial = rows.sparkSession.createDataFrame([("a", 13), ("z", 40)], "k STRING, n LONG").groupBy("k")
    grouped = timed(rows).groupBy("k")
    return grouped.transformWithState(Waiting(), "k STRING, n LONG", "Append", "EventTime", initialState=initial)


class Basket(Processor):
    """A list, a map and a value of one key that are read, replaced and cleared."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.items = handle.getListState("items", "v INT, at TIMESTAMP")
        self.places = handle.getMapState("places", "m INT", "vs ARRAY<INT>, n INT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.items.appendValue((row.v, row.t))
            known = self.places.getValue((row.v % 3,)) if self.places.containsKey((row.v % 3,)) else ([], 0)
            self.places.updateValue((row.v % 3,), ([*known[0], row.v], known[1] + 1))
        items = [item[0] for item in self.items.get()]
        if len(items) > 2:
            self.items.clear()
            self.places.removeKey((items[0] % 3,))
        reported = sorted((place[0], list(held[0]), held[1]) for place, held in self.places.iterator())
        yield Row(k=key[0], n=len(items), reported=str(reported))


program("update", schemas=PAIRS, rows=EVENTS, settings=ROCKSDB)(
    processor_with_three_kinds_of_state=lambda rows: (
        timed(rows).groupBy("k").transformWithState(Basket(), "k STRING, n INT, reported STRING", "Update", "None")
    )
)


class Totals(Processor):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.state.update((self.number() + sum(1 for _ in rows),))
        yield Row(k=key[0], n=self.number())


@program("append", schemas=PAIRS, rows=EVENTS, settings=ROCKSDB)
def processor_behind_duplicates_within_a_watermark(rows: DataFrame) -> DataFrame:
    once = timed(rows).dropDuplicatesWithinWatermark(["k"])
    return once.groupBy("k").transformWithState(Totals(), "k STRING, n LONG", "Append", "None")


def tracking(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Keeps a number, a text and a time; a timeout starts the key again."""
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "vs": [[-1]], "watermark": [state.getCurrentWatermarkMs()]})
        return
    values = [int(v) for frame in frames for v in frame["v"]]
    known, text, _ = state.getOption or (0, "", None)
    state.update((known + len(values), f"{text}{len(values)}", pd.Timestamp("2026-01-01")))
    state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 80_000)
    yield pd.DataFrame({"k": [key[0]], "vs": [[*values, known]], "watermark": [state.getCurrentWatermarkMs()]})


@program("update", schemas=PAIRS, rows=EVENTS)
def function_with_several_states_and_timeouts(rows: DataFrame) -> DataFrame:
    state, result = "n LONG, counts STRING, at TIMESTAMP", "k STRING, vs ARRAY<INT>, watermark LONG"
    return timed(rows).groupBy("k").applyInPandasWithState(tracking, result, state, "update", "EventTimeTimeout")


def emitting(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    for frame in frames:
        n = (state.get[0] if state.exists else 0) + len(frame)
        state.update((n,))
        yield pd.DataFrame({"k": [key[0]] * len(frame), "t": frame["t"], "n": [n] * len(frame)})


@program("append", schemas=PAIRS, rows=EVENTS)
def windows_behind_a_function_with_state(rows: DataFrame) -> DataFrame:
    numbered = (
        timed(rows)
        .groupBy("k")
        .applyInPandasWithState(emitting, "k STRING, t TIMESTAMP, n LONG", "n LONG", "append", "NoTimeout")
    )
    return (
        numbered.groupBy(F.window("t", "20 seconds"), "k").agg(F.max("n").alias("n")).selectExpr("k", *seconds(), "n")
    )


program(
    "append", schemas={**PAIRS, "others": "k STRING, v INT"}, rows=EVENTS, others=([("a", 3)], [("z", 20)], [("a", 90)])
)(
    duplicates_of_a_union_with_two_delays=lambda rows, others: (
        timed(rows).union(timed(others, "30 seconds")).dropDuplicates(["k", "t"]).select("k", "v")
    )
)


@program(
    "append",
    schemas={**PAIRS, "others": "k STRING, v INT"},
    rows=EVENTS,
    others=([("a", 3)], [("z", 20)], [("a", 90)]),
)
def sessions_of_a_union(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows.withColumn("of", F.lit("rows")).unionByName(others.withColumn("of", F.lit("others"))))
    sessions = both.groupBy(F.session_window("t", "8 seconds").alias("s"), "k")
    return sessions.agg(F.sort_array(F.collect_list("of")).alias("of"), F.count("*").alias("n")).selectExpr(
        "k", *seconds("s"), "of", "n"
    )


@program("append", schemas=PAIRS, rows=EVENTS)
def sessions_joined_with_windows(rows: DataFrame) -> DataFrame:
    frame = timed(rows)
    sessions = frame.groupBy(F.session_window("t", "10 seconds"), "k").count()
    return (
        sessions.groupBy(F.window(F.window_time("session_window"), "40 seconds"))
        .agg(F.sum("count").alias("n"))
        .selectExpr(*seconds(), "n")
    )


# Calls that many programs make


program("append", schemas=PAIRS, rows=EVENTS)(
    sets_of_groupings_with_sessions_in_each=lambda rows: (
        timed(rows)
        .groupingSets([["session_window", "k"], ["session_window"]], F.session_window("t", "10 seconds"), "k")
        .count()
        .selectExpr("k", *seconds("session_window"), "count")
    ),
    rollup_of_sessions=lambda rows: timed(rows).rollup(F.session_window("t", "10 seconds"), "k").count(),
)


@program("append", schemas=PAIRS, rows=EVENTS)
def renamed_and_replaced_columns(rows: DataFrame) -> DataFrame:
    frame = rows.withColumns({"w": F.col("v") * 2, "k2": F.concat_ws("-", "k", "v")}).withColumnsRenamed({"k2": "name"})
    frame = frame.transform(lambda each: each.where(each["w"] > 4)).toDF("k", "v", "w", "name")
    return frame.na.replace({"a": "A"}, subset=["k"]).withColumn("s", F.struct("k", "v")).select("s.*", "w", "name")


program(
    "append",
    schemas={"rows": "k STRING, v INT, x DOUBLE"},
    rows=([("a", 1, None), (None, 2, 0.5)], [("b", None, 1.5), (None, None, None)]),
)(
    filled_and_dropped_nulls=lambda rows: (
        rows.dropna(thresh=1, subset=["k", "v", "x"]).fillna({"k": "none", "v": -1}).na.fill(0.25, ["x"])
    )
)


@program("append", schemas=PAIRS, rows=EVENTS)
def arrays_and_maps_of_rows(rows: DataFrame) -> DataFrame:
    arrays = rows.withColumn("vs", F.array(*[F.col("v") % each for each in (3, 5, 7)]))
    return arrays.select(
        F.transform("vs", lambda each, at: each * 10 + at).alias("t"),
        F.filter("vs", lambda each: each > 1).alias("f"),
        F.array_sort("vs", lambda one, other: other - one).alias("sorted"),
        F.map_filter(
            F.map_from_arrays(F.array("v", F.col("v") + 1), F.array_repeat("k", 2)), lambda _, value: value != "c"
        ).alias("m"),
        F.aggregate("vs", F.lit(0), lambda total, each: total + each, lambda total: total * 2).alias("total"),
        F.zip_with("vs", F.reverse("vs"), lambda one, other: one + other).alias("z"),
    ).where(F.map_keys("m").isNotNull())


@program("append", schemas=PAIRS, rows=EVENTS, settings={"spark.sql.session.timeZone": "America/New_York"})
def parts_of_times_in_a_zone(rows: DataFrame) -> DataFrame:
    at = F.timestamp_seconds(F.col("v") * 400_000 + 1_700_000_000)
    return rows.select(
        "k",
        F.date_format(at, "yyyy-MM-dd'T'HH:mm EEE").alias("text"),
        F.date_trunc("week", at).cast("string").alias("week"),
        F.dayofyear(at).alias("day"),
        F.months_between(at, F.lit("2024-01-31").cast("timestamp")).alias("months"),
        F.to_utc_timestamp(at, "Asia/Tokyo").cast("long").alias("utc"),
        F.datediff(at, F.to_date(F.lit("2023-11-05"))).alias("days"),
    )


@program("append", schemas=PAIRS, rows=EVENTS)
def hashes_and_patterns_of_texts(rows: DataFrame) -> DataFrame:
    text = F.concat("k", F.lit(":"), F.lpad(F.col("v").cast("string"), 4, "0"))
    return rows.select(
        F.sha2(text, 256).alias("sha"),
        F.xxhash64(text, "v").alias("xx"),
        F.base64(F.encode(text, "utf-8")).alias("b"),
        F.regexp_extract(text, r"(\w):0*(\d+)", 2).alias("number"),
        F.split(text, "[:0]+", 2).alias("parts"),
        F.conv(F.col("v").cast("string"), 10, 2).alias("bits"),
        F.format_string("%s=%05d", "k", "v").alias("f"),
    )


@program("append", schemas=PAIRS, rows=EVENTS)
def joins_with_two_tables(rows: DataFrame) -> DataFrame:
    spark = rows.sparkSession
    names = spark.createDataFrame([("a", "Anna"), ("b", None), (None, "Nobody")], "id STRING, name STRING")
    ranges = spark.createDataFrame(
        [(0, 10, "low"), (10, 30, "middle"), (25, 100, "high")], "f INT, t INT, level STRING"
    )
    named = rows.join(F.broadcast(names), rows["k"].eqNullSafe(names["id"]), "left")
    return named.join(ranges, (F.col("v") >= F.col("f")) & (F.col("v") < F.col("t")), "left").select(
        "k", "v", "name", "level"
    )


@program("append", schemas=PAIRS, rows=EVENTS)
def rows_that_a_table_lacks(rows: DataFrame) -> DataFrame:
    known = rows.sparkSession.range(0, 20).selectExpr("cast(id AS INT) AS v", "'a' AS k")
    return rows.join(known, ["k", "v"], "left_anti").join(known.select("v"), "v", "left_semi").select("k", "v")


@program("update", schemas=PAIRS, rows=EVENTS)
def groups_by_what_functions_compute(rows: DataFrame) -> DataFrame:
    @F.udf("struct<size: string, odd: boolean>")
    def sized(v: int) -> Any:
        return ("small" if v < 15 else "large", v % 2 == 1)

    @F.pandas_udf("double")
    def halved(vs: Iterator[pd.Series]) -> Iterator[pd.Series]:
        for each in vs:
            yield each / 2

    frame = rows.withColumn("s", sized("v")).withColumn("h", halved("v"))
    return frame.groupBy("k", F.col("s.size").alias("size")).agg(F.sum("h").alias("h"), F.max("s.odd").alias("odd"))


program("complete", schemas=PAIRS, rows=EVENTS)(
    averages_without_keys=lambda rows: rows.groupBy().agg(
        F.avg("v").alias("a"), F.median("v").alias("m"), F.mode("k").alias("k"), F.stddev("v").alias("s")
    )
)


@program("complete", schemas=PAIRS, rows=EVENTS)
def cube_with_the_number_of_its_grouping(rows: DataFrame) -> DataFrame:
    parity = F.when(F.col("v") % 2 == 0, "even").otherwise("odd").alias("parity")
    return rows.select("k", "v", parity).cube("k", "parity").agg(F.sum("v").alias("s"), F.grouping_id().alias("g"))


program(
    "update",
    schemas={"rows": "k STRING, v INT, x DOUBLE"},
    rows=([("a", 1, None), ("a", 2, 0.5)], [("a", None, 1.5), ("b", None, None)], [("b", 9, 3.5)]),
)(
    firsts_lasts_and_lists_with_nulls=lambda rows: rows.groupBy("k").agg(
        F.first("v", ignorenulls=True).alias("f"),
        F.last("v").alias("l"),
        F.last("x", ignorenulls=True).alias("lx"),
        F.collect_list("v").alias("vs"),
        F.max_by(F.struct("v", "x"), F.coalesce("x", F.lit(-1.0))).alias("most"),
        F.array_agg("x").alias("xs"),
        F.count_if(F.col("x").isNull()).alias("none"),
    )
)


@program("append", schemas=RANGES, **RANGED)
def outer_join_in_sql_with_a_range_of_time(left: DataFrame, right: DataFrame) -> DataFrame:
    left.selectExpr("l", "timestamp_seconds(lv) AS lt").withWatermark("lt", "10 seconds").createOrReplaceTempView(
        "clicks"
    )
    right.selectExpr("r", "timestamp_seconds(rv) AS rt").withWatermark("rt", "10 seconds").createOrReplaceTempView(
        "buys"
    )
    return left.sparkSession.sql(
        "WITH c AS (SELECT * FROM clicks WHERE l > 0) SELECT l, cast(lt AS long) AS lt, r, cast(rt AS long) AS rt "
        "FROM c LEFT JOIN buys ON l = r AND rt BETWEEN lt AND lt + INTERVAL 5 SECONDS"
    )


@program("append", schemas=PAIRS, rows=EVENTS)
def batches_of_arrow_in_windows(rows: DataFrame) -> DataFrame:
    def even(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            yield batch.filter([value % 2 == 0 for value in batch.column("v").to_pylist()])

    made = timed(rows.mapInArrow(even, "k STRING, v INT"))
    return (
        made.groupBy(F.window("t", "20 seconds"))
        .agg(F.collect_set("k").alias("ks"))
        .selectExpr(*seconds(), "array_sort(ks) AS ks")
    )


@program("append", schemas=PAIRS, rows=EVENTS)
def subqueries_over_tables_in_sql(rows: DataFrame) -> DataFrame:
    spark = rows.sparkSession
    spark.createDataFrame([("a", 12), ("b", 50)], "k STRING, most INT").createOrReplaceTempView("limits_of_keys")
    rows.createOrReplaceTempView("limited_rows")
    return spark.sql(
        "SELECT k, v, CASE WHEN v > (SELECT avg(most) FROM limits_of_keys) THEN 'above' ELSE 'below' END AS side "
        "FROM limited_rows WHERE k IN (SELECT k FROM limits_of_keys) "
        "AND NOT EXISTS (SELECT 1 FROM limits_of_keys l WHERE l.most = v)"
    )


class Ended(Processor):
    """Sets a timer for each row, and keeps a map."""

    def init(self, handle: Any) -> None:
        super().init(handle)
        self.handle = handle
        self.seen = handle.getMapState("seen", "v INT", "n INT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            place = (row.v % 4,)
            self.seen.updateValue(place, ((self.seen.getValue(place)[0] if self.seen.containsKey(place) else 0) + 1,))
            self.handle.registerTimer(1000 * (row.v + 3))
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], at=expiredTimerInfo.getExpiryTimeInMs(), places=len(list(self.seen.keys())) > 0)


program("append", schemas=PAIRS, rows=EVENTS, settings=ROCKSDB)(
    several_timers_of_a_key=lambda rows: (
        timed(rows).groupBy("k").transformWithState(Ended(), "k STRING, at LONG, places BOOLEAN", "Append", "EventTime")
    )
)


class PandasTotals(Processor):
    """Totals of frames by two keys."""

    def handleInputRows(self, key: Any, rows: Iterator[pd.DataFrame], timerValues: Any) -> Iterator[pd.DataFrame]:
        n = self.number() + sum(int(frame["v"].sum()) for frame in rows)
        self.state.update((n,))
        yield pd.DataFrame({"k": [key[0]], "parity": [key[1]], "n": [n], "at": [pd.Timestamp("2026-01-01")]})


@program("update", schemas=PAIRS, rows=EVENTS, settings=ROCKSDB)
def processor_of_frames_by_a_computed_key(rows: DataFrame) -> DataFrame:
    keyed = rows.withColumn("parity", F.col("v") % 2)
    grouped = keyed.groupBy("k", "parity")
    totals = "k STRING, parity INT, n LONG, at TIMESTAMP"
    return grouped.transformWithStateInPandas(PandasTotals(), totals, "Update", "None")
