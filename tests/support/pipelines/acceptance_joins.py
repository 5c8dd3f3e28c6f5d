"""Programs of joins, and of several stateful operators in a row."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.support.pipelines.acceptance import pipeline, program
from tests.support.pipelines.acceptance_aggregations import seconds, timed

__all__ = ["pipeline"]

NUMBERS = {"left": ([1, 2, 3, 4, 5], [21], [22, 60]), "right": ([3, 4, 5, 6, 7], [22], [22, 60])}
RANGES = {"left": "l INT, lv INT", "right": "r INT, rv INT"}
RANGED = {
    "left": ([(1, 5), (3, 5), (2, 11)], [(1, 7), (1, 30)], [(4, 100), (5, 101)]),
    "right": ([(1, 10), (2, 5), (1, 11)], [(0, 30), (1, 33)], [(4, 103), (5, 200)]),
}


def side(rows: DataFrame, name: str, times: int) -> DataFrame:
    """A side of a join: ``key``, its event time and a value that is so many times the key."""
    column = f"{name}_time"
    frame = rows.select(
        F.col("v").alias("key"), F.timestamp_seconds("v").alias(column), (F.col("v") * times).alias(f"{name}_value")
    )
    return frame.withWatermark(column, "10 seconds")


def windowed(rows: DataFrame, name: str, times: int) -> DataFrame:
    return side(rows, name, times).select("key", F.window(f"{name}_time", "10 seconds"), f"{name}_value")


def of_windows(left: DataFrame, right: DataFrame, how: str) -> DataFrame:
    joined = windowed(left, "left", 2).join(windowed(right, "right", 3), ["key", "window"], how)
    values = ["left_value"] if how == "left_semi" else ["left_value", "right_value"]
    return joined.selectExpr("key", "cast(window.end AS long) AS end", *values)


program("append", **NUMBERS)(
    windowed_inner_join=lambda left, right: of_windows(left, right, "inner"),
    windowed_left_join=lambda left, right: of_windows(left, right, "left_outer"),
    windowed_right_join=lambda left, right: of_windows(left, right, "right_outer"),
    windowed_full_join=lambda left, right: of_windows(left, right, "full_outer"),
    windowed_semi_join=lambda left, right: of_windows(left, right, "left_semi"),
    windowed_anti_join=lambda left, right: (
        windowed(left, "left", 2).join(windowed(right, "right", 3), ["key", "window"], "left_anti").select("key")
    ),
    inner_join_without_a_watermark=lambda left, right: left.join(right, "v"),
    left_join_without_a_watermark=lambda left, right: left.join(right, "v", "left_outer"),
    full_join_without_a_watermark=lambda left, right: left.join(right, "v", "full_outer"),
    semi_join_without_a_watermark=lambda left, right: left.join(right, "v", "left_semi"),
    cross_join_of_streams=lambda left, right: left.crossJoin(right.withColumnRenamed("v", "w")),
    join_without_an_equality=lambda left, right: left.join(right.withColumnRenamed("v", "w"), F.expr("v < w")),
)

program("update", **NUMBERS)(
    join_in_update_mode=lambda left, right: of_windows(left, right, "inner"),
    join_behind_an_aggregation_in_update_mode=lambda left, right: left.groupBy("v").count().join(right, "v"),
)


program("complete", **NUMBERS)(join_in_complete_mode=lambda left, right: of_windows(left, right, "inner"))


def of_ranges(
    left: DataFrame,
    right: DataFrame,
    condition: str,
    how: str = "inner",
    delays: tuple[str, str] = ("10 seconds", "10 seconds"),
) -> DataFrame:
    """A join of ``l`` with ``r`` whose event times are ``lt`` and ``rt``; a delay of ``""`` is no watermark."""
    one = left.selectExpr("l", "timestamp_seconds(lv) AS lt", "lv")
    other = right.selectExpr("r", "timestamp_seconds(rv) AS rt", "rv")
    if delays[0]:
        one = one.withWatermark("lt", delays[0])
    if delays[1]:
        other = other.withWatermark("rt", delays[1])
    columns = ["l", "lv"] if how == "left_semi" else ["l", "lv", "r", "rv"]
    return one.join(other, F.expr(condition), how).select(*columns)


CONDITIONS = {
    "between": "l = r AND rt BETWEEN lt AND lt + INTERVAL 5 SECONDS",
    "exclusive": "l = r AND rt > lt AND rt < lt + INTERVAL 6 SECONDS",
    "before": "l = r AND lt >= rt - INTERVAL 5 SECONDS AND lt <= rt",
    "both_sides": "l = r AND rt + INTERVAL 2 SECONDS >= lt + INTERVAL 1 SECONDS"
    " AND rt - INTERVAL 1 SECONDS <= lt + INTERVAL 4 SECONDS",
    "minute_to_second": "l = r AND rt >= lt AND rt <= lt + INTERVAL '0:05' MINUTE TO SECOND",
    "difference": "l = r AND rt - lt BETWEEN INTERVAL 0 SECONDS AND INTERVAL 5 SECONDS",
    "difference_turned": "l = r AND lt - rt <= INTERVAL 0 SECONDS AND INTERVAL 5 SECONDS >= rt - lt",
    "long_casts": "l = r AND cast(rt AS long) >= cast(lt AS long) AND cast(rt AS long) <= cast(lt AS long) + 5",
    "double_casts": "l = r AND cast(rt AS double) >= cast(lt AS double)"
    " AND cast(rt AS double) <= cast(lt AS double) + 5",
    "unix_seconds": "l = r AND unix_seconds(rt) >= unix_seconds(lt) AND unix_seconds(rt) - unix_seconds(lt) <= 5",
    "made_interval": "l = r AND rt >= lt AND rt <= lt + make_dt_interval(0, 0, 0, 5)",
    "made_calendar_interval": "l = r AND rt >= lt AND rt <= lt + make_interval(0, 0, 0, 0, 0, 0, 5)",
    "sum_of_intervals": "l = r AND rt >= lt AND rt <= lt + (INTERVAL 3 SECONDS + INTERVAL 2 SECONDS)",
    "interval_times": "l = r AND rt >= lt AND rt <= lt + INTERVAL 1 SECOND * 5",
    "two_steps": "l = r AND rt >= lt AND rt - INTERVAL 2 SECONDS <= lt + INTERVAL 2 SECONDS + INTERVAL 1 SECOND",
    "same_time": "l = r AND lt = rt",
    "same_second": "l = r AND date_trunc('second', lt) = date_trunc('second', rt)",
    "text_interval": "l = r AND rt >= lt AND rt <= lt + INTERVAL '5 seconds'",
    "timestampadd": "l = r AND rt >= lt AND rt <= timestampadd(SECOND, 5, lt)",
    "negated": "l = r AND NOT (rt < lt OR rt > lt + INTERVAL 5 SECONDS)",
    "null_safe": "l <=> r AND rt BETWEEN lt AND lt + INTERVAL 5 SECONDS",
    "value_beside": "l = r AND rt BETWEEN lt AND lt + INTERVAL 5 SECONDS AND lv + rv > 17",
    "either": "l = r AND (rt BETWEEN lt AND lt + INTERVAL 5 SECONDS OR rv = lv + 2)",
}
"""Conditions that say, each in its own way, how much later the right row may be."""


_READ_BY_THE_ENGINE = (
    *("difference", "difference_turned", "unix_seconds", "made_interval", "made_calendar_interval", "interval_times"),
)
"""Conditions of which Spark reads no bound, so that it refuses joins that are not inner ones."""


def _register(name: str, condition: str, how: str) -> None:
    def build(left: DataFrame, right: DataFrame) -> DataFrame:
        return of_ranges(left, right, condition, how)

    build.__name__ = f"{how}_join_{name}"
    program(
        "append",
        schemas=RANGES,
        differs="The engine reads this bound." if name in _READ_BY_THE_ENGINE and how != "inner" else "",
        **RANGED,
    )(build)


for _name, _condition in CONDITIONS.items():
    _register(_name, _condition, "left_outer")
    if _name in ("between", "exclusive", "difference", "long_casts", "either", "negated", "same_second"):
        for _how in ("inner", "full_outer", "left_semi", "right_outer"):
            _register(_name, _condition, _how)


EXCLUDED = {"left": ([1, 2, 3, 4, 5], [20], [60]), "right": ([3, 4, 5, 1, 2], [21], [20, 61])}
NULL_KEYS = {
    "left": ([(1, 1), (None, 2), (1, 3), (None, 4), (1, 5)], [(1, 21)], [(1, 60)]),
    "right": ([(1, 3), (None, 4), (1, 5), (1, 6)], [(1, 22)], [(1, 60)]),
}


def _register_suites(how: str) -> None:
    """Joins whose condition excludes rows of one side, of null keys, and of a stream with itself."""

    def excluding(left: DataFrame, right: DataFrame, condition: str) -> DataFrame:
        one = windowed(left, "left", 2)
        other = windowed(right, "right", 3).withColumn("right_value", F.col("right_value").cast("string"))
        matches = (one.key == other.key) & (one.window == other.window) & F.expr(condition)
        joined = one.join(other, matches, how)
        columns = [one.key, one.window.end.cast("long").alias("end"), "left_value"]
        if how == "left_semi":
            return joined.select(*columns)
        return joined.select(*columns, other.key.alias("other"), "right_value")

    def excluding_left(left: DataFrame, right: DataFrame) -> DataFrame:
        return excluding(left, right, "left_value > 4")

    def excluding_right(left: DataFrame, right: DataFrame) -> DataFrame:
        return excluding(left, right, "cast(right_value AS int) > 7")

    def null_keys(left: DataFrame, right: DataFrame) -> DataFrame:
        one = timed(left.withColumnsRenamed({"lv": "v"})).select("l", "v", F.window("t", "10 seconds").alias("lw"))
        other = timed(right.withColumnsRenamed({"rv": "v"})).select("r", "v", F.window("t", "10 seconds").alias("rw"))
        joined = one.alias("a").join(other.alias("b"), F.expr("l <=> r AND a.v = b.v AND lw = rw"), how)
        return joined.select("l", "a.v", *([] if how == "left_semi" else ["r", F.col("b.v").alias("w")]))

    def itself(rows: DataFrame) -> DataFrame:
        one = rows.selectExpr("v AS l", "timestamp_seconds(v) AS lt").withWatermark("lt", "5 seconds")
        even = (
            rows.where("v % 2 = 0").selectExpr("v AS r", "timestamp_seconds(v) AS rt").withWatermark("rt", "5 seconds")
        )
        joined = one.join(even, F.expr(CONDITIONS["between"]), how)
        return joined.select("l", *([] if how == "left_semi" else ["r"]))

    excluding_left.__name__ = f"{how}_join_that_excludes_rows_of_the_left_side"
    excluding_right.__name__ = f"{how}_join_that_excludes_rows_of_the_right_side"
    null_keys.__name__ = f"{how}_join_of_windows_and_null_keys"
    itself.__name__ = f"{how}_join_of_a_stream_with_its_even_rows"
    program("append", **EXCLUDED)(excluding_left)
    program("append", **EXCLUDED)(excluding_right)
    program("append", schemas=RANGES, **NULL_KEYS)(null_keys)
    program("append", rows=([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]))(itself)


for _how in ("inner", "left_outer", "right_outer", "full_outer", "left_semi"):
    _register_suites(_how)


LONG = CONDITIONS["between"].replace("5 SECONDS", "50 SECONDS")
program("append", schemas=RANGES, left=([(None, 5)], [(1, 30)]), right=([(None, 5)], [(2, 31)]))(
    left_join_by_null_keys=lambda left, right: of_ranges(left, right, LONG, "left_outer")
)
program(
    "append",
    suite=True,
    schemas=RANGES,
    left=([(None, 5), (1, None), (2, 6)], [(1, 30)], [(1, 200), (None, 201)]),
    right=([(None, 7), (2, None)], [(2, 31)], [(2, 200), (None, 202)]),
)(full_join_by_null_keys_and_times=lambda left, right: of_ranges(left, right, LONG, "full_outer"))

program("append", schemas=RANGES, **RANGED)(
    inner_join_with_a_watermark_on_the_left_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"], delays=("10 seconds", "")
    ),
    inner_join_with_a_watermark_on_the_right_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"], delays=("", "10 seconds")
    ),
    left_join_with_a_watermark_on_the_left_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"], "left_outer", delays=("10 seconds", "")
    ),
    right_join_with_a_watermark_on_the_right_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"], "right_outer", delays=("", "10 seconds")
    ),
    left_join_with_a_lower_bound_alone=lambda left, right: of_ranges(left, right, "l = r AND rt >= lt", "left_outer"),
    left_join_with_an_upper_bound_alone=lambda left, right: of_ranges(
        left, right, "l = r AND rt <= lt + INTERVAL 5 SECONDS", "left_outer"
    ),
    left_join_by_keys_with_watermarks_alone=lambda left, right: of_ranges(left, right, "l = r", "left_outer"),
    inner_join_with_several_delays=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"], delays=("1 second", "30 seconds")
    ),
    join_by_array_keys=lambda left, right: of_ranges(
        left, right, "array(l, 1) = array(r, 1) AND rt BETWEEN lt AND lt + INTERVAL 5 SECONDS"
    ),
    join_of_an_expression_with_a_cast=lambda left, right: of_ranges(
        left, right, "cast(l AS string) = cast(r + 0 AS string)"
    ),
)


def of_times(left: DataFrame, right: DataFrame, how: str, delays: tuple[str, str]) -> DataFrame:
    """A join by keys and windows of two streams of which one may have no delay, and so no watermark."""
    one, other = (
        left.selectExpr("l AS k", "timestamp_seconds(lv) AS t", "lv"),
        right.selectExpr("r AS k", "timestamp_seconds(rv) AS t", "rv"),
    )
    one = one.withWatermark("t", delays[0]) if delays[0] else one
    other = other.withWatermark("t", delays[1]) if delays[1] else other
    window = F.window("t", "10 seconds")
    joined = one.select("k", window, "lv").join(other.select("k", window, "rv"), ["k", "window"], how)
    return joined.selectExpr("k", *seconds(), "lv", "rv")


PASSED = {
    "left": ([(1, 1)], [(25, 25)], [(5, 5)], [(40, 40), (26, 26)], [(90, 90)], [(30, 30), (91, 91)]),
    "right": ([(1, 1)], [(25, 25), (26, 26)], [(1, 1), (5, 5)], [(40, 40)], [(25, 25), (40, 40), (91, 91)], [(30, 30)]),
}
"""Rows of both sides whose partners the watermark has passed."""
program("append", schemas=RANGES, **PASSED)(
    inner_join_of_windows_with_a_watermark_on_the_left_side=lambda left, right: of_times(
        left, right, "inner", ("10 seconds", "")
    ),
    left_join_of_windows_with_a_watermark_on_the_right_side=lambda left, right: of_times(
        left, right, "left_outer", ("", "10 seconds")
    ),
    inner_join_of_ranges_and_late_rows_with_a_watermark_on_the_left_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"], delays=("10 seconds", "")
    ),
)
program("append", schemas=RANGES, differs="The engine refuses it: rows behind state have no watermark.", **PASSED)(
    join_with_rows_without_duplicates_that_have_no_watermark=lambda left, right: of_ranges(
        left, right.dropDuplicates(), "l = r AND lt = rt", delays=("10 seconds", "")
    )
)
program("append", schemas=RANGES, **PASSED)(
    full_join_of_times_with_a_watermark_on_the_left_side=lambda left, right: of_ranges(
        left, right, "l = r AND lt = rt", "full_outer", ("10 seconds", "")
    )
)

program("append", schemas=RANGES, **RANGED, differs="The engine refuses it: both sides need a watermark.")(
    left_join_with_a_watermark_on_the_right_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"], "left_outer", delays=("", "10 seconds")
    ),
    right_join_with_a_watermark_on_the_left_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"], "right_outer", delays=("10 seconds", "")
    ),
)

program("append", schemas=RANGES, **RANGED, differs="The engine refuses it: right rows would stay for ever.")(
    full_join_with_an_upper_bound_alone=lambda left, right: of_ranges(
        left, right, "l = r AND rt <= lt + INTERVAL 5 SECONDS", "full_outer"
    )
)


COMPARED = {"left": (*RANGED["left"], [(9, 300)]), "right": (*RANGED["right"], [(9, 299), (8, 301)])}
"""The same rows, and a batch whose watermark has passed every time at which one of them can match."""
_BOUND_OF_A_VALUE = "Spark takes lv > 5 for a bound of lt: it never emits left rows without a match that are later."


program("append", schemas=RANGES, **COMPARED, differs=_BOUND_OF_A_VALUE)(
    left_join_with_conditions_of_each_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"] + " AND lv > 5 AND rv < 100", "left_outer"
    ),
    full_join_with_conditions_of_each_side=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"] + " AND lv > 5 AND rv < 100", "full_outer"
    ),
)

program("append", schemas=RANGES, **COMPARED)(
    left_join_with_conditions_that_are_no_bounds=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"] + " AND lv <> 5 AND rv <> 103", "left_outer"
    ),
    full_join_with_conditions_that_are_no_bounds=lambda left, right: of_ranges(
        left, right, CONDITIONS["between"] + " AND lv <> 5 AND rv <> 103", "full_outer"
    ),
)


@program("append", schemas=RANGES, **RANGED)
def join_whose_condition_calls_a_python_function(left: DataFrame, right: DataFrame) -> DataFrame:
    near = F.udf("boolean")(lambda one, other: other - one < 4)
    one = left.selectExpr("l", "timestamp_seconds(lv) AS lt", "lv").withWatermark("lt", "10 seconds")
    other = right.selectExpr("r", "timestamp_seconds(rv) AS rt", "rv").withWatermark("rt", "10 seconds")
    return one.join(other, F.expr(CONDITIONS["between"]) & near("lv", "rv")).select("l", "lv", "r", "rv")


@program("append", schemas={"rows": "k STRING, v INT"}, rows=([("a", 1), ("b", 2)], [("c", 3), ("a", 4)]))
def join_with_a_table_whose_condition_calls_a_python_function(rows: DataFrame) -> DataFrame:
    table = rows.sparkSession.createDataFrame([("a", "x"), ("a", "yy"), ("c", "z")], "name STRING, text STRING")
    longer = F.udf("boolean")(lambda text, v: len(text) > v - 1)
    return rows.join(table, (rows.k == table.name) & longer("text", "v"))


@program("append", suite=True, left=([1, 5], [10, None], [1]), right=([1, 5, 10], [None], [5, 1]))
def joins_whose_equality_is_in_a_filter_or_inside_a_condition(left: DataFrame, right: DataFrame) -> DataFrame:
    left.createOrReplaceTempView("ones")
    right.createOrReplaceTempView("others")
    return left.sparkSession.sql(
        "SELECT 'filter' AS how, a.v FROM ones a, others b WHERE a.v = b.v AND b.v > 1 UNION ALL "
        "SELECT 'three', a.v FROM ones a, ones b, others c WHERE a.v = c.v AND b.v = c.v UNION ALL "
        "SELECT 'negated', a.v FROM ones a JOIN others b ON NOT (a.v <> b.v) UNION ALL "
        "SELECT 'either', a.v FROM ones a JOIN others b ON (a.v = b.v AND a.v > 4) OR (a.v = b.v AND b.v < 2)"
    )


@program("append", schemas=RANGES, **RANGED)
def join_in_sql(left: DataFrame, right: DataFrame) -> DataFrame:
    left.selectExpr("l", "timestamp_seconds(lv) AS lt").withWatermark("lt", "10 seconds").createOrReplaceTempView(
        "lefts"
    )
    right.selectExpr("r", "timestamp_seconds(rv) AS rt").withWatermark("rt", "10 seconds").createOrReplaceTempView(
        "rights"
    )
    return left.sparkSession.sql(
        "SELECT l, r, cast(rt AS long) AS at FROM lefts LEFT JOIN rights "
        "ON l = r AND rt >= lt AND rt < lt + INTERVAL 9 SECONDS"
    )


@program("append", rows=([1, 2, 3], [12], [40]))
def join_of_a_stream_with_itself(rows: DataFrame) -> DataFrame:
    one, other = timed(rows).alias("a"), timed(rows).alias("b")
    return one.join(other, F.expr("a.v = b.v AND a.t = b.t")).select("a.v", F.col("b.v").alias("w"))


@program("append", rows=([1, 2, 3], [12], [40]))
def join_of_a_stream_with_its_neighbours(rows: DataFrame) -> DataFrame:
    one = timed(rows).select(F.col("v").alias("a"), F.col("t").alias("at"))
    other = timed(rows).select((F.col("v") + 1).alias("b"), F.col("t").alias("bt"))
    return one.join(other, F.expr("a = b AND at > bt AND at < bt + INTERVAL 2 SECONDS"), "left_outer").select("a", "b")


program("append", left=([1, 2, 3], [30]), right=([2, 3, 4], [31]), third=([3, 4], [32]))(
    join_of_three_streams=lambda left, right, third: left.join(right, "v").join(third, "v")
)


@program("append", left=([1, 2, 3], [30], [90]), right=([2, 3, 4], [31], [91]), third=([3, 4], [32], [92]))
def outer_join_behind_a_join(left: DataFrame, right: DataFrame, third: DataFrame) -> DataFrame:
    joined = side(left, "left", 2).join(
        side(right, "right", 3).withColumnRenamed("key", "rkey"), F.expr("key = rkey AND left_time = right_time")
    )
    last = side(third, "third", 5).withColumnRenamed("key", "tkey")
    return joined.join(last, F.expr("key = tkey AND left_time = third_time"), "left_outer").select(
        "key", "right_value", "third_value"
    )


@program("append", schemas={"rows": "k STRING, v INT"}, rows=([("a", 1), ("b", 2)], [("c", 3), (None, 4)]))
def inner_join_with_a_table(rows: DataFrame) -> DataFrame:
    table = rows.sparkSession.createDataFrame([("a", "x"), ("a", "y"), ("c", None)], "k STRING, name STRING")
    return rows.join(table, "k")


@program("append", schemas={"rows": "k STRING, v INT"}, rows=([("a", 1), ("b", 2)], [("c", 3), (None, 4)]))
def left_join_with_a_table(rows: DataFrame) -> DataFrame:
    table = rows.sparkSession.createDataFrame([("a", "x"), ("a", "y"), ("c", None)], "k STRING, name STRING")
    return rows.join(table, "k", "left")


@program("append", schemas={"rows": "k STRING, v INT"}, rows=([("a", 1), ("b", 2)], [("c", 3)]))
def right_join_with_a_table(rows: DataFrame) -> DataFrame:
    table = rows.sparkSession.createDataFrame([("a", "x"), ("d", "y")], "k STRING, name STRING")
    return rows.join(table, "k", "right")


@program("append", schemas={"rows": "k STRING, v INT"}, rows=([("a", 1), ("b", 2)], [("c", 3)]))
def full_join_with_a_table(rows: DataFrame) -> DataFrame:
    table = rows.sparkSession.createDataFrame([("a", "x"), ("d", "y")], "k STRING, name STRING")
    return rows.join(table, "k", "full")


@program("append", schemas={"rows": "k STRING, v INT"}, rows=([("a", 1), ("b", 2)], [("c", 3)]))
def anti_join_with_a_table(rows: DataFrame) -> DataFrame:
    table = rows.sparkSession.createDataFrame([("a", "x"), ("d", "y")], "k STRING, name STRING")
    return rows.join(table, "k", "left_anti")


@program("update", schemas={"rows": "k STRING, v INT"}, rows=([("a", 1), ("b", 2)], [("a", 3)]))
def aggregation_behind_a_join_with_a_table(rows: DataFrame) -> DataFrame:
    table = rows.sparkSession.createDataFrame([("a", "x"), ("b", "y")], "k STRING, name STRING")
    return rows.join(table, "k").groupBy("name").agg(F.sum("v").alias("s"))


@program("append", rows=([1, 2], [5]))
def join_with_an_aggregated_table(rows: DataFrame) -> DataFrame:
    table = rows.sparkSession.range(10).groupBy((F.col("id") % 3).cast("int").alias("v")).count()
    return rows.join(table, "v")


# Several stateful operators


@program("append", rows=([10, 11, 12, 13, 14, 15], [15, 16, 17, 18, 19, 20, 25], [31], [60]))
def windows_of_windows(rows: DataFrame) -> DataFrame:
    small = (
        timed(rows, "0 seconds").groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n"), F.sum("v").alias("s"))
    )
    large = small.groupBy(F.window("window", "10 seconds")).agg(
        F.count("*").alias("windows"), F.sum("n").alias("n"), F.sum("s").alias("s")
    )
    return large.selectExpr(*seconds(), "windows", "n", "s")


@program("append", rows=([10, 11, 12, 13, 14, 15], [20, 25], [31], [60]))
def windows_by_window_time(rows: DataFrame) -> DataFrame:
    small = timed(rows, "0 seconds").groupBy(F.window("t", "5 seconds")).count()
    timed_again = small.select(F.window_time("window").alias("at"), "count")
    return timed_again.groupBy(F.window("at", "10 seconds")).agg(F.sum("count").alias("n")).selectExpr(*seconds(), "n")


@program("append", rows=([10, 11, 12, 13, 14, 15], [20, 25], [31], [60]))
def windows_in_added_columns(rows: DataFrame) -> DataFrame:
    small = timed(rows, "0 seconds").withColumn("small", F.window("t", "5 seconds")).groupBy("small").count()
    timed_again = small.withColumn("at", F.window_time("small"))
    return timed_again.groupBy(F.window("at", "10 seconds")).agg(F.sum("count").alias("n")).selectExpr(*seconds(), "n")


@program("append", rows=([10, 11, 12, 13, 14, 15], [20, 25], [31], [60]))
def three_windows_in_a_row(rows: DataFrame) -> DataFrame:
    frame = timed(rows, "0 seconds").groupBy(F.window("t", "5 seconds")).count()
    frame = frame.groupBy(F.window("window", "10 seconds")).agg(F.sum("count").alias("count"))
    return frame.groupBy(F.window("window", "20 seconds")).agg(F.sum("count").alias("n")).selectExpr(*seconds(), "n")


@program("append", left=([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [25], [60]), right=([3, 4, 5, 6, 7], [8, 9], [26], [61]))
def aggregation_of_joined_rows(left: DataFrame, right: DataFrame) -> DataFrame:
    one = timed(left, "0 seconds").select(F.col("v").alias("l"), F.col("t").alias("lt"))
    other = timed(right, "0 seconds").select(F.col("v").alias("r"), F.col("t").alias("rt"))
    joined = one.join(other, F.expr("lt = rt"), "inner")
    return joined.groupBy(F.window("lt", "5 seconds")).agg(F.count("*").alias("n")).selectExpr(*seconds(), "n")


@program("append", left=([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [25], [60]), right=([3, 4, 5, 6, 7], [8, 9], [26], [61]))
def aggregation_of_rows_of_an_outer_join(left: DataFrame, right: DataFrame) -> DataFrame:
    one = timed(left, "0 seconds").select(F.col("v").alias("l"), F.col("t").alias("lt"))
    other = timed(right, "0 seconds").select(F.col("v").alias("r"), F.col("t").alias("rt"))
    joined = one.join(other, F.expr("l = r AND lt = rt"), "left_outer")
    windows = joined.groupBy(F.window("lt", "5 seconds"))
    return windows.agg(F.count("*").alias("n"), F.count("r").alias("m")).selectExpr(*seconds(), "n", "m")


@program("append", left=([1, 2, 3, 4, 5], [6, 10], [25], [60]), right=([3, 4, 5, 6, 7], [8, 9], [26], [61]))
def aggregation_of_rows_of_a_join_of_ranges(left: DataFrame, right: DataFrame) -> DataFrame:
    one = timed(left, "0 seconds").select(F.col("v").alias("l"), F.col("t").alias("lt"))
    other = timed(right, "0 seconds").select(F.col("v").alias("r"), F.col("t").alias("rt"))
    joined = one.join(other, F.expr("l = r AND lt BETWEEN rt AND rt + INTERVAL 5 SECONDS"), "inner")
    return joined.groupBy(F.window("lt", "5 seconds")).count().selectExpr(*seconds(), "count")


@program("append", left=([1, 2, 3, 4, 5], [25], [60]), right=([3, 4, 5, 6, 7], [26], [61]))
def join_of_aggregations(left: DataFrame, right: DataFrame) -> DataFrame:
    one = timed(left, "0 seconds").groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n"))
    other = timed(right, "0 seconds").groupBy(F.window("t", "5 seconds")).agg(F.sum("v").alias("s"))
    return one.join(other, "window").selectExpr(*seconds(), "n", "s")


@program("append", left=([1, 2, 3, 4, 5], [25], [60]), right=([3, 4, 5, 6, 7], [26], [61]))
def outer_join_of_aggregations(left: DataFrame, right: DataFrame) -> DataFrame:
    one = timed(left, "0 seconds").groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n"))
    other = timed(right, "0 seconds").groupBy(F.window("t", "5 seconds")).agg(F.sum("v").alias("s"))
    return one.join(other, "window", "left_outer").selectExpr(*seconds(), "n", "s")


@program("append", left=([1, 2, 3, 4, 5], [25], [60]), right=([3, 4, 5, 6, 7], [26], [61]))
def union_of_aggregations(left: DataFrame, right: DataFrame) -> DataFrame:
    one = timed(left, "0 seconds").groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n"))
    other = timed(right, "0 seconds").groupBy(F.window("t", "10 seconds")).agg(F.sum("v").alias("n"))
    return one.union(other).selectExpr(*seconds(), "n")


@program("append", left=([1, 2, 3], [25], [60]), right=([3, 3, 4], [26], [61]))
def join_of_deduplicated_rows(left: DataFrame, right: DataFrame) -> DataFrame:
    one = timed(left).dropDuplicates(["v", "t"]).select(F.col("v").alias("l"), F.col("t").alias("lt"))
    other = timed(right).dropDuplicates(["v", "t"]).select(F.col("v").alias("r"), F.col("t").alias("rt"))
    return one.join(other, F.expr("l = r AND lt = rt"), "full_outer").select("l", "r")


@program("append", rows=([10, 11, 12, 13], [25], [31], [60]))
def session_windows_of_windows(rows: DataFrame) -> DataFrame:
    small = timed(rows, "0 seconds").groupBy(F.window("t", "2 seconds"), (F.col("v") % 2).alias("odd")).count()
    sessions = small.groupBy(F.session_window(F.window_time("window"), "5 seconds").alias("s"), "odd")
    return sessions.agg(F.sum("count").alias("n")).selectExpr(*seconds("s"), "odd", "n")


EDGES = {
    "left": ([(1, 10), (2, 12), (3, 25), (4, 26)], [(5, 30)], [(6, 40)]),
    "right": ([(11, 10), (12, 21)], [(13, 30), (14, 31), (15, 29)], [(16, 40)]),
}
"""Rows that can match until the watermark is at the last one's, 30 seconds, and a second before and after it."""


@program("append", schemas=RANGES, **EDGES)
def full_join_at_the_edges_of_a_range(left: DataFrame, right: DataFrame) -> DataFrame:
    return of_ranges(left, right, CONDITIONS["between"], "full_outer")


@program("append", schemas=RANGES, **EDGES)
def full_join_at_the_edges_of_a_range_that_excludes_them(left: DataFrame, right: DataFrame) -> DataFrame:
    condition = "l = r AND rt > lt - INTERVAL 1 SECOND AND rt < lt + INTERVAL 5 SECONDS"
    return of_ranges(left, right, condition, "full_outer")


@program("append", schemas=RANGES, **EDGES)
def windows_of_a_left_join_at_the_edges_of_a_range(left: DataFrame, right: DataFrame) -> DataFrame:
    one = left.selectExpr("l", "timestamp_seconds(lv) AS lt").withWatermark("lt", "10 seconds")
    other = right.selectExpr("r", "timestamp_seconds(rv) AS rt").withWatermark("rt", "10 seconds")
    joined = one.join(other, F.expr(CONDITIONS["between"]), "left_outer")
    return joined.groupBy(F.window("lt", "1 second")).count().selectExpr(*seconds(), "count")
