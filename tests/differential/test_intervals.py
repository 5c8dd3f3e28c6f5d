"""The delay of a watermark and the bounds of a join are what Spark reads in the same text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from ckpt_runtime.api.intervals import parse_interval, parse_offset

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
OFFSETS = ["-1 hour 30 minutes", "-1 hour -30 minutes", "interval -3 seconds", "-250 milliseconds", "-0.5 seconds"]
DELAYS = ["1 month", "2 years 1 month", "3 months -40 days", "1 MONTH 1.5 seconds"]
REFUSED = ["1.5 minutes", "1 fortnight", "minutes", "", "interval", "1 second x"]


def test_spark_reads_the_same(spark: SparkSession) -> None:
    epoch = "timestamp'1970-01-01 00:00:00'"
    texts = [*TEXTS, *OFFSETS]
    columns = [f"unix_millis({epoch} + cast('{text}' as interval))" for text in texts]
    theirs = dict(zip(texts, spark.sql(f"select {', '.join(columns)}").head() or (), strict=True))
    assert {text: parse_offset(text) for text in texts} == theirs
    assert {text: parse_interval(text) for text in TEXTS} == {text: theirs[text] for text in TEXTS}


@pytest.mark.parametrize("text", REFUSED)
def test_spark_refuses_the_same(spark: SparkSession, text: str) -> None:
    rows = spark.sql(f"select try_cast('{text}' as interval) is null").collect()
    assert rows[0][0]
    for parse in (parse_interval, parse_offset):
        with pytest.raises(ValueError, match="one or more numbers"):
            parse(text)


def test_months_of_a_delay_have_31_days_as_in_spark(spark: SparkSession) -> None:
    catalyst = spark._jvm.org.apache.spark.sql.catalyst
    read, delay = catalyst.util.IntervalUtils.fromIntervalString, catalyst.plans.logical.EventTimeWatermark.getDelayMs
    assert {text: parse_interval(text) for text in (*TEXTS, *DELAYS)} == {
        text: delay(read(text)) for text in (*TEXTS, *DELAYS)
    }


@pytest.mark.parametrize("text", DELAYS)
def test_months_are_no_bound_of_a_join(text: str) -> None:
    with pytest.raises(ValueError, match="one or more numbers"):
        parse_offset(text)
