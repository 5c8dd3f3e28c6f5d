"""Compares the results of the flights pipelines with answers that Spark SQL computes from the input alone.

    python pipelines/verify_flights.py /data/flights.parquet /data/out

Batch queries with window functions, sharing no code with the pipelines. Prints one JSON line
``{"rows": ..., "lost": ..., "duplicated": ..., "wrong": ...}`` and exits with 1 unless the last three are 0.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass

from pyspark.sql import DataFrame, SparkSession

ROTATIONS = """
WITH flights AS (
  SELECT *,
    coalesce(tailnum, concat('row-', row_id)) AS aircraft,
    CAST(unix_millis(event_time) + dep_delay * 60000 AS BIGINT) AS departure_ms
  FROM input
), arrivals AS (
  SELECT *, departure_ms + CAST(air_time * 60000 AS BIGINT) AS arrival_ms FROM flights
)
SELECT row_id, aircraft AS tailnum, carrier, origin, dest,
  row_number() OVER aircraft_flights AS leg,
  lag(dest) OVER aircraft_flights AS previous_dest,
  CAST(floor((departure_ms - lag(arrival_ms) OVER aircraft_flights) / 60000) AS BIGINT) AS ground_minutes,
  count(*) OVER (PARTITION BY aircraft, dest ORDER BY row_id ROWS UNBOUNDED PRECEDING) AS visits_of_dest,
  count(*) OVER (
    PARTITION BY aircraft ORDER BY unix_millis(event_time) * 1000000 + row_id
    RANGE BETWEEN 86399999999999 PRECEDING AND CURRENT ROW
  ) AS legs_in_24h
FROM arrivals
WINDOW aircraft_flights AS (PARTITION BY aircraft ORDER BY row_id)
"""
"""Every flight of an aircraft with what it did before; an unknown aircraft is one of its own per flight.

The last window orders by time and row in one number, so that its range reaches back one day less a millisecond and
never includes a later row of the same minute.
"""

CARRIERS = """
SELECT carrier, count(*) AS flights, sum(dep_delay) AS total_dep_delay, avg(dep_delay) AS avg_dep_delay,
  avg(arr_delay) AS avg_arr_delay
FROM input GROUP BY carrier
"""
"""What the last update of each carrier must say."""


@dataclass(frozen=True)
class Difference:
    """``rows`` were expected; ``lost`` are missing, ``duplicated`` are there too often, ``wrong`` have other values."""

    rows: int
    lost: int
    duplicated: int
    wrong: int

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.rows + other.rows,
            self.lost + other.lost,
            self.duplicated + other.duplicated,
            self.wrong + other.wrong,
        )

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong)


def compare_rotations(spark: SparkSession, found: DataFrame) -> Difference:
    """Every flight exactly once, each column as the window functions say."""
    expected = spark.sql(ROTATIONS).cache()
    found = found.select(*expected.columns).cache()
    rows, ids = expected.count(), found.select("row_id").distinct().count()
    wrong = found.exceptAll(expected).join(expected.select("row_id"), "row_id", "left_semi")
    repeated = found.count() - ids
    return Difference(rows, rows - ids, repeated, max(0, wrong.count() - repeated))


def compare_carriers(spark: SparkSession, found: DataFrame) -> Difference:
    """A carrier's updates carry the counts 1 to n, each once; the last one has the totals.

    Sums of doubles are compared to nine digits, since their order is not defined.
    """
    expected = spark.sql(CARRIERS)
    found = found.cache()
    rows = expected.selectExpr("sum(flights)").first()[0]
    found.createOrReplaceTempView("found")
    expected.createOrReplaceTempView("expected")
    updates = found.join(expected.selectExpr("carrier", "flights AS n"), "carrier").where("flights BETWEEN 1 AND n")
    distinct = updates.select("carrier", "flights").distinct().count()
    close = " AND ".join(
        f"abs(found.{name} - expected.{name}) <= 1e-9 * greatest(1, abs(expected.{name}))"
        for name in ("total_dep_delay", "avg_dep_delay", "avg_arr_delay")
    )
    right = spark.sql(f"SELECT DISTINCT found.carrier FROM found JOIN expected USING (carrier, flights) WHERE {close}")
    wrong = expected.count() - right.count() + found.count() - updates.count()
    return Difference(rows, rows - distinct, updates.count() - distinct, wrong)


def verify(flights: str, output: str) -> Difference:
    """Reads both result directories as any Spark user would, and compares them."""
    spark = (
        SparkSession.builder.master(f"local[{os.cpu_count()}]")
        .appName("verify flights")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "8")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        spark.read.parquet(flights).createOrReplaceTempView("input")
        rotations = compare_rotations(spark, spark.read.parquet(f"{output}/rotations"))
        merged = spark.read.option("mergeSchema", "true").parquet(f"{output}/carrier_delays")
        return rotations + compare_carriers(spark, merged)
    finally:
        spark.stop()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: verify_flights.py FLIGHTS_FILE OUTPUT_DIRECTORY")
    difference = verify(sys.argv[1], sys.argv[2])
    sys.stdout.write(json.dumps(asdict(difference)) + "\n")
    sys.exit(0 if difference.is_exact else 1)
