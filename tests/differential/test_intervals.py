"""The interval of a trigger is what Spark reads in the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_runtime.frontend.program import parse_interval

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXTS = [
    "10 minutes",
    "1 minute 30 seconds",
    "1 week",
    "2 weeks 3 days 4 hours 5 minutes 6 seconds 7 milliseconds",
    "interval 1 hour",
    "INTERVAL 1 Hour -5 Minutes",
    " 1   day\t2 hours ",
    "1.5 seconds",
    "0.25 second",
    "1500 milliseconds",
    "2500000 microseconds",
    "0 seconds",
    "1 second 1 second",
]
REFUSED = ["1.5 minutes", "1 fortnight", "minutes", "", "interval", "1 second x"]
TOO_LONG = ["1 month", "2 years 1 month", "-1 second"]


def test_spark_reads_the_same(spark: SparkSession) -> None:
    epoch = "timestamp'1970-01-01 00:00:00'"
    columns = [f"unix_millis({epoch} + cast('{text}' as interval))" for text in TEXTS]
    theirs = dict(zip(TEXTS, spark.sql(f"select {', '.join(columns)}").head() or (), strict=True))
    assert {text: parse_interval(text) for text in TEXTS} == theirs


@pytest.mark.parametrize("text", REFUSED)
def test_spark_refuses_the_same(spark: SparkSession, text: str) -> None:
    rows = spark.sql(f"select try_cast('{text}' as interval) is null").collect()
    assert rows[0][0]
    with pytest.raises(ValueError, match="one or more numbers"):
        parse_interval(text)


@pytest.mark.parametrize("text", TOO_LONG)
def test_triggers_of_spark_refuse_months_and_negative_intervals_too(spark: SparkSession, text: str) -> None:
    triggers = spark._jvm.org.apache.spark.sql.streaming.Trigger
    with pytest.raises(Exception, match="(?i)month|negative|interval"):
        triggers.ProcessingTime(text)
    with pytest.raises(ValueError, match="one or more numbers"):
        parse_interval(text)
