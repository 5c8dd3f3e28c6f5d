"""Programs of aggregations and event time."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.support.pipelines.acceptance import pipeline, program

__all__ = ["pipeline"]

COUNTED = ([3, 2], [3], [1, 2, 3, None])
PAIRS = {"rows": "k STRING, v INT"}
PAIRED = ([("a", 10), ("a", 20), ("b", 1)], [("b", 2), ("c", 1), (None, 4)], [("a", None), ("c", 7)])
TIMES = ([10, 11, 12, 13, 14, 15], [25], [25, None], [10], [40])


def timed(rows: DataFrame, delay: str = "10 seconds") -> DataFrame:
    """The rows with ``v`` as event time ``t``."""
    return rows.withColumn("t", F.timestamp_seconds("v")).withWatermark("t", delay)


def seconds(window: str = "window") -> list[str]:
    return [f"cast({window}.start as long) AS start", f"cast({window}.end as long) AS end"]


program("update", suite=True, rows=COUNTED)(count_by_key_in_update_mode=lambda rows: rows.groupBy("v").count())

program("complete", rows=COUNTED)(
    count_by_key_in_complete_mode=lambda rows: rows.groupBy("v").agg(F.count("*").alias("n")),
    aggregation_of_an_aggregation_in_complete_mode=lambda rows: (
        rows.groupBy("v").count().groupBy("count").agg(F.count("*").alias("n"))
    ),
    last_value_changes_with_batches=lambda rows: rows.agg(
        F.last("v", ignorenulls=True).alias("last"), F.first("v").alias("first")
    ),
    coalesced_rows_are_counted=lambda rows: rows.coalesce(1).groupBy().count(),
    total_over_rows_that_are_filtered_out_in_complete_mode=lambda rows: rows.where("v > 100").agg(
        F.count("*").alias("n"), F.max("v").alias("m")
    ),
    keys_that_are_decimals_and_booleans=lambda rows: rows.groupBy(
        F.col("v").cast("decimal(12,3)").alias("d"), (F.col("v") > 1).alias("b")
    ).count(),
    keys_that_are_intervals=lambda rows: rows.groupBy(F.expr("make_dt_interval(0, 0, v)").alias("i")).count(),
    keys_that_are_null_constants=lambda rows: rows.groupBy(F.lit(None).alias("nothing")).count(),
    recent_rows_by_the_clock=lambda rows: (
        rows.where(F.timestamp_seconds("v") < F.current_timestamp()).groupBy("v").count()
    ),
    approximate_aggregates=lambda rows: rows.agg(
        F.approx_count_distinct("v").alias("n"), F.percentile_approx("v", 0.5).alias("p")
    ),
    complete_mode_without_an_aggregation=lambda rows: rows.select("v"),
    limit_behind_an_aggregation=lambda rows: rows.groupBy("v").count().orderBy("v").limit(2).select("count"),
    order_within_partitions_behind_an_aggregation=lambda rows: rows.groupBy("v").count().sortWithinPartitions("count"),
    offset_behind_an_aggregation=lambda rows: rows.groupBy("v").count().orderBy("v").offset(1),
)

program("append", rows=COUNTED)(
    aggregation_without_event_time_in_append_mode=lambda rows: rows.groupBy("v").count(),
    parameters_of_sql=lambda rows: rows.sparkSession.sql(
        "SELECT v + :more AS w FROM {rows} WHERE v > :least", rows=rows, args={"more": 5, "least": 1}
    ),
    sort_of_a_stream=lambda rows: rows.orderBy("v"),
    limit_of_a_stream=lambda rows: rows.where("v IS NOT NULL").select(F.lit(1).alias("one")).limit(4),
    offset_of_a_stream=lambda rows: rows.offset(1),
    intersection_of_streams=lambda rows: rows.intersect(rows),
    difference_of_streams=lambda rows: rows.exceptAll(rows),
    sample_of_a_stream=lambda rows: rows.sample(1.0, 3),
    union_of_a_stream_and_a_table=lambda rows: rows.union(
        rows.sparkSession.range(3).select(F.col("id").cast("int").alias("v"))
    ),
    filled_and_replaced_values=lambda rows: rows.fillna(0).replace(3, 33),
    rows_without_nulls=lambda rows: rows.dropna(),
    name_of_the_input_file=lambda rows: rows.select(
        "v", F.regexp_extract(F.input_file_name(), r"(\d)\.json$", 1).alias("file")
    ),
)

program("complete", rows=COUNTED, differs="The engine computes distinct aggregates, which Spark refuses on streams.")(
    count_distinct_in_complete_mode=lambda rows: rows.agg(
        F.count_distinct("v").alias("n"), F.sum_distinct("v").alias("s")
    )
)

program("update", schemas=PAIRS, rows=PAIRED)(
    several_aggregates_in_update_mode=lambda rows: rows.groupBy("k").agg(
        F.sum("v").alias("s"), F.avg("v").alias("a"), F.min("v").alias("l"), F.max("v")
    ),
    sorted_aggregation_in_update_mode=lambda rows: rows.groupBy("k").count().orderBy("count"),
)

program("complete", schemas=PAIRS, rows=PAIRED)(
    sorted_aggregation=lambda rows: rows.groupBy("k").agg(F.sum("v").alias("s")).orderBy(F.desc("s"), "k").limit(2),
    rollup_in_complete_mode=lambda rows: rows.rollup("k", "v").agg(F.count("*").alias("n"), F.grouping_id().alias("g")),
    pivot_of_a_stream=lambda rows: rows.groupBy("k").pivot("v", [1, 2]).count(),
    pivot_without_values=lambda rows: rows.groupBy("k").pivot("v").count(),
    collected_values=lambda rows: rows.groupBy("k").agg(
        F.sort_array(F.collect_list("v")).alias("list"), F.sort_array(F.collect_set("v")).alias("set")
    ),
    keys_that_are_structs=lambda rows: rows.groupBy(F.struct("k", F.struct("v")).alias("s")).count(),
    keys_that_are_arrays_of_structs=lambda rows: rows.groupBy(F.array(F.struct("k", "v")).alias("a")).count(),
    keys_that_are_maps=lambda rows: rows.groupBy(
        F.create_map(F.lit("x"), "k", F.lit("y"), F.lit("z")).alias("m")
    ).count(),
    extremes_of_texts_and_structs=lambda rows: rows.agg(
        F.min("k").alias("least"), F.max(F.struct("v", "k")).alias("most")
    ),
)

program("update", rows=COUNTED)(
    aggregation_of_an_aggregation_in_update_mode=lambda rows: (
        rows.groupBy("v").count().groupBy("count").agg(F.count("*").alias("n"))
    )
)

program("complete", schemas=PAIRS, rows=PAIRED)(
    aggregates_of_intervals_of_nothing_and_of_structs=lambda rows: (
        rows.withColumn("i", F.expr("make_dt_interval(0, v, 0, v / 7)"))
        .groupBy("k")
        .agg(
            *(F.expr(f"{name}(i)").alias(name) for name in ("sum", "avg", "try_avg", "median", "max")),
            F.expr("percentile(i, array(0.3, 0.9))").alias("p"),
            F.expr("percentile_approx(-i, 0.5)").alias("a"),
            *(F.expr(f"{name}(null)").alias(f"{name}_of_nothing") for name in ("min", "max", "mode", "first")),
            F.expr("mode(struct(v % 2 AS odd, array(k) AS ks), true)").alias("m"),
            F.expr("try_avg(cast('9e37' AS DECIMAL(38, 0)))").alias("exceeds"),
        )
    )
)


@program("complete", schemas=PAIRS, rows=PAIRED)
def totals_with_the_names_of_a_table(rows: DataFrame) -> DataFrame:
    names = rows.sparkSession.createDataFrame([("a", "x"), ("b", "y"), ("d", "z")], "k STRING, name STRING")
    return rows.groupBy("k").count().join(F.broadcast(names), "k", "left").orderBy("k").limit(3)


@program("complete", schemas=PAIRS, rows=PAIRED)
def totals_that_a_table_allows(rows: DataFrame) -> DataFrame:
    allowed = rows.sparkSession.createDataFrame([("a",), ("b",)], "k STRING")
    return rows.groupBy("k").agg(F.sum("v").alias("s")).join(allowed, "k", "left_semi").withColumn("t", F.col("s") + 1)


@program("update", rows=([1, 1, 2], [2, 3]), others=([11, 11, 12], [13]))
def union_of_distinct_values_in_update_mode(rows: DataFrame, others: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("ones")
    others.createOrReplaceTempView("tens")
    return rows.sparkSession.sql("SELECT DISTINCT v FROM ones UNION ALL SELECT DISTINCT v FROM tens")


program("complete", suite=True, rows=([],))(
    total_over_no_rows_in_complete_mode=lambda rows: rows.agg(F.count("*").alias("n"), F.sum("v").alias("s"))
)

program("update", rows=([],))(
    total_over_no_rows_in_update_mode=lambda rows: rows.agg(F.count("*").alias("n"), F.sum("v").alias("s"))
)

program("update", rows=COUNTED, differs="The engine emits a total of no rows once, Spark with each batch.")(
    total_over_rows_that_are_filtered_out_in_update_mode=lambda rows: rows.where("v > 100").agg(
        F.count("*").alias("n"), F.sum("v").alias("s")
    )
)

program("update", rows=COUNTED)(
    total_in_update_mode=lambda rows: rows.groupBy().agg(F.sum("v").alias("s"), F.count("v").alias("n")),
    limit_in_update_mode=lambda rows: rows.limit(2),
)


@program("complete", schemas=PAIRS, rows=PAIRED)
def having_behind_an_aggregation(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("having_rows")
    return rows.sparkSession.sql("SELECT k, sum(v) AS s FROM having_rows GROUP BY k HAVING count(*) > 1")


program("update", schemas=PAIRS, rows=PAIRED)(
    cube_in_update_mode=lambda rows: rows.cube("k", "v").agg(F.count("*").alias("n"), F.grouping_id().alias("g"))
)


@program("complete", schemas=PAIRS, rows=PAIRED)
def grouping_sets_in_sql(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("set_rows")
    return rows.sparkSession.sql("SELECT k, v, count(*) AS n FROM set_rows GROUP BY GROUPING SETS ((k), (v), ())")


program("update", schemas=PAIRS, rows=PAIRED)(
    keys_that_are_arrays=lambda rows: rows.groupBy(F.array("k", F.lit("x")).alias("a")).count()
)

program("complete", schemas={"rows": "a ARRAY<INT>, v INT"}, rows=([([1, 2], 1), (None, 2)], [([1, 2], 3), ([], 4)]))(
    keys_that_are_arrays_of_the_source=lambda rows: rows.groupBy("a").agg(F.sum("v").alias("s"))
)

program("complete", schemas={"rows": "d DOUBLE"}, rows=([0.0, -0.0, 1.5], [None, 0.0], [-0.0]))(
    keys_that_are_floats=lambda rows: rows.groupBy((F.col("d") * 1).alias("d")).count()
)

program("update", schemas={"rows": "d DOUBLE"}, rows=([-0.0, 0.0, 1.5], [None, 0.0], [-0.0]))(
    keys_that_are_floats_as_text=lambda rows: (
        rows.groupBy("d").count().select(F.col("d").cast("string").alias("d"), "count")
    )
)


@program("complete", rows=COUNTED)
def keys_that_are_dates_and_binaries(rows: DataFrame) -> DataFrame:
    day = F.date_add(F.lit("2026-01-01").cast("date"), F.col("v"))
    return rows.groupBy(day.alias("d"), F.col("v").cast("string").cast("binary").alias("b")).count()


program("update", rows=COUNTED)(
    expressions_over_aggregates=lambda rows: rows.groupBy((F.col("v") % 2).alias("odd")).agg(
        (F.sum("v") * 2 + F.count("*")).alias("x")
    )
)


@program("complete", rows=COUNTED, differs="The engine computes distinct aggregates, which Spark refuses on streams.")
def aggregates_with_filters(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("filter_rows")
    return rows.sparkSession.sql(
        "SELECT count(*) FILTER (WHERE v > 1) AS n, sum(DISTINCT v) FILTER (WHERE v < 3) AS s FROM filter_rows"
    )


@program("complete", rows=COUNTED)
def pipe_syntax(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("pipe_rows")
    return rows.sparkSession.sql(
        "FROM pipe_rows |> WHERE v IS NOT NULL |> EXTEND v % 2 AS odd |> AGGREGATE count(*) AS n GROUP BY odd"
    )


@program("append", rows=COUNTED)
def pipe_syntax_that_selects(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("piped")
    return rows.sparkSession.sql("FROM piped |> WHERE v > 1 |> SELECT v, v + 1 AS w |> SET w = w * 2 |> DROP v")


@program("append", rows=COUNTED)
def temporary_view_that_sql_creates(rows: DataFrame) -> DataFrame:
    spark = rows.sparkSession
    rows.createOrReplaceTempView("base_rows")
    spark.sql("CREATE OR REPLACE TEMPORARY VIEW big_rows AS SELECT v * 10 AS w FROM base_rows WHERE v > 1")
    return spark.table("big_rows")


@program("append", rows=COUNTED)
def temporary_view_that_sql_creates_twice(rows: DataFrame) -> DataFrame:
    spark = rows.sparkSession
    rows.createTempView("once_rows")
    spark.sql("CREATE TEMP VIEW first_rows AS SELECT v FROM once_rows WHERE v > 1")
    spark.sql("CREATE TEMP VIEW second_rows (w) AS SELECT v + 1 FROM first_rows")
    return spark.sql("SELECT w FROM second_rows")


@program("append", rows=COUNTED)
def common_table_expression(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("cte_rows")
    return rows.sparkSession.sql("WITH big AS (SELECT v FROM cte_rows WHERE v > 1) SELECT v, v * v AS s FROM big")


@program("complete", schemas=PAIRS, rows=([(k, v * v % 41) for v in range(40) for k in "ab"], [("c", None)]))
def histograms_of_numbers(rows: DataFrame) -> DataFrame:
    numbers = F.histogram_numeric("v", F.lit(5)), F.histogram_numeric(F.col("v") / 7, F.lit(4))
    return rows.groupBy("k").agg(numbers[0].alias("whole"), numbers[1].alias("parts"))


@program("complete", schemas=PAIRS, rows=PAIRED)
def statistics_of_groups(rows: DataFrame) -> DataFrame:
    return rows.groupBy("k").agg(
        F.round(F.stddev("v"), 6).alias("sd"), F.round(F.var_pop("v"), 6).alias("vp"), F.median("v").alias("m"),
        F.max_by("v", "v").alias("mb"), F.any_value("k").alias("any"), F.bit_xor("v").alias("x"),
    )  # fmt: skip


program("complete", schemas=PAIRS, rows=PAIRED, differs="The engine refuses it: the rows of an aggregation change.")(
    distinct_behind_an_aggregation_in_complete_mode=lambda rows: (
        rows.groupBy("k").agg(F.count("*").alias("n")).select("n").distinct()
    )
)

program("update", rows=([1, 2], [3]))(
    update_mode_without_an_aggregation=lambda rows: rows.selectExpr("v", "v * 2 AS w")
)


@program("append", rows=COUNTED)
def window_function_of_a_stream(rows: DataFrame) -> DataFrame:
    from pyspark.sql import Window

    return rows.select("v", F.row_number().over(Window.partitionBy("v").orderBy("v")).alias("n"))


program("append", rows=COUNTED, others=([7], [8, 9]))(union_of_streams=lambda rows, others: rows.union(others))


program(
    "append", schemas={"rows": "a INT, b STRING", "others": "b STRING, c INT"}, rows=([(1, "x")],), others=([("y", 2)],)
)(union_by_name_with_missing_columns=lambda rows, others: rows.unionByName(others, allowMissingColumns=True))


program("complete", rows=COUNTED, others=([7], [8, 2]))(
    union_of_streams_that_is_aggregated=lambda rows, others: rows.union(others).groupBy("v").count()
)

program("append", schemas=PAIRS, rows=PAIRED)(
    unpivoted_rows=lambda rows: rows.selectExpr("k", "v AS one", "v + 1 AS two").unpivot(
        "k", ["one", "two"], "name", "value"
    ),
    metadata_of_files=lambda rows: rows.select("k", "_metadata", F.col("_metadata.file_size") > 20),
)


# Event time


program("append", rows=TIMES)(
    tumbling_windows_in_append_mode=lambda rows: (
        timed(rows).groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n")).selectExpr(*seconds(), "n")
    )
)

program("update", rows=([10, 11, 12, 13, 14, 15], [25], [26], [10, 25], [27], [10]))(
    tumbling_windows_in_update_mode=lambda rows: (
        timed(rows).groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n")).selectExpr(*seconds(), "n")
    )
)

program("complete", rows=([10, 11, 12], [25], [25], [10], [25]))(
    tumbling_windows_in_complete_mode=lambda rows: (
        timed(rows).groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n")).selectExpr(*seconds(), "n")
    )
)


@program("append", rows=([10, 11, 12], [25], [31], [32], [10, 50]))
def sliding_windows_in_append_mode(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "10 seconds", "3 seconds", "1 second"))
    return windows.agg(F.sum("v").alias("s")).selectExpr(*seconds(), "s")


@program("append", rows=([-12, -3, 4], [9], [30]))
def windows_before_1970(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "7 seconds"))
    return windows.agg(F.count("*").alias("n")).selectExpr(*seconds(), "n")


program("append", rows=([10], [25]))(
    group_by_event_time_itself=lambda rows: (
        timed(rows).groupBy("t").agg(F.count("*").alias("n")).selectExpr("cast(t AS long) AS t", "n")
    )
)


@program("append", rows=([10, 11], [25], [26], [10], [40]))
def windows_and_another_key(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "5 seconds"), (F.col("v") % 2).alias("odd"))
    return windows.count().selectExpr(*seconds(), "odd", "count")


@program(
    "append", schemas=PAIRS, rows=([("a", 10), ("b", 11), ("a", 12), (None, 13)], [("c", 25), ("a", 26)], [("b", 90)])
)
def pivot_of_windows(rows: DataFrame) -> DataFrame:
    totals = (
        timed(rows).groupBy(F.window("t", "5 seconds")).pivot("k", ["a", "b"]).agg(F.sum("v").alias("s"), F.max("v"))
    )
    return totals.selectExpr(*seconds(), "a_s", "b_s", "`b_max(v)` AS b")


@program("append", rows=([10, 11, 12, None], [25, 27], [90]))
def pivot_of_windows_by_numbers_and_booleans(rows: DataFrame) -> DataFrame:
    keyed = timed(rows).select("t", (F.col("v") % 3).cast("long").alias("r"), (F.col("v") > 11).alias("above"))
    remainders = keyed.groupBy(F.window("t", "5 seconds"), "above").pivot("r", [0, 2]).count()
    above = keyed.groupBy(F.window("t", "5 seconds"), F.col("r") > 0).pivot("above", [True, False]).count()
    return remainders.union(above).toDF("w", "key", "one", "other").selectExpr(*seconds("w"), "key", "one", "other")


program("append", rows=([10], [25]), differs="The engine refuses it: it reads no constants of this type.")(
    pivot_of_windows_by_fractions=lambda rows: (
        timed(rows).withColumn("f", F.col("v") / 4).groupBy(F.window("t", "5 seconds")).pivot("f", [2.5]).count()
    )
)


program("append", rows=([10, 11], [25], [40]))(
    aggregation_by_a_key_that_is_no_event_time=lambda rows: timed(rows).groupBy("v").count(),
    window_of_a_column_without_a_watermark=lambda rows: (
        timed(rows).groupBy(F.window(F.timestamp_seconds("v"), "5 seconds")).count()
    ),
    watermark_in_months=lambda rows: (
        timed(rows, "1 month").groupBy(F.window("t", "5 seconds")).count().selectExpr(*seconds(), "count")
    ),
    windows_that_no_aggregation_reads=lambda rows: (
        timed(rows).select("v", F.window("t", "6 seconds", "2 seconds").alias("w")).selectExpr("v", *seconds("w"))
    ),
    rows_are_not_late_without_state=lambda rows: timed(rows, "0 seconds").select("v").where("v > 10"),
)

program("append", rows=([10, 11], [3_000_000], [6_000_000]))(
    watermark_in_months_and_days=lambda rows: (
        timed(rows, "1 month 2 days").groupBy(F.window("t", "5 seconds")).count().selectExpr(*seconds(), "count")
    )
)

program("append", rows=([10],))(
    negative_delay_of_a_watermark=lambda rows: timed(rows, "-10 seconds"),
    delay_that_is_no_interval=lambda rows: timed(rows, "soon"),
    watermark_of_a_number=lambda rows: rows.withWatermark("v", "10 seconds").groupBy("v").count(),
)


@program("append", rows=([10, 11], [25], [40]))
def second_watermark_of_one_stream(rows: DataFrame) -> DataFrame:
    twice = timed(rows, "1 second").withColumn("u", F.col("t")).withWatermark("u", "10 seconds")
    return twice.groupBy(F.window("u", "5 seconds")).count().selectExpr(*seconds(), "count")


@program("append", rows=([10, 11], [25], [40]))
def second_watermark_of_one_column(rows: DataFrame) -> DataFrame:
    twice = timed(rows, "1 second").withWatermark("t", "20 seconds")
    return twice.groupBy(F.window("t", "5 seconds")).count().selectExpr(*seconds(), "count")


@program("append", rows=([10, 11], [25], [40]), others=([12], [29], [41]))
def windows_of_a_union_with_two_watermarks(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows).select("v", "t").union(timed(others, "15 seconds").select("v", "t"))
    return both.groupBy(F.window("t", "5 seconds")).count().selectExpr(*seconds(), "count")


@program(
    "append",
    settings={"spark.sql.streaming.multipleWatermarkPolicy": "max"},
    rows=([10], [25]),
    others=([12], [29]),
)
def windows_of_a_union_with_the_greatest_watermark(rows: DataFrame, others: DataFrame) -> DataFrame:
    both = timed(rows).select("v", "t").union(timed(others, "15 seconds").select("v", "t"))
    return both.groupBy(F.window("t", "5 seconds")).count().selectExpr(*seconds(), "count")


@program("append", rows=([10, 11], [25], [40]), others=([12], [29], [41]))
def windows_of_a_union_of_which_one_has_a_watermark(rows: DataFrame, others: DataFrame) -> DataFrame:
    plain = others.withColumn("t", F.timestamp_seconds("v"))
    both = timed(rows).select("v", "t").union(plain.select("v", "t"))
    return both.groupBy(F.window("t", "5 seconds")).count().selectExpr(*seconds(), "count")


@program("append", rows=([10, 11], [25], [26], [10], [40]))
def watermark_on_a_renamed_column(rows: DataFrame) -> DataFrame:
    renamed = timed(rows).withColumnRenamed("t", "at")
    return renamed.groupBy(F.window("at", "5 seconds")).count().selectExpr(*seconds(), "count")


@program("append", rows=([10, 11], [25], [40]))
def watermark_on_a_field_of_a_struct(rows: DataFrame) -> DataFrame:
    nested = rows.select(F.struct(F.timestamp_seconds("v").alias("t")).alias("s")).withWatermark("s.t", "10 seconds")
    return nested.groupBy(F.window("s.t", "5 seconds")).count().selectExpr(*seconds(), "count")


@program("append", rows=([10, 11], [25], [40]))
def windows_of_times_without_a_zone(rows: DataFrame) -> DataFrame:
    local = rows.withColumn("t", F.timestamp_seconds("v").cast("timestamp_ntz")).withWatermark("t", "10 seconds")
    return local.groupBy(F.window("t", "5 seconds")).count().selectExpr("window.start", "count")


@program("append", rows=([10, 11], [25], [40]))
def window_column_that_is_selected_first(rows: DataFrame) -> DataFrame:
    windows = timed(rows).select(F.window("t", "5 seconds").alias("w"), "v")
    return windows.groupBy("w").count().selectExpr(*seconds("w"), "count")


@program("append", rows=([10, 11], [25], [40]))
def windows_in_sql(rows: DataFrame) -> DataFrame:
    timed(rows).createOrReplaceTempView("timed_rows")
    return rows.sparkSession.sql(
        "SELECT cast(window.start AS long) AS start, count(*) AS n FROM timed_rows GROUP BY window(t, '5 seconds')"
    )


@program("append", rows=([10, 11], [25], [40]))
def watermark_in_sql(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("sql_times")
    return rows.sparkSession.sql(
        "SELECT cast(window.start AS long) AS start, count(*) AS n "
        "FROM (SELECT timestamp_seconds(v) AS t FROM sql_times) WATERMARK t DELAY OF INTERVAL 10 SECONDS "
        "GROUP BY window(t, '5 seconds')"
    )


program("append", rows=([10, 11, None], [25, None], [40]))(
    windows_of_null_times=lambda rows: (
        timed(rows).groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n")).selectExpr(*seconds(), "n")
    )
)


@program("append", rows=([10, 11], [25], [40]))
def days_as_windows(rows: DataFrame) -> DataFrame:
    days = rows.withColumn("t", F.timestamp_seconds(F.col("v") * 43_200)).withWatermark("t", "1 day")
    return days.groupBy(F.window("t", "2 days", "1 day")).count().selectExpr(*seconds(), "count")


@program("append", rows=([10, 11], [25], [40]))
def event_time_by_the_clock(rows: DataFrame) -> DataFrame:
    now = rows.withColumn("t", F.current_timestamp()).withWatermark("t", "1 hour")
    return now.groupBy(F.window("t", "1 minute")).count()


@program("append", settings={"spark.sql.session.timeZone": "Asia/Kathmandu"}, rows=([10, 90_000], [200_000], [400_000]))
def windows_in_another_zone(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "1 day", startTime="15 minutes"))
    return windows.count().selectExpr(*seconds(), "count", "date_format(window.start, 'HH:mm') AS clock")


@program("update", schemas=PAIRS, rows=PAIRED)
def watermark_behind_an_aggregation(rows: DataFrame) -> DataFrame:
    latest = rows.withColumn("t", F.timestamp_seconds("v")).groupBy("k").agg(F.max("t").alias("latest"))
    return latest.withWatermark("latest", "5 seconds").selectExpr("k", "cast(latest AS LONG) AS latest")
