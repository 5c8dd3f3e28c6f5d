"""Programs of deduplication and of session windows."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.support.pipelines.acceptance import pipeline, program
from tests.support.pipelines.acceptance_aggregations import PAIRS, seconds, timed

__all__ = ["pipeline"]

WORDS = {"rows": "line STRING, v INT"}
SPOKEN = (
    [("hello world spark streaming", 40), ("world hello structured streaming", 41)],
    [("spark streaming", 25)],
    [("spark streaming", 0)],
    [("spark streaming", 30)],
    [("hello apache spark", 60)],
    [("structured streaming", 90)],
)

program("append", rows=([1, 2, 2], [2, 3], [None, 1, None]))(
    duplicates_of_all_columns=lambda rows: rows.dropDuplicates()
)

program("append", schemas=PAIRS, rows=([("a", 1)], [("a", 2), ("b", 1)], [("b", 1), (None, 1)], [(None, 2)]))(
    duplicates_of_some_columns=lambda rows: rows.dropDuplicates(["k"])
)

program("update", schemas=PAIRS, rows=([("a", 1)], [("a", 2), ("b", 1)], [("b", 1)]))(
    duplicates_in_update_mode=lambda rows: rows.dropDuplicates(["k"])
)

program("complete", schemas=PAIRS, rows=([("a", 1)], [("a", 2), ("b", 1)], [("b", 1)]))(
    duplicates_in_complete_mode=lambda rows: rows.dropDuplicates(["k"])
)

program("append", rows=([10, 10, 11, 12], [25], [10], [25, 26], [45], [10, 25, 46]))(
    duplicates_by_event_time=lambda rows: timed(rows).dropDuplicates().selectExpr("v")
)

program("append", rows=([10, 10, 11, 12], [25], [10], [45], [46, 25]))(
    duplicates_by_event_time_alone=lambda rows: timed(rows).dropDuplicates(["t"]).selectExpr("v")
)

program("append", rows=([10, 10, 11, 12], [25], [25, 12], [10]))(
    duplicates_by_a_key_beside_event_time=lambda rows: timed(rows).dropDuplicates(["v"]).selectExpr("v")
)

program("append", rows=([10, None, None], [25, None], [45]))(
    duplicates_of_null_times=lambda rows: timed(rows).dropDuplicates().selectExpr("v")
)

program("complete", schemas=PAIRS, rows=([("a", 1)], [("a", 2), ("b", 3)], [("b", 1), ("c", 9)]))(
    aggregation_of_deduplicated_rows_in_complete_mode=lambda rows: rows.dropDuplicates(["k"]).agg(F.sum("v").alias("s"))
)

program("update", schemas=PAIRS, rows=([("a", 1)], [("a", 2), ("b", 3)], [("b", 1), ("c", 9)]))(
    aggregation_of_deduplicated_rows_in_update_mode=lambda rows: (
        rows.dropDuplicates(["k"]).groupBy().agg(F.sum("v").alias("s"))
    )
)


@program("append", rows=([1, 2, 3, 3], [15], [1, 25], [26], [50]))
def windows_of_deduplicated_rows(rows: DataFrame) -> DataFrame:
    once = timed(rows).dropDuplicates()
    return once.groupBy(F.window("t", "5 seconds")).agg(F.sum("v").alias("s")).selectExpr(*seconds(), "s")


program(
    "update",
    schemas=PAIRS,
    rows=([("a", 1)], [("a", 2), ("b", 3)]),
    differs="The engine refuses it: the rows of an aggregation change.",
)(deduplication_of_an_aggregation=lambda rows: rows.groupBy("k").agg(F.count("*").alias("n")).dropDuplicates(["n"]))


@program("append", rows=([10, 11, 12], [25], [40], [60]))
def deduplication_of_windows(rows: DataFrame) -> DataFrame:
    windows = timed(rows).groupBy(F.window("t", "5 seconds")).agg(F.count("*").alias("n"))
    return windows.dropDuplicates(["n"]).select("n")


program("append", schemas=PAIRS, rows=([("a", 1), ("b", 1)], [("b", 2), ("a", 1)], [("c", 2)]))(
    two_deduplications=lambda rows: rows.dropDuplicates(["k"]).dropDuplicates(["v"]).select("v")
)

program("append", schemas={"rows": "a ARRAY<INT>"}, rows=([([1, 2],)], [([1, 2],), ([2],), (None,)], [(None,)]))(
    duplicates_of_arrays=lambda rows: rows.dropDuplicates()
)

program("append", schemas=PAIRS, rows=([("a", 1)], [("a", 1), ("b", 1)]))(
    duplicates_of_maps=lambda rows: rows.select(F.create_map("k", "v").alias("m")).dropDuplicates(),
    duplicates_of_structs=lambda rows: rows.select(F.struct("k", F.array("v")).alias("s")).dropDuplicates(),
    duplicates_of_a_column_without_a_type=lambda rows: rows.select(F.lit(None).alias("nothing")).dropDuplicates(),
    duplicates_of_a_missing_column=lambda rows: rows.dropDuplicates(["nothing"]),
)

program("append", rows=([1, 2], [2, 3]), others=([2, 4], [4, 5]))(
    duplicates_of_a_union=lambda rows, others: rows.union(others).dropDuplicates()
)

program("append", rows=([1], [1, 2]))(
    distinct_rows=lambda rows: rows.distinct(),
    duplicates_within_a_watermark_that_is_missing=lambda rows: rows.dropDuplicatesWithinWatermark(),
)


@program("append", rows=([1], [1, 2]))
def select_distinct_in_sql(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("distinct_rows")
    return rows.sparkSession.sql("SELECT DISTINCT v FROM distinct_rows")


program(
    "append",
    schemas=PAIRS,
    rows=([("a", 1)], [("b", 1), ("a", 2)], [("a", 7)], [("c", 14)], [("a", 15), ("b", 14)], [("d", 40)]),
)(
    duplicates_within_a_watermark=lambda rows: (
        timed(rows, "2 seconds").dropDuplicatesWithinWatermark(["k"]).select("k", "v")
    )
)

program("append", rows=([10, 10, 11], [25], [10], [25], [60], [25, 61]))(
    duplicates_of_all_columns_within_a_watermark=lambda rows: timed(rows).dropDuplicatesWithinWatermark().select("v")
)

program(
    "append",
    schemas=PAIRS,
    rows=([("a", 10), ("b", None), ("b", None)], [("b", 12), ("a", None)], [("b", 13)], [("c", 40)]),
)(
    duplicates_within_a_watermark_of_null_times=lambda rows: (
        timed(rows, "2 seconds").dropDuplicatesWithinWatermark(["k"]).select("k", "v")
    )
)


@program("append", schemas=PAIRS, rows=([("a", 10)], [("a", 11), ("b", 12)], [("c", 60)]))
def windows_behind_duplicates_within_a_watermark(rows: DataFrame) -> DataFrame:
    once = timed(rows, "2 seconds").dropDuplicatesWithinWatermark(["k"])
    return once.groupBy(F.window("t", "5 seconds")).count().selectExpr(*seconds(), "count")


program("complete", schemas=PAIRS, rows=([("a", 10)], [("a", 11)]))(
    duplicates_within_a_watermark_in_complete_mode=lambda rows: (
        timed(rows, "2 seconds").dropDuplicatesWithinWatermark(["k"]).select("k", "v")
    )
)

program("update", schemas=PAIRS, rows=([("a", 10)], [("a", 11), ("b", 12)]))(
    duplicates_within_a_watermark_in_update_mode=lambda rows: (
        timed(rows, "2 seconds").dropDuplicatesWithinWatermark(["k"]).select("k", "v")
    )
)


# Sessions


def words(rows: DataFrame) -> DataFrame:
    return timed(rows, "30 seconds").select(F.explode(F.split("line", " ")).alias("word"), "t")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_in_append_mode(rows: DataFrame) -> DataFrame:
    sessions = words(rows).groupBy(F.session_window("t", "10 seconds").alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


@program("complete", schemas=WORDS, rows=SPOKEN)
def sessions_in_complete_mode(rows: DataFrame) -> DataFrame:
    sessions = words(rows).groupBy(F.session_window("t", "10 seconds").alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


@program("update", schemas=WORDS, rows=SPOKEN)
def sessions_in_update_mode(rows: DataFrame) -> DataFrame:
    sessions = words(rows).groupBy(F.session_window("t", "10 seconds").alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


program("append", schemas=WORDS, rows=SPOKEN)(
    sessions_without_another_key=lambda rows: (
        words(rows).groupBy(F.session_window("t", "10 seconds").alias("s")).count()
    )
)

program("complete", schemas=WORDS, rows=SPOKEN)(
    sessions_without_another_key_in_complete_mode=lambda rows: (
        words(rows).groupBy(F.session_window("t", "10 seconds").alias("s")).count()
    )
)


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_whose_gap_the_row_chooses(rows: DataFrame) -> DataFrame:
    gap = (
        F.when(F.col("word") == "hello", "1 second")
        .when(F.col("word") == "structured", "0 seconds")
        .when(F.col("word") == "world", "-10 seconds")
        .otherwise("10 seconds")
    )
    sessions = words(rows).groupBy(F.session_window("t", gap).alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_whose_gap_is_a_text_of_the_row(rows: DataFrame) -> DataFrame:
    gap = F.concat(F.length("word").cast("string"), F.lit(" seconds"))
    sessions = words(rows).groupBy(F.session_window("t", gap).alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_whose_gap_a_function_chooses(rows: DataFrame) -> DataFrame:
    @F.udf("string")
    def gap(word: str) -> str:
        return {"hello": "1 second", "structured": "0 second", "world": "-10 seconds"}.get(word, "10 seconds")

    sessions = words(rows).groupBy(F.session_window("t", gap("word")).alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_whose_gap_may_be_null(rows: DataFrame) -> DataFrame:
    gap = F.when(F.col("word") == "hello", "5 seconds").when(F.col("word") == "spark", "20 seconds")
    sessions = words(rows).groupBy(F.session_window("t", gap).alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_whose_gap_is_an_interval(rows: DataFrame) -> DataFrame:
    gap = F.expr("INTERVAL 10 SECONDS")
    sessions = words(rows).groupBy(F.session_window("t", gap).alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_whose_gap_is_made_of_numbers(rows: DataFrame) -> DataFrame:
    gap = F.expr("make_interval(0, 0, 0, 0, 0, 0, length(word))")
    sessions = words(rows).groupBy(F.session_window("t", gap).alias("s"), "word")
    return sessions.agg(F.count("*").alias("n")).selectExpr("word", *seconds("s"), "n")


@program("append", schemas={"rows": "k STRING, gap STRING, v INT"},
         rows=([("a", "5 seconds", 10), ("b", None, 10), ("a", "1 minute", 13), ("c", "x", 14)],
               [("a", "5 seconds", 300)]))  # fmt: skip
def sessions_whose_gap_is_no_interval(rows: DataFrame) -> DataFrame:
    sessions = timed(rows).groupBy(F.session_window("t", F.col("gap")).alias("s"), "k")
    return sessions.agg(F.count("*").alias("n")).selectExpr("k", *seconds("s"), "n")


@program("append", schemas={"rows": "k STRING, gap STRING, v INT"},
         rows=([("a", "5 seconds", 10), ("b", None, 10), ("a", "1 minute 500 milliseconds", 13)],
               [("a", "interval 5 seconds", 300)]))  # fmt: skip
def sessions_whose_gap_is_a_column(rows: DataFrame) -> DataFrame:
    sessions = timed(rows).groupBy(F.session_window("t", F.col("gap")).alias("s"), "k")
    return sessions.agg(F.count("*").alias("n")).selectExpr("k", "n", "cast(s.end AS double) AS end")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_of_struct_keys(rows: DataFrame) -> DataFrame:
    key = F.struct(F.struct("word", F.length("word").alias("n")).alias("a"), F.col("word").alias("b")).alias("key")
    sessions = words(rows).groupBy(F.session_window("t", "10 seconds").alias("s"), key)
    return sessions.agg(F.count("*").alias("n")).selectExpr("key", *seconds("s"), "n")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_of_array_keys(rows: DataFrame) -> DataFrame:
    sessions = words(rows).groupBy(F.session_window("t", "10 seconds").alias("s"), F.array("word").alias("key"))
    return sessions.agg(F.count("*").alias("n")).selectExpr("key", *seconds("s"), "n")


@program("append", schemas=WORDS, rows=SPOKEN)
def sessions_without_a_watermark(rows: DataFrame) -> DataFrame:
    plain = rows.withColumn("t", F.timestamp_seconds("v"))
    return plain.groupBy(F.session_window("t", "10 seconds").alias("s"), "line").count()


@program("append", schemas=WORDS, rows=SPOKEN)
def windows_of_sessions(rows: DataFrame) -> DataFrame:
    sessions = words(rows).groupBy(F.session_window("t", "10 seconds"), "word").agg(F.count("*").alias("n"))
    windows = sessions.groupBy(F.window("session_window", "20 seconds"))
    return windows.agg(F.sum("n").alias("n")).selectExpr(*seconds(), "n")


@program(
    "append",
    schemas=WORDS,
    rows=SPOKEN,
    differs="The engine computes distinct aggregates, which Spark refuses on streams.",
)
def collected_sessions_in_sql(rows: DataFrame) -> DataFrame:
    words(rows).createOrReplaceTempView("spoken")
    return rows.sparkSession.sql(
        "SELECT word, cast(session_window.end AS long) AS end, count(DISTINCT t) AS n FROM spoken "
        "GROUP BY session_window(t, '10 seconds'), word"
    )
