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
  FROM {input}
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
FROM {input} GROUP BY carrier
"""
"""What the last update of each carrier must say."""


MEASURES = ("total_dep_delay", "avg_dep_delay", "avg_arr_delay")


@dataclass(frozen=True)
class Difference:
    """``rows`` were expected; ``lost`` are missing, ``duplicated`` are there too often, ``wrong`` have other values."""

    rows: int
    lost: int
    duplicated: int
    wrong: int

    def __add__(self, other: Difference) -> Difference:
        return Difference(
            self.rows + other.rows, self.lost + other.lost, self.duplicated + other.duplicated, self.wrong + other.wrong
        )

    @property
    def is_exact(self) -> bool:
        return not (self.lost or self.duplicated or self.wrong)


def compare_rotations(spark: SparkSession, flights: DataFrame, found: DataFrame) -> Difference:
    """Every flight exactly once, each column as the window functions say."""
    expected = spark.sql(ROTATIONS, input=flights)
    same = " AND ".join(f"found.{name} <=> expected.{name}" for name in expected.columns)
    query = f"""
    SELECT (SELECT count(*) FROM {{input}}) AS rows, count(DISTINCT expected.row_id) AS distinct,
      count(expected.row_id) AS known, count_if(NOT ({same})) AS wrong
    FROM {{found}} AS found LEFT JOIN {{expected}} AS expected ON found.row_id = expected.row_id
    """
    return _difference(spark.sql(query, input=flights, found=found, expected=expected))


def compare_carriers(spark: SparkSession, flights: DataFrame, found: DataFrame) -> Difference:
    """A carrier's updates carry the counts 1 to n, each once; the last one has the totals.

    Sums of doubles are compared to nine digits, since their order is not defined.
    """
    expected = spark.sql(CARRIERS, input=flights)
    close = " AND ".join(
        f"(found.{name} <=> expected.{name}"
        f" OR abs(found.{name} - expected.{name}) <= 1e-9 * greatest(1, abs(expected.{name})))"
        for name in MEASURES
    )
    query = f"""
    WITH updates AS (
      SELECT carrier, found.flights AS number, found.carrier IS NOT NULL AS is_update, expected.flights AS last,
        coalesce(found.flights BETWEEN 1 AND expected.flights, false) AS known,
        coalesce({close}, false) AS close
      FROM {{found}} AS found FULL JOIN {{expected}} AS expected USING (carrier)
    ), carriers AS (
      SELECT coalesce(max(last), 0) AS rows, count(DISTINCT number) FILTER (WHERE known) AS distinct,
        count_if(known) AS known, count_if(is_update AND NOT known) + count_if(number = last AND NOT close) AS wrong
      FROM updates GROUP BY carrier
    )
    SELECT sum(rows) AS rows, sum(distinct) AS distinct, sum(known) AS known, sum(wrong) AS wrong FROM carriers
    """
    return _difference(spark.sql(query, found=found, expected=expected))


def _difference(sums: DataFrame) -> Difference:
    """Of one row: what was expected, what of it was found, once and in all, and what is not right."""
    (row,) = sums.collect()
    return Difference(row.rows, row.rows - row.distinct, row.known - row.distinct, row.wrong)


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
        source = spark.read.parquet(flights)
        rotations = spark.read.parquet(f"{output}/rotations")
        carriers = spark.read.option("mergeSchema", "true").parquet(f"{output}/carrier_delays")
        return compare_rotations(spark, source, rotations) + compare_carriers(spark, source, carriers)
    finally:
        spark.stop()


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: verify_flights.py FLIGHTS_FILE OUTPUT_DIRECTORY")
    difference = verify(sys.argv[1], sys.argv[2])
    sys.stdout.write(json.dumps(asdict(difference)) + "\n")
    sys.exit(0 if difference.is_exact else 1)
