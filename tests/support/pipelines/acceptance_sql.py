"""Programs of SQL: lateral generators and subqueries, parameters, global views, variables and functions of SQL."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from tests.support.pipelines.acceptance import pipeline, program

__all__ = ["pipeline"]

LISTS = {"rows": "k INT, xs ARRAY<INT>"}
LISTED = ([(1, [10, 20]), (2, [])], [(3, None), (4, [30])])


program("append", suite=True, schemas=LISTS, rows=LISTED)(
    lateral_generator=lambda rows: rows.sparkSession.sql("SELECT k, e.x FROM {t}, LATERAL explode(xs) AS e(x)", t=rows)
)


@program("append", schemas=LISTS, rows=LISTED)
def lateral_view(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("lists_viewed")
    return rows.sparkSession.sql("SELECT k, x FROM lists_viewed LATERAL VIEW OUTER explode(xs) e AS x")


program("append", schemas=LISTS, rows=LISTED)(
    lateral_subquery_over_the_columns_of_a_row=lambda rows: rows.sparkSession.sql(
        "SELECT k, n FROM {t}, LATERAL (SELECT k + size(xs) AS n)", t=rows
    ),
    lateral_subquery_with_an_aggregate=lambda rows: rows.sparkSession.sql(
        "SELECT k, total FROM {t}, LATERAL (SELECT sum(x) AS total FROM explode(xs) AS e(x))", t=rows
    ),
)

program("append", differs="it is refused: Spark's rows lack those without elements", schemas=LISTS, rows=LISTED)(
    left_lateral_join_of_a_generator=lambda rows: rows.sparkSession.sql(
        "SELECT k, x FROM {t} LEFT JOIN LATERAL explode(xs) AS e(x)", t=rows
    )
)

program("append", differs="it has rows: Spark deduplicates, and refuses that", schemas=LISTS, rows=LISTED)(
    lateral_subquery_with_a_generator_and_a_filter=lambda rows: rows.sparkSession.sql(
        "SELECT k, y FROM {t}, LATERAL (SELECT x + 1 AS y FROM explode(xs) AS e(x) WHERE x > 10)", t=rows
    )
)


@program("append", schemas=LISTS, rows=LISTED)
def lateral_join_of_a_table_function(rows: DataFrame) -> DataFrame:
    elements = rows.sparkSession.tvf.explode(F.col("xs").outer())
    return rows.lateralJoin(elements).select("k", "col")


@program("append", schemas=LISTS, rows=LISTED)
def left_lateral_join_of_a_table_function(rows: DataFrame) -> DataFrame:
    elements = rows.sparkSession.tvf.posexplode(F.col("xs").outer())
    return rows.lateralJoin(elements, F.col("col") > 15, "left").select("k", "pos", "col")


program("append", rows=([1, 2], [3, None]))(
    parameters_of_sql_by_name=lambda rows: rows.sparkSession.sql(
        "SELECT v + :more AS n FROM {t} WHERE v > :least", {"more": 10, "least": 1}, t=rows
    ),
    parameters_of_sql_by_position=lambda rows: rows.sparkSession.sql(
        "SELECT v + ? AS n FROM {t} WHERE v > ?", [10, 1], t=rows
    ),
    columns_and_values_as_arguments_of_sql=lambda rows: rows.sparkSession.sql(
        "SELECT {c} + {n} AS n FROM {t}", c=rows.v, n=7, t=rows
    ),
    rows_in_named_partitions=lambda rows: rows.repartitionById(2, F.col("v") % 2),
    names_of_functions_in_identifier=lambda rows: rows.sparkSession.sql(
        "SELECT IDENTIFIER(:f)(v) AS n FROM {t}", {"f": "abs"}, t=rows
    ),
    pipes_and_lateral_names=lambda rows: rows.sparkSession.sql(
        "FROM {t} |> WHERE v > 1 |> EXTEND v * 2 AS w |> SET w = w + 1 |> SELECT v, w AS x, x + 1 AS y |> AS q", t=rows
    ),
)


@program("append", suite=True, rows=([1, 2], [3, None]))
def variables_of_a_session(rows: DataFrame) -> DataFrame:
    spark = rows.sparkSession
    spark.sql("DECLARE OR REPLACE VARIABLE least INT DEFAULT 1")
    spark.sql("DECLARE OR REPLACE VARIABLE least = 1")
    spark.sql("DECLARE OR REPLACE VARIABLE other = 5")
    spark.sql("SET VARIABLE least = least + 1")
    spark.sql("SET VAR (least, other) = (SELECT least, 7)")
    spark.sql("DROP TEMPORARY VARIABLE other")
    return rows.where("v > least").selectExpr("v", "least")


@program("append", rows=([1, 2], [3, None]))
def functions_of_sql(rows: DataFrame) -> DataFrame:
    rows.sparkSession.sql("CREATE OR REPLACE TEMPORARY FUNCTION twice(x INT) RETURNS INT RETURN x * 2")
    return rows.selectExpr("twice(v) + 1 AS n")


@program("append", schemas=LISTS, rows=LISTED)
def table_functions_of_sql(rows: DataFrame) -> DataFrame:
    body = "SELECT e, upper(t) FROM explode(sequence(1, n % 3 + 1)) AS g(e)"
    parameters = "n LONG, t STRING DEFAULT 'k'"
    rows.sparkSession.sql(
        f"CREATE OR REPLACE TEMPORARY FUNCTION spread({parameters}) RETURNS TABLE (e INT, name STRING) RETURN {body}"
    )
    return rows.sparkSession.sql("SELECT k, e, name FROM {t}, LATERAL spread(k) AS s(e, name) WHERE e > 1", t=rows)


@program("append", rows=([1, 2], [3, None]))
def execute_immediate(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("immediate")
    return rows.sparkSession.sql("EXECUTE IMMEDIATE 'SELECT v FROM immediate WHERE v > ?' USING 1")


program("append", rows=([1, 2], [3, 70], [None]))(
    units_of_time_and_several_patterns=lambda rows: rows.selectExpr(
        *(f"timestampadd({unit}, v, TIMESTAMP'2024-01-31 10:00:00') AS {unit}" for unit in UNITS),
        *(f"timestampdiff({unit}, TIMESTAMP'2024-03-31 10:00:00', {AT}) AS {unit}s" for unit in UNITS),
        "dateadd(DAY, v, DATE'2024-02-28') AS day_later",
        "v::string LIKE ANY ('1%', '7%') AS some",
        "v::string NOT LIKE ALL ('1%', null) AS none",
    )
)


UNITS = ("MICROSECOND", "SECOND", "MINUTE", "HOUR", "DAY", "WEEK", "MONTH", "QUARTER", "YEAR")
AT = "TIMESTAMP'2024-01-31 10:00:00' + make_dt_interval(v, v)"


@program("complete", rows=([1, 2, 2, 9], [3, 70, 3], [None]))
def percentiles_and_modes_within_groups(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("ranked")
    return rows.sparkSession.sql(
        "SELECT v % 2 AS odd, percentile_disc(0.5) WITHIN GROUP (ORDER BY v) AS middle, "
        "percentile_disc(array(0.1, 0.9)) WITHIN GROUP (ORDER BY v DESC) AS ends, "
        "percentile_cont(0.3) WITHIN GROUP (ORDER BY v DESC) AS between, "
        "mode() WITHIN GROUP (ORDER BY v DESC) AS most, mode(v, true) AS least FROM ranked GROUP BY ALL"
    )


program("complete", rows=([1, 2], [3, None]))(
    grouping_sets=lambda rows: rows.sparkSession.sql(
        "SELECT v, v % 2 AS odd, grouping(v) AS g, count(*) AS n FROM STREAM {t} GROUP BY ROLLUP (v, v % 2)", t=rows
    )
)


@program("append", rows=([1, 2, 3, 4], [None]))
def random_values_in_their_ranges(rows: DataFrame) -> DataFrame:
    made = {"r": F.rand(), "s": F.rand(5), "n": F.expr("randn()"), "id": F.uuid(), "text": F.randstr(5)}
    lists = {"list": F.shuffle(F.array("v", F.lit(0))), "t": F.uniform(F.lit(10), F.lit(20))}
    return rows.withColumns(made | lists).selectExpr(
        *("v", "r >= 0 AND r < 1 AND r <> s AS random", "abs(n) < 9 AS normal", "length(id) AS length"),
        *("length(text) AS letters", "array_sort(list) AS list", "t BETWEEN 10 AND 20 AS between", "typeof(t) AS type"),
    )


program("complete", rows=([1, 2, 2], [3, None]))(
    values_of_subqueries_inside_and_beside_aggregates=lambda rows: rows.sparkSession.sql(
        "SELECT v % 2 AS odd, sum(v + (SELECT max(x) FROM VALUES (10), (20) AS t(x))) AS more, "
        "count(*) * (SELECT min(x) FROM VALUES (10), (20) AS t(x)) AS n FROM {t} GROUP BY v % 2",
        t=rows,
    ),
    values_of_subqueries_beside_aggregates=lambda rows: rows.sparkSession.sql(
        "SELECT v % 2 AS odd, sum(v) / (SELECT sum(x) FROM VALUES (10), (20) AS t(x)) AS part FROM {t} GROUP BY v % 2 "
        "HAVING count(*) > (SELECT 0)",
        t=rows,
    ),
)


@program("append", schemas=LISTS, rows=LISTED)
def fields_of_array_fields_and_changed_fields(rows: DataFrame) -> DataFrame:
    made = F.transform("xs", lambda x: F.when(x > 10, F.struct(x.alias("x"), F.struct("k").alias("in"))))
    nested = rows.select(F.struct("k", made.alias("ys"), F.struct("k").alias("in")).alias("s"))
    changed = F.col("s").withField("in.w", F.size("s.ys")).withField("k", F.lit(0)).dropFields("ys", "in.k")
    return nested.select(
        "s.ys.x", F.col("s.ys.in.k").alias("ks"), F.col("s.ys")[0]["x"].alias("first"), changed.alias("c")
    )


@program("append", rows=([1, 2, 7], [3, None]))
def subqueries_of_frames(rows: DataFrame) -> DataFrame:
    numbers = rows.sparkSession.range(1, 4)
    same = numbers.where(F.col("id") == F.col("v").outer())
    kept = rows.where(same.exists() | (F.col("v") > numbers.agg(F.max("id")).scalar()))
    listed = kept.where(F.col("v").isin(numbers.union(rows.sparkSession.range(7, 8))))
    return listed.select("v", numbers.agg(F.sum("id")).scalar().alias("all"))


TIMES = ([10, 11, 12, 13, 14, 15], [25], [25, None], [10], [40])


@program("append", rows=TIMES)
def watermark_of_a_column_in_sql(rows: DataFrame) -> DataFrame:
    rows.withColumn("t", F.timestamp_seconds("v")).createOrReplaceTempView("timed")
    return rows.sparkSession.sql(
        "SELECT cast(window.start AS long) AS start, count(*) AS n FROM timed WATERMARK t DELAY OF INTERVAL 10 SECONDS "
        "GROUP BY window(t, '5 seconds')"
    )


@program("append", rows=TIMES)
def watermark_of_an_expression_in_sql(rows: DataFrame) -> DataFrame:
    rows.createOrReplaceTempView("untimed")
    return rows.sparkSession.sql(
        "SELECT cast(window.end AS long) AS end, max(v) AS m FROM untimed WATERMARK timestamp_seconds(v) AS t "
        "DELAY OF INTERVAL 10 SECONDS GROUP BY window(t, '5 seconds')"
    )


@program("append", rows=([10, 11], [17], [25], [35], [40], [90]))
def sessions_in_sql_whose_gap_is_a_case(rows: DataFrame) -> DataFrame:
    timed = rows.withColumn("t", F.timestamp_seconds("v")).withWatermark("t", "10 seconds")
    timed.createOrReplaceTempView("sessions")
    return rows.sparkSession.sql(
        "SELECT cast(session_window.start AS long) AS start, cast(session_window.end AS long) AS end, v % 2 AS odd, "
        "count(*) AS n FROM sessions GROUP BY session_window(t, CASE WHEN v > 20 THEN '10 seconds' ELSE '3 seconds' "
        "END), v % 2 HAVING count(*) > 0"
    )


@program("complete", rows=([1], [1]), others=([1],))
def constants_in_the_branches_of_a_union(rows: DataFrame, others: DataFrame) -> DataFrame:
    one, other = rows.withColumn("name", F.lit("one")), others.withColumn("name", F.lit("other"))
    return one.union(other).groupBy("name").count()
