"""PySpark programs with generators and Python functions. Spark and the engine run the same functions."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import Row, StringType, StructType

SCHEMA = (
    "id LONG, words STRING, numbers ARRAY<INT>, facts MAP<STRING, DOUBLE>, amount DOUBLE, price DECIMAL(10,2), "
    "at TIMESTAMP, day DATE, people ARRAY<STRUCT<name: STRING, age: INT>>"
)

JSON_NAMES = ("words", "numbers", "nothing", "facts", "id")
ODD_JSON = (
    '{"a": 1, "b": 1.50, "a": null}',
    '{"a": "x", "a": "y\\u00e9\\n\\"", "b": {"c": [1, null, "z"], "d": -0.0}}',
    "{'a': true, 'b': ''} and more",
    '{"a": 1, "b"',
    '{"a": {"a": 2}}',
    '[{"a": 1}]',
    '"a"',
    "",
    "null",
    '{"A": 1, "b": 1e3}',
    '{"a": 12345678901234567890123, "b": NaN}',
)


def pipeline(spark: SparkSession, source: str, path: str, output: str, *names: str) -> None:
    """Starts the queries below that are named, or all of them."""
    rows = spark.readStream.format(source).schema(SCHEMA).load(path)
    spark.udf.register("doubled", lambda number: None if number is None else number * 2, "long")
    rows.createOrReplaceTempView("rows")
    known = queries(spark, rows)
    for name in names or known:
        known[name].writeStream.format("parquet").queryName(name).start(f"{output}/{name}")


def queries(spark: SparkSession, rows: DataFrame) -> dict[str, DataFrame]:
    """Returns all queries by their names."""
    return {**generators(spark, rows), **scalars(spark, rows), **vectorised(rows), **whole_batches(rows)}


def generators(spark: SparkSession, rows: DataFrame) -> dict[str, DataFrame]:
    return {
        "words": rows.select(F.explode(F.split("words", " ")).alias("word"), "id"),
        "outer": rows.select("id", F.explode_outer("numbers").alias("number")),
        "positions": rows.select("id", F.posexplode("numbers"), "numbers"),
        "facts": rows.select("id", F.posexplode_outer("facts").alias("pos", "fact", "value")),
        "people": rows.select("id", F.inline("people")),
        "people_outer": rows.filter("id % 2 = 0").select("id", F.inline_outer("people")),
        "stacked": rows.selectExpr("id", "stack(2, words, id, 'x', 'left', -1L) AS (text, number, more)"),
        "replaced": rows.select("id", "words", "amount")
        .na.fill(0.5, "amount")
        .na.replace(["", "a b"], ["-", "+"], "words"),
        "complete": rows.select("id", "words", "amount").na.drop(),
        "nearly_complete": rows.na.drop(thresh=len(rows.columns) - 1),
        "not_empty": rows.select("id", "words", "amount", "numbers").na.drop(
            "all", subset=["words", "amount", "numbers"]
        ),
        "unpivoted": rows.select("id", "amount", F.size("numbers").cast("double").alias("n")).unpivot(
            ["id"], ["amount", "n"], "name", "number"
        ),
        "members": rows.select("id", F.json_tuple(F.to_json(F.struct("words", "numbers", "facts", "id")), *JSON_NAMES)),
        "odd_members": rows.where("id = 1")
        .select(F.explode(F.array(*map(F.lit, ODD_JSON))).alias("text"))
        .select("text", F.json_tuple("text", "a", "b", "a").alias("first", "second", "third")),
        "views": spark.sql(
            "SELECT id, number, fact FROM rows LATERAL VIEW OUTER explode(numbers) AS number "
            "LATERAL VIEW explode(facts) AS fact, value WHERE number > 1 OR number IS NULL"
        ),
    }


@F.udf(returnType=StringType())
def shout(text: str | None, mark: str = "!") -> str | None:
    return None if text is None else text.upper() + mark


def changed(value: Any) -> Any:
    return value


def scalars(spark: SparkSession, rows: DataFrame) -> dict[str, DataFrame]:
    one_more = F.udf(lambda n: n + 1, "long")
    length = F.udf(lambda text: len(text or ""), "int")
    now = F.udf(lambda: dt.date(2026, 1, 2), "date").asNondeterministic()
    pair = F.udf(lambda n, text: (n, text), "struct<n: long, text: string>")
    row = F.udf(lambda n: Row(n=n, half=n / 2), "struct<n: long, half: double>")
    listed = F.udf(lambda numbers: [n for n in numbers or [] if n is not None], "array<int>")
    counted = F.udf(lambda facts: {k: int(v or 0) for k, v in (facts or {}).items()}, "map<string, int>")
    next_day = F.udf(lambda day: day and day + dt.timedelta(days=1), "date")
    later = F.udf(lambda at: at and at + dt.timedelta(hours=1), "timestamp")
    halved = F.udf(lambda price: price and price / Decimal(2), "decimal(12,4)")
    oldest = F.udf(lambda people: max((p.age for p in people or [] if p and p.age is not None), default=None), "int")
    pickled = {
        kind: F.udf(changed, kind, useArrow=False)
        for kind in ("string", "int", "long", "double", "boolean", "date", "byte", "binary")
    }
    return {
        "shouted": rows.select(
            "id", shout("words").alias("loud"), shout(F.col("words"), mark=F.lit("?")).alias("asked")
        ),
        "chained": rows.select(one_more(one_more("id")).alias("two"), one_more(length("words")).alias("size")),
        "branches": rows.select(F.when(F.col("id") > 3, one_more("id")).otherwise(F.lit(0)).alias("n")),
        "filtered": rows.filter(length("words") > 3).select("id", now().alias("today"), F.upper(shout("words"))),
        "nested": rows.select(
            pair("id", "words").alias("pair"),
            row("id")["half"].alias("half"),
            listed("numbers").alias("listed"),
            counted("facts").alias("counted"),
            oldest("people").alias("oldest"),
        ),
        "times": rows.select(
            "id", next_day("day").alias("next"), later("at").alias("later"), halved("price").alias("h")
        ),
        "grouped_later": rows.select(F.explode(listed("numbers")).alias("n")).select(one_more("n").alias("m")),
        "pickled": rows.select(
            *(pickled[kind]("id").alias(f"id_{kind}") for kind in ("string", "int", "double", "boolean", "byte")),
            *(pickled[kind]("words").alias(f"words_{kind}") for kind in ("string", "long", "boolean", "binary")),
            *(pickled[kind]("amount").alias(f"amount_{kind}") for kind in ("string", "int", "double")),
            pickled["date"]("day").alias("day"),
        ),
        "registered": spark.sql("SELECT doubled(id) AS twice, doubled(doubled(id)) AS more FROM rows"),
    }


def vectorised(rows: DataFrame) -> dict[str, DataFrame]:
    @F.pandas_udf("double")
    def grown(amount: pd.Series, rate: pd.Series) -> pd.Series:
        return amount * (1 + rate)

    @F.pandas_udf("long")
    def negated(batches: Iterator[pd.Series]) -> Iterator[pd.Series]:
        for series in batches:
            yield -series

    @F.pandas_udf("struct<words: string, size: long>")
    def described(words: pd.Series) -> pd.DataFrame:
        return pd.DataFrame({"words": words.str.lower(), "size": words.str.len().fillna(0).astype("int64")})

    @F.arrow_udf("string")
    def reversed_(words: pa.Array) -> pa.Array:
        return pc.utf8_reverse(words)

    @F.arrow_udf("long")
    def summed(batches: Iterator[tuple[pa.Array, pa.Array]]) -> Iterator[pa.Array]:
        for left, right in batches:
            yield pc.add(left, right)

    @F.pandas_udf("timestamp")
    def shifted(at: pd.Series) -> pd.Series:
        return at + pd.Timedelta(hours=1)

    return {
        "pandas": rows.select("id", grown("amount", F.lit(0.5)).alias("grown"), described("words").alias("described")),
        "pandas_named": rows.select(grown(rate=F.col("amount"), amount=F.lit(2.0)).alias("grown")),
        "iterators": rows.select(negated("id").alias("negated"), summed("id", F.col("id") * 2).alias("summed")),
        "arrow": rows.select(reversed_("words").alias("reversed"), "at", shifted("at").alias("shifted")),
    }


def whole_batches(rows: DataFrame) -> dict[str, DataFrame]:
    def large(frames: Iterator[pd.DataFrame]) -> Iterator[pd.DataFrame]:
        for frame in frames:
            yield frame[frame["id"] > 3][["words", "id", "at"]]

    def counted(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            yield pa.record_batch([batch.column("id"), pc.list_value_length(batch.column("numbers"))], ["id", "n"])

    made = StructType().add("id", "long").add("words", "string").add("at", "timestamp")
    return {"in_pandas": rows.mapInPandas(large, made), "in_arrow": rows.mapInArrow(counted, "id LONG, n INT")}
