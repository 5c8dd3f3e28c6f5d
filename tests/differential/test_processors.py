"""Stateful processors in Spark and in the engine: the same class, the same batches, the same rows out."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.pipelines import group_functions
from tests.support.pipelines.side_processors import SCHEMA
from tests.support.side_by_side import Case, EngineRun, Rows, flat, in_spark, ordered

pytestmark = pytest.mark.spark

Both = Callable[..., tuple[Rows, Rows]]


@pytest.fixture
def both(spark: SparkSession, cluster: MiniCluster, tmp_path: Path) -> Both:
    """Runs a case in Spark and in the engine; the rows of each."""

    def run(case: Case, *, drain: bool = False) -> tuple[Rows, Rows]:
        theirs = flat(in_spark(spark, case, tmp_path))
        return ordered(theirs), ordered(EngineRun(cluster, case, tmp_path).rows(drain=drain))

    return run


def seconds(*values: int | None) -> pa.Array:
    """Timestamps so long after the epoch."""
    epoch = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
    times = [None if value is None else epoch + dt.timedelta(seconds=value) for value in values]
    return pa.array(times, pa.timestamp("us", tz="UTC"))


def words(*rows: tuple[str | None, int]) -> pa.Table:
    return pa.table(
        {
            "k": pa.array([key for key, _ in rows], pa.string()),
            "v": pa.array([number for _, number in rows], pa.int32()),
            "word": ["ab"[number % 2] for _, number in rows],
        }
    )


def timed(*rows: tuple[str, int | None]) -> pa.Table:
    return pa.table(
        {
            "k": [key for key, _ in rows],
            "v": pa.array([second or 0 for _, second in rows], pa.int32()),
            "t": seconds(*[second for _, second in rows]),
        }
    )


def composite() -> pa.Table:
    return pa.table(
        {
            "k": ["x"],
            "i": pa.array([1], pa.int32()),
            "f": pa.array([0.1], pa.float32()),
            "t": seconds(5),
            "n": pa.array([dt.datetime(2020, 1, 2, 3)], pa.timestamp("us")),
            "d": [dt.date(2020, 1, 1)],
            "c": pa.array([Decimal("1.20")], pa.decimal128(10, 2)),
            "b": [b"x"],
            "a": pa.array([[1, None]], pa.list_(pa.int32())),
            "m": pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int32())),
            "st": pa.array([{"x": 1, "y": "q"}], pa.struct([("x", pa.int32()), ("y", pa.string())])),
        }
    )


def test_every_type_in_rows_and_states(both: Both) -> None:
    theirs, ours = both(Case("EveryType", [composite(), composite()], SCHEMA))
    assert ours == theirs
    assert len(theirs) > 100


@pytest.mark.long
def test_every_method_of_lists_and_maps(both: Both) -> None:
    batches = [words(("x", 1), ("y", 2), ("x", 3), ("x", 4)), words(("y", 1), ("x", 5)), words(("x", 7))]
    theirs, ours = both(Case("States", batches, SCHEMA))
    assert ours == theirs


@pytest.mark.long
def test_odd_calls_of_states(both: Both) -> None:
    theirs, ours = both(Case("Odd", [words(("x", 1)), words(("x", 2))], SCHEMA))
    assert ours == theirs
    assert {"k": "x", "what": "e refused", "said": repr([True] * 6)} in theirs


@pytest.mark.long
def test_a_deleted_state_is_no_state(both: Both) -> None:
    theirs, ours = both(Case("Deleted", [words(("x", 1))], SCHEMA))
    assert ours == theirs
    assert {"k": "x", "what": "gone", "said": "'Error updating value state'"} in theirs


def test_habits_of_user_code_and_null_keys(both: Both) -> None:
    habits = ("ignores", "first", "twice", "empty", "tuple", "lazy", "partly", None)
    rows = [(habit, number) for number in range(3) for habit in habits]
    theirs, ours = both(Case("Habits", [words(*rows), words(*rows[:9]), words((None, 1))], SCHEMA))
    assert ours == theirs


@pytest.mark.long
def test_composite_keys_with_nulls(both: Both) -> None:
    table = pa.table({"k": ["x", None, "x", None], "j": pa.array([1, None, 1, 2], pa.int64()), "v": [1, 2, 3, 4]})
    theirs, ours = both(Case("Habits", [table, table], SCHEMA, keys=("k", "j")))
    assert ours == theirs


@pytest.mark.long
def test_nested_results_go_by_name(both: Both) -> None:
    schema = (
        "k STRING, st STRUCT<x: INT, y: STRING>, a ARRAY<STRUCT<x: INT, y: STRING>>, m MAP<STRING, INT>, t TIMESTAMP"
    )
    theirs, ours = both(Case("Nested", [composite()], schema))
    for row in ours:
        row["m"] = row["m"] and dict(row["m"])
        row["t"] = row["t"] and row["t"].replace(tzinfo=None)
    assert ordered(ours) == theirs


@pytest.mark.long
def test_states_expire(both: Both) -> None:
    batches = [words(("x", 1)), words(("x", 2), ("y", 1)), words(("y", 1))]
    theirs, ours = both(Case("Expiring", batches, SCHEMA, time_mode="ProcessingTime"))
    assert ours == theirs


def test_timers_of_the_clock(both: Both) -> None:
    batches = [words(("x", 1), ("y", 1), ("x", 2)), words(("x", 1))]
    theirs, ours = both(Case("ClockTimers", batches, SCHEMA, time_mode="ProcessingTime"))
    assert ours == theirs


@pytest.mark.long
def test_odd_timers(both: Both) -> None:
    """Twice, deleted, absent, deleted by their own callback; for keys without state."""
    case = Case("OddTimers", [words(("x", 1), ("y", 2)), words(("x", 2))], SCHEMA, time_mode="ProcessingTime")
    theirs, ours = both(case)
    assert ours == theirs
    assert sum(row["what"].startswith("fired") for row in theirs) == 6


EVENTS = [
    timed(("x", 10), ("y", 3), ("x", 4)),
    timed(("x", 8), ("x", 9), ("y", 7), ("x", 12)),  # 8 and 7 are late: the watermark is at 8
    timed(("x", 10), ("y", 11), ("x", 30)),
    timed(("x", None), ("y", 28), ("y", 29)),
]


def event_case(**configuration: str) -> Case:
    return Case(
        "EventTimers", EVENTS, SCHEMA, time_mode="EventTime", watermark=("t", "2 seconds"), configuration=configuration
    )


@pytest.mark.long
def test_timers_of_event_time_and_late_rows(both: Both) -> None:
    theirs, ours = both(event_case())
    assert ours == theirs
    assert sum(row["what"] == "fired" for row in theirs) == 6


@pytest.mark.row("io.2")
def test_rows_of_a_readers_batch_have_no_order(both: Both) -> None:
    """The reader gives the latest first, by ones: as in Spark they make those late that come with the next batch."""
    batches = [
        timed(*[("xyz"[second % 3], second) for second in range(40, 0, -1)], ("x", None), ("y", 0), ("x", -7)),
        timed(("x", 37), ("y", 38), ("z", 39), ("z", 90), ("x", 41), ("y", None)),
        timed(("x", 100), ("x", 88), ("y", 89)),
    ]
    case = Case(
        "Passed", batches, SCHEMA, mode="Append", time_mode="EventTime", watermark=("t", "2 seconds"), chunk=1,
        configuration={
            "execution.stateful-processor.trigger.type": "BUFFER", "execution.buffer-timeout.interval": "0 ms"
        },
    )  # fmt: skip
    theirs, ours = both(case)
    assert ours == theirs
    said = [row["said"] for row in theirs]
    assert "-7" not in said, "event time begins at 1970"
    assert (said.count("37"), said.count("38"), said.count("39"), said.count("88"), said.count("89")) == (1, 1, 2, 0, 1)


@pytest.mark.long
@pytest.mark.parametrize("fires", [True, False])
def test_the_end_of_data(both: Both, fires: bool) -> None:
    """Spark keeps the timers beyond its last watermark; the engine fires them, unless an option forbids it."""
    case = event_case(**{"execution.event-time.ends-with-data": str(fires).lower()})
    theirs, ours = both(case, drain=True)
    further = [row for row in ours if row not in theirs]
    assert [row for row in ours if row in theirs] == theirs
    assert [row["what"] for row in further] == (["fired"] * 2 if fires else [])
    assert all(str(2**63 - 1) in row["said"] for row in further), "event time is at its end, but for the last timer"


@pytest.mark.long
@pytest.mark.parametrize("parallelism", [1, 2])
def test_at_the_end_of_a_reader_timers_fire_that_its_last_range_has_reached(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path, parallelism: int
) -> None:
    """And no others, when those are to stay."""
    case = Case(
        "EventTimers", [timed(("x", 95), ("y", 200), ("z", 193))], SCHEMA, time_mode="EventTime",
        watermark=("t", "5 seconds"), ends=True,
        configuration={"execution.event-time.ends-with-data": "false"},
    )  # fmt: skip
    theirs = ordered(flat(in_spark(spark, case, tmp_path)))
    assert ordered(EngineRun(cluster, case, tmp_path, parallelism=parallelism).rows()) == theirs
    assert [row["k"] for row in theirs if row["what"] == "fired"] == ["x"]


@pytest.mark.long
@pytest.mark.parametrize("time_mode", ["None", "ProcessingTime"])
def test_a_processor_without_event_time_behind_a_watermark(both: Both, time_mode: str) -> None:
    """Its rows are those of a trigger, none is late, and the watermark changes neither."""
    theirs, ours = both(Case("Total", EVENTS, SCHEMA, time_mode=time_mode, watermark=("t", "2 seconds")))
    assert ours == theirs
    assert sum(int(row["what"].split()[0]) for row in theirs) == sum(batch.num_rows for batch in EVENTS)


@pytest.mark.long
def test_processor_after_another_processor_gives_the_rows_of_spark(both: Both) -> None:
    batches = [words(("x", 1), ("y", 2), ("x", 3)), words(("x", 5), ("y", 1)), words(("z", 1))]
    theirs, ours = both(Case("Total", batches, SCHEMA, mode="Append", second="Total"))
    assert ours == theirs


@pytest.mark.long
def test_a_state_with_a_wider_schema(spark: SparkSession, cluster: MiniCluster, tmp_path: Path) -> None:
    first = Case("Total", [words(("x", 1), ("y", 2))], SCHEMA, encoding="avro")
    then = Case("WiderTotal", [words(("x", 3), ("z", 4)), words(("x", 1))], SCHEMA, encoding="avro")
    theirs = flat(in_spark(spark, first, tmp_path)) + flat(in_spark(spark, then, tmp_path, first=1))
    run = EngineRun(cluster, first, tmp_path / "first")
    ours = run.rows()
    ours += EngineRun(cluster, then, tmp_path / "then", savepoint=run.savepoint, first=1).rows()
    assert ordered(ours) == ordered(theirs)


@pytest.mark.long
def test_an_unread_row_does_not_reach_the_next_call(both: Both) -> None:
    theirs, ours = both(Case("Habits", [words(("first", 1), ("first", 2)), words(("first", 3))], SCHEMA))
    assert ours == theirs
    assert [row["said"] for row in theirs] == ["1", "3"]


@pytest.mark.row("ps.3")
def test_function_of_groups_with_timeouts_of_event_time_gives_the_rows_of_spark(both: Both) -> None:
    case = Case(
        "sessions", EVENTS, group_functions.OUTPUT, mode="Append", timeout="EventTimeTimeout",
        time_mode="EventTime", watermark=("t", "2 seconds"),
    )  # fmt: skip
    theirs, ours = both(case)
    assert ours == theirs
    assert sum(row["what"].startswith("ended") for row in theirs) >= 2


@pytest.mark.long
@pytest.mark.row("ps.3")
def test_function_of_groups_continues_from_a_savepoint_with_another_parallelism(
    spark: SparkSession, cluster: MiniCluster, tmp_path: Path
) -> None:
    batches = [words(*[(name, 1) for name in "abcabdc"]), words(*[(name, 2) for name in "xabyc"])]
    case = Case("counts", batches, group_functions.OUTPUT, timeout="NoTimeout")
    theirs = flat(in_spark(spark, case, tmp_path))
    first = EngineRun(cluster, replace(case, batches=batches[:1]), tmp_path / "first")
    ours = first.rows()
    then = EngineRun(
        cluster, replace(case, batches=batches[1:]), tmp_path / "then", first.savepoint, first=1, parallelism=2
    )
    assert ordered(ours + then.rows()) == ordered(theirs)


@pytest.mark.long
@pytest.mark.row("ps.3")
def test_function_of_groups_with_a_timeout_of_the_clock_is_called_when_it_is_over(
    cluster: MiniCluster, tmp_path: Path
) -> None:
    case = Case("soon", [words(("x", 1), ("y", 1), ("x", 2))], group_functions.OUTPUT, timeout="ProcessingTimeTimeout")
    rows = EngineRun(cluster, case, tmp_path).rows(drain=True)
    seen = [(row["k"], row["what"], row["n"]) for row in rows]
    assert set(seen) <= {("x", "rows", 2), ("y", "rows", 1), ("x", "timed out", None), ("y", "timed out", None)}
    assert {("x", "rows", 2), ("y", "rows", 1)} <= set(seen)
