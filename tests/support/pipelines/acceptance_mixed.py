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


@program("update", keys="k start", schemas=PAIRS, rows=EVENTS)
def windows_with_a_condition_behind_them(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "20 seconds"), "k").agg(F.sum("v").alias("s"), F.count("*").alias("n"))
    return windows.where("s > 10 OR n > 1").selectExpr("k", *seconds(), "s", "n")


@program("append", schemas=PAIRS, rows=EVENTS)
def windows_of_times_in_texts(rows: DataFrame) -> DataFrame:
    texts = rows.selectExpr("k", "concat('2026-01-01 00:', lpad(v div 60, 2, '0'), ':', lpad(v % 60, 2, '0')) AS at")
    times = texts.withColumn("t", F.to_timestamp("at", "yyyy-MM-dd HH:mm:ss")).withWatermark("t", "5 seconds")
    windows = times.groupBy(F.window("t", "10 seconds")).agg(F.approx_count_distinct("k").alias("ks"))
    return windows.select(F.date_format("window.end", "HH:mm:ss").alias("end"), "ks")


@program("append", schemas=PAIRS, rows=EVENTS)
def windows_and_the_rollup_of_a_key(rows: DataFrame) -> DataFrame:
    return timed(rows).rollup(F.window("t", "20 seconds"), "k").count().where("window IS NOT NULL")


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


@program("append", schemas=PAIRS, rows=EVENTS)
def delay_of_zero_and_rows_at_the_watermark(rows: DataFrame) -> DataFrame:
    return timed(rows, "0 seconds").groupBy(F.window("t", "1 second"), "k").count().selectExpr("k", *seconds(), "count")


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


@program("append", schemas=RANGES, **RANGED)
def duplicates_of_a_right_join(left: DataFrame, right: DataFrame) -> DataFrame:
    return of_ranges(left, right, WITHIN, "right_outer").dropDuplicates(["r", "rv"])


@program("append", schemas=RANGES, **RANGED)
def windows_of_a_semi_join(left: DataFrame, right: DataFrame) -> DataFrame:
    one = left.selectExpr("l", "timestamp_seconds(lv) AS lt").withWatermark("lt", "10 seconds")
    other = right.selectExpr("r", "timestamp_seconds(rv) AS rt").withWatermark("rt", "10 seconds")
    joined = one.join(other, F.expr(WITHIN), "left_semi")
    return joined.groupBy(F.window("lt", "10 seconds")).count().selectExpr(*seconds(), "count")


@program("append", schemas=RANGES, **RANGED)
def left_join_by_two_keys_and_a_comparison(left: DataFrame, right: DataFrame) -> DataFrame:
    return of_ranges(left, right, f"{WITHIN} AND lv % 2 = rv % 2 AND lv < rv", "left_outer")


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


@program("update", keys="k", schemas=PAIRS, rows=EVENTS)
def counts_of_documents_in_json(rows: DataFrame) -> DataFrame:
    texts = rows.select(
        F.to_json(F.struct("k", F.struct("v", F.array("v", "v").alias("vs")).alias("in"))).alias("value")
    )
    parsed = texts.select(F.from_json("value", "k STRING, in STRUCT<v INT, vs ARRAY<INT>>").alias("d")).select("d.*")
    summed = parsed.withColumn("s", F.aggregate("in.vs", F.lit(0), lambda total, v: total + v))
    return summed.groupBy("k").agg(F.sum("s").alias("s"), F.max("in").alias("greatest"))


@program("update", keys="k", schemas=PAIRS, rows=EVENTS)
def lists_ordered_by_another_column(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(
        F.expr("listagg(cast(v AS STRING), ',') WITHIN GROUP (ORDER BY v % 10 DESC, v)").alias("vs")
    )


@program("update", keys="k", schemas=PAIRS, rows=EVENTS)
def percentiles_with_frequencies(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(
        F.expr("percentile(v, array(0.25, 0.5), v % 4)").alias("p"), F.percentile("v", 0.5, F.col("v") % 3).alias("q")
    )


@program("append", schemas=PAIRS, rows=EVENTS)
def group_by_all_in_sql(rows: DataFrame) -> DataFrame:
    timed(rows).createOrReplaceTempView("all_rows")
    return rows.sparkSession.sql(
        "SELECT k, cast(window.start AS long) AS start, count(*) AS n, any_value(v) IS NOT NULL AS some "
        "FROM all_rows GROUP BY k, window(t, '20 seconds') HAVING count(*) > 0"
    )


@program("update", keys="k", schemas=PAIRS, rows=EVENTS)
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


@program("update", schemas=PAIRS, rows=EVENTS, keys="k n", settings=ROCKSDB)
def timers_that_set_the_next_timer(rows: DataFrame) -> DataFrame:
    return timed(rows).groupBy("k").transformWithState(Alarms(), "k STRING, n LONG", "Update", "EventTime")


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
        told = sorted((place[0], list(held[0]), held[1]) for place, held in self.places.iterator())
        yield Row(k=key[0], n=len(items), told=str(told))


@program("update", schemas=PAIRS, rows=EVENTS, keys="k n told", settings=ROCKSDB)
def processor_with_three_kinds_of_state(rows: DataFrame) -> DataFrame:
    return timed(rows).groupBy("k").transformWithState(Basket(), "k STRING, n INT, told STRING", "Update", "None")


class Totals(Processor):
    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        self.state.update((self.number() + sum(1 for _ in rows),))
        yield Row(k=key[0], n=self.number())


@program("append", schemas=PAIRS, rows=EVENTS, settings=ROCKSDB, differs="Spark forgets a key one micro-batch later.")
def processor_behind_duplicates_within_a_watermark(rows: DataFrame) -> DataFrame:
    once = timed(rows).dropDuplicatesWithinWatermark(["k"])
    return once.groupBy("k").transformWithState(Totals(), "k STRING, n LONG", "Append", "None")


def tracking(key: tuple[Any, ...], frames: Iterator[pd.DataFrame], state: GroupState) -> Iterator[pd.DataFrame]:
    """Keeps a number, a text and a time; a timeout starts the key anew."""
    if state.hasTimedOut:
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "vs": [[-1]], "watermark": [state.getCurrentWatermarkMs()]})
        return
    values = [int(v) for frame in frames for v in frame["v"]]
    known, text, _ = state.getOption or (0, "", None)
    state.update((known + len(values), f"{text}{len(values)}", pd.Timestamp("2026-01-01")))
    state.setTimeoutTimestamp(state.getCurrentWatermarkMs() + 80_000)
    yield pd.DataFrame({"k": [key[0]], "vs": [[*values, known]], "watermark": [state.getCurrentWatermarkMs()]})


@program("update", schemas=PAIRS, rows=EVENTS, keys="k vs watermark")
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


@program(
    "append", schemas={**PAIRS, "others": "k STRING, v INT"}, rows=EVENTS, others=([("a", 3)], [("z", 20)], [("a", 90)])
)
def duplicates_of_a_union_with_two_delays(rows: DataFrame, others: DataFrame) -> DataFrame:
    return timed(rows).union(timed(others, "30 seconds")).dropDuplicates(["k", "t"]).select("k", "v")


@program(
    "append",
    differs="The engine refuses it: it cannot know when a batch of two streams is complete.",
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
