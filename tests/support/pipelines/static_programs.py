"""Joins of a stream with static tables in PySpark. Spark and the engine run the same functions."""

from __future__ import annotations

import datetime
from contextlib import redirect_stdout
from decimal import Decimal
from io import StringIO

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

EVENTS = "id LONG, k STRING, n INT, price DECIMAL(10,2), at TIMESTAMP, tags ARRAY<STRING>, ratio DOUBLE"


def pipeline(spark: SparkSession, directory: str, output: str, names: str, rate: str = "0") -> None:
    """Starts the queries below whose names are given, with commas between them."""
    events = spark.readStream.format("replay").option("rowsPerSecond", rate).schema(EVENTS).load(f"{directory}/events")
    frames = queries(spark, events, directory)
    for name in names.split(","):
        frame = frames[name]
        frame.writeStream.format("parquet").queryName(name).start(f"{output}/{name}")


def queries(spark: SparkSession, events: DataFrame, directory: str) -> dict[str, DataFrame]:
    """Returns all queries by their names."""
    people = spark.read.parquet(f"{directory}/people")
    spark.read.csv(f"{directory}/codes.csv", header=True, inferSchema=True).createOrReplaceTempView("codes")
    labels = spark.read.schema("k STRING, label STRING").json(f"{directory}/labels.json")
    lines = spark.read.text(f"{directory}/lines.txt")
    local = spark.createDataFrame([("a", 1), ("b", None), (None, 3), ("a", 4)], "k STRING, weight INT")
    pandas = spark.createDataFrame(pd.DataFrame({"n": [1, 2, 2], "text": ["one", "two", "zwei"]}))
    arrow = spark.createDataFrame(
        pa.table(
            {
                "price": pa.array([Decimal("1.50"), Decimal("2.00"), None], pa.decimal128(10, 2)),
                "since": pa.array([datetime.datetime(1969, 12, 31, 23), None, datetime.datetime(2026, 1, 1)]).cast(
                    pa.timestamp("us", "UTC")
                ),
                "parts": pa.array([[("x", 1)], [], None], pa.map_(pa.string(), pa.int64())),
            }
        )
    )
    events.createOrReplaceTempView("events")
    local.createOrReplaceTempView("weights")
    shown = StringIO()
    with redirect_stdout(shown):
        people.orderBy("k", "name").show(3, truncate=2)
        local.where("weight > 9").show(vertical=True)
    rows = [row.asDict() for row in people.orderBy("k", "name").collect()]
    collected = (
        *(
            rows,
            sorted(map(str, local.repartition(3).collect())),
            arrow.orderBy("since").tail(2),
            local.count(),
            people.first(),
            nothing_of(people).collect(),
        ),
        *(nothing_of(people).isEmpty(), people.isEmpty(), spark.sql("SELECT max(weight) m FROM weights").head()),
        *(labels.orderBy("label").toPandas().to_dict("list"), [*local.orderBy("weight").toLocalIterator()]),
    )
    counts = counts_of_changes(spark, people, local, directory)
    per_country = people.groupBy("country").agg(F.count("*").alias("people"), F.max("born").alias("youngest"))
    nothing = nothing_of(people)
    return {
        "using": events.join(people, "k"),
        "left": events.join(people, "k", "left_outer"),
        "right": people.join(events, "k", "right_outer"),
        "semi": events.join(people, "k", "left_semi"),
        "anti": events.join(people, "k", "left_anti"),
        "aggregated": events.join(F.broadcast(per_country), events.k == per_country.country, "left"),
        "joined_statics": events.join(people.join(labels, "k"), ["k"]).select("id", "name", "label"),
        "two_in_a_row": events.join(local, "k").join(labels, "k", "left").select("id", "weight", "label"),
        "nulls_match": events.join(local, events.k.eqNullSafe(local.k)).select("id", "weight"),
        "range": events.join(spark.range(1, 3).toDF("other"), F.col("n") == F.col("other")),
        "between": events.join(local, F.expr("n > weight AND weight IS NOT NULL"), "left").select("id", "weight"),
        "collected": events.select("id", F.lit(shown.getvalue()), F.lit(str((collected, counts)))),
        "written": events.join(spark.read.parquet(f"{directory}/weights"), "k").join(
            spark.read.csv(f"{directory}/weights.csv", header=True, inferSchema=True).toDF("k", "other"), "k", "left"
        ),
        "tables": events.join(spark.table("static_codes"), "k").join(spark.table("static_people"), "k", "left"),
        "mixed": events.alias("e")
        .join(local.alias("w"), F.expr("e.k = w.k AND n + weight > 2 AND weight < 4"), "left")
        .select("id", "weight"),
        "cross": events.filter("id < 5").crossJoin(pandas.toDF("other", "text")),
        "pandas": events.join(pandas, "n"),
        "decimals": events.join(arrow, "price", "left"),
        "times": events.join(arrow.select("since"), F.col("at") >= F.col("since")).select("id", "since"),
        "doubles": events.join(spark.sql("VALUES (0.0D), (double('NaN')), (1.5D) AS t(ratio)"), "ratio"),
        "arrays": events.join(spark.sql("SELECT array('x', null) tags, 1 one"), "tags"),
        "empty": events.join(nothing, "k", "left").select("id", "name"),
        "nothing": events.join(nothing, "k"),
        "text": events.join(lines, F.col("k") == F.col("value"), "left_semi"),
        "sql": spark.sql("SELECT e.id, c.* FROM events e JOIN codes c ON e.n = c.code WHERE c.name LIKE '%e%'"),
        "sql_values": spark.sql("SELECT id, v FROM events JOIN VALUES ('a', 'A'), ('b', 'B') AS t(k, v) USING (k)"),
        "with": spark.sql(
            "WITH heavy AS (SELECT k, max(weight) w FROM weights GROUP BY k) "
            "SELECT id, w FROM events NATURAL JOIN heavy"
        ),
        "one_value": spark.sql(
            "SELECT id, n < (SELECT max(weight) FROM weights) AS less, "
            "(SELECT k FROM weights WHERE weight > 9 LIMIT 1) AS none "
            "FROM events WHERE n > (SELECT min(weight) FROM weights) AND id < (SELECT 150)"
        ),
        "value_of_key": spark.sql(
            "SELECT id, (SELECT max(weight) FROM weights w WHERE w.k = e.k) AS most FROM events e "
            "WHERE n < (SELECT count(*) FROM weights w WHERE w.k = e.k)"
        ),
        "in": spark.sql("SELECT id FROM events WHERE k IN (SELECT k FROM weights WHERE weight > 1) AND n > 0"),
        "not_in": spark.sql("SELECT id FROM events WHERE k NOT IN (SELECT k FROM weights WHERE weight = 1)"),
        "in_or": spark.sql("SELECT id FROM events WHERE n = 2 OR k IN (SELECT k FROM weights WHERE weight > 1)"),
        "exists": spark.sql("SELECT id FROM events e WHERE NOT EXISTS (SELECT 1 FROM weights w WHERE w.weight = e.n)"),
        "after": events.withWatermark("at", "1 hour")
        .join(people, "k")
        .groupBy(F.window("at", "1 day"), "country")
        .count()
        .select("window.start", "country", "count"),
    }


def nothing_of(people: DataFrame) -> DataFrame:
    return people.filter("name = 'nobody'")


def counts_of_changes(spark: SparkSession, people: DataFrame, local: DataFrame, directory: str) -> list[int]:
    """Writes files and tables, some of them twice in the same way, and counts their rows each time."""
    weights = local.write.partitionBy("k")
    weights.mode("overwrite").parquet(f"{directory}/weights")
    local.coalesce(1).write.mode("overwrite").option("header", True).csv(path=f"{directory}/weights.csv")
    people.select("k", "name").write.mode("overwrite").saveAsTable("static_people")
    spark.sql("DROP TABLE IF EXISTS static_codes")
    spark.sql("CREATE TABLE static_codes (k STRING, code INT) USING parquet")
    counts = [spark.table("static_codes").count()]
    for _ in range(2):
        spark.sql("INSERT INTO static_codes VALUES ('a', 1), ('b', NULL)")
        weights.mode("append").parquet(f"{directory}/weights")
        counts += [spark.table("static_codes").count(), spark.read.parquet(f"{directory}/weights").count()]
    return counts
