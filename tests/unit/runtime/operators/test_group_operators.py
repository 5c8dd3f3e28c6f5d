"""Aggregations over groups that end, sessions and deduplication: what comes out and when, and what state survives."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.graph.aggregates import AGGREGATES
from ckpt_runtime.graph.specs import DeduplicateSpec, GroupSpec, TableSpec
from ckpt_runtime.operators.aggregates.accumulator import AggregateFailedError
from ckpt_runtime.operators.aggregates.registry import ACCUMULATORS
from ckpt_runtime.operators.errors import OperatorError
from ckpt_runtime.operators.operator import MAX_WATERMARK
from tests.support.groups import TIME, GroupJob, Row, aggregate
from tests.support.inline_snapshots import CANONICAL

EPOCH = datetime(1970, 1, 1)
INT = pa.int64()
BACKENDS = pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])


def at(millis: float) -> datetime:
    return EPOCH + timedelta(milliseconds=millis)


COUNT, SUM = aggregate("Count", result=INT), aggregate("Sum", "v", result=INT)
WINDOWS = pa.schema([("end", TIME), ("k", pa.string()), ("v", INT)])
SESSIONS = pa.schema([("start", TIME), ("end", TIME), ("k", pa.string()), ("v", INT)])


def windows(mode: str = "append", *aggregates: Any) -> GroupSpec:
    return GroupSpec(WINDOWS, ("end", "k"), aggregates or (COUNT, SUM), mode, "end")


def row(end: float, k: Any, v: Any = 1) -> Row:
    return {"end": at(end), "k": k, "v": v}


def brief(rows: list[Row]) -> list[tuple[Any, ...]]:
    """Rows as (end in ms, key, results)."""
    return sorted((((r["end"] - EPOCH) // timedelta(milliseconds=1), *list(r.values())[1:]) for r in rows), key=str)


def test_group_comes_out_once_when_the_watermark_has_reached_its_end() -> None:
    job = GroupJob(windows())
    assert job.process(row(20, "a", 1), row(20, "a", 2), row(30, "a", 4), row(20, None, None)) == []
    assert job.watermark(19) == []
    assert brief(job.watermark(20)) == [(20, "a", 2, 3), (20, None, 1, None)]
    assert job.living == 1
    assert job.process(row(20, "a", 8), row(21, "a", 8)) == []
    assert job.late == 1
    assert job.watermark(20) == []
    assert brief(job.watermark(99)) == [(21, "a", 1, 8), (30, "a", 1, 4)]
    assert job.living == 0


def test_updated_group_comes_out_with_each_batch_and_its_state_is_removed_without_a_row() -> None:
    job = GroupJob(windows("update"))
    assert brief(job.process(row(20, "a", 1), row(20, "b", 2), row(20, "a", 4))) == [(20, "a", 2, 5), (20, "b", 1, 2)]
    assert brief(job.process(row(20, "a", 8))) == [(20, "a", 3, 13)]
    assert job.watermark(20) == []
    assert job.living == 0
    assert job.process(row(20, "a", 8)) == []
    assert job.late == 1


@pytest.mark.parametrize("parallelism", [1, 3])
def test_total_of_no_rows_comes_out_once_with_the_first_checkpoint(parallelism: int) -> None:
    total = GroupSpec(WINDOWS, ("v",), (COUNT, aggregate("Max", "k", result=pa.string())), "update", total=True)
    job = GroupJob(total, parallelism)
    assert [list(row.values()) for row in job.checkpoint()] == [[0, 0, None]]
    assert job.checkpoint() == []
    job.restart(parallelism)
    assert job.checkpoint() == []
    used = GroupJob(total, parallelism)
    assert [list(row.values()) for row in used.process(row(20, "a", 0))] == [[0, 1, "a"]]
    assert used.checkpoint() == []


@BACKENDS
def test_bitmaps_of_groups_are_combined_with_shorter_and_longer_ones_and_without_nulls(backend: str) -> None:
    some, every = (aggregate(f"Bitmap{name}Agg", "b", result=pa.binary()) for name in ("Or", "And"))
    places = aggregate("BitmapConstructAgg", "v", result=pa.binary())
    schema = pa.schema([("k", pa.string()), ("v", INT), ("b", pa.binary())])
    job = GroupJob(GroupSpec(schema, ("k",), (some, every, places), "update"), backend=backend)
    [_, empty] = job.process({"k": "a", "v": 32_767, "b": b"\x0f" * 5_000}, {"k": "b", "v": None, "b": None})
    assert [*empty.values()] == ["b", bytes(4_096), b"\xff" * 4_096, bytes(4_096)]
    job.restart(backend=backend)
    [row] = job.process({"k": "a", "v": 8, "b": b"\x3c\xf0"}, {"k": "a", "v": 0, "b": None})
    bitmaps = b"\x3f\xff" + b"\x0f" * 4_094, b"\x0c" + bytes(4_095), b"\1\1" + bytes(4_093) + b"\x80"
    assert tuple(row.values()) == ("a", *bitmaps)
    with pytest.raises(AggregateFailedError, match="position 32768 is not from 0 to 32767"):
        job.process({"k": "a", "v": 32_768, "b": None})
    job.close()


def test_end_of_data_leaves_open_groups_in_state_for_the_job_that_continues() -> None:
    job = GroupJob(windows())
    job.process(row(20, "a", 1))
    assert job.watermark(MAX_WATERMARK) == []
    job.restart()
    assert job.process(row(20, "a", 2)) == []
    assert brief(job.watermark(20)) == [(20, "a", 2, 3)]


@BACKENDS
def test_aggregates_that_a_changed_program_adds_removes_or_reorders_keep_their_own_state(backend: str) -> None:
    most = aggregate("Max", "v", result=INT)
    job = GroupJob(windows("append", COUNT, SUM), backend=backend)
    job.process(row(20, "a", 1), row(20, "a", 2))
    job.restart(spec=windows("append", most, SUM), backend=backend)
    job.process(row(20, "a", 1), row(30, "b", 5))
    job.restart(spec=windows("append", COUNT, SUM, most), backend=backend)
    job.process(row(20, "a", 3))
    assert brief(job.watermark(30)) == [(20, "a", 1, 7, 3), (30, "b", 0, 5, 5)]
    job.close()


@pytest.mark.parametrize(
    ("before", "after", "form"), [("update", "complete", "results"), ("complete", "update", "groups")]
)
def test_state_in_the_form_of_another_output_mode_is_refused(before: str, after: str, form: str) -> None:
    job = GroupJob(windows(before))
    job.process(row(20, "a"))
    with pytest.raises(OperatorError, match=f"it keeps it as '{form}' now"):
        job.restart(spec=windows(after))


def test_canonical_savepoint_is_read_by_the_other_backend() -> None:
    job = GroupJob(windows(), backend="hashmap")
    job.process(row(20, "a", 1))
    job.restart(2, properties=CANONICAL, backend="rocksdb")
    job.process(row(20, "a", 2))
    job.restart(1, properties=CANONICAL, backend="hashmap")
    assert brief(job.watermark(20)) == [(20, "a", 2, 3)]


def session(start: float, k: Any, v: int = 1, gap: float = 10) -> Row:
    return {"start": at(start), "end": at(start + gap), "k": k, "v": v}


def sessions(*aggregates: Any) -> GroupSpec:
    return GroupSpec(SESSIONS, ("k",), aggregates or (COUNT, SUM), "append", "end", ("start", "end"))


def spans(rows: list[Row]) -> list[tuple[Any, ...]]:
    return sorted(
        ((r["start"] - EPOCH) // timedelta(milliseconds=1), *brief([dict(list(r.items())[1:])])[0]) for r in rows
    )


@BACKENDS
def test_row_that_connects_sessions_merges_them_and_their_aggregates(backend: str) -> None:
    job = GroupJob(sessions(), backend=backend)
    job.process(session(10, "a", 1), session(30, "a", 2), session(12, "b", 4))
    assert job.living == 3
    job.process(session(20, "a", 8))
    assert job.living == 2
    assert spans(job.watermark(22)) == [(12, 22, "b", 1, 4)]
    assert spans(job.watermark(40)) == [(10, 40, "a", 3, 11)]
    job.close()


def test_sessions_that_touch_are_one_and_those_with_a_moment_between_them_are_two() -> None:
    job = GroupJob(sessions())
    job.process(session(10, "a"), session(20, "a"), session(30.001, "a"), session(5, "a", gap=100), session(11, "c"))
    assert spans(job.watermark(1_000)) == [(5, 105, "a", 4, 4), (11, 21, "c", 1, 1)]
    job.process(session(2_000, "a"), session(2_010, "a"), session(2_020.001, "a"))
    assert [(first, count) for first, _, _, count, _ in spans(job.watermark(9_000))] == [(2_000, 2), (2_020, 1)]


@BACKENDS
def test_complete_sessions_never_end_and_report_the_sessions_that_they_absorbed(backend: str) -> None:
    spec = GroupSpec(SESSIONS, ("k",), (COUNT, SUM), "complete", None, ("start", "end"))
    job, table = GroupJob(spec, backend=backend), GroupJob(TableSpec(spec), backend=backend)

    def result(*rows: Row) -> list[tuple[Any, ...]]:
        job.process(*rows)
        operator = table.subtasks[0].operator
        operator.process_batch(pa.RecordBatch.from_pylist(job.checkpoint(), spec.output_schema), 0)
        operator.finish()
        return spans([dict(row) for batch in operator._rows() for row in batch.to_pylist()])

    assert result(session(10, "a", 1), session(30, "a", 2), session(12, "b", 4), session(60, "a", 5)) == [
        (10, 20, "a", 1, 1), (12, 22, "b", 1, 4), (30, 40, "a", 1, 2), (60, 70, "a", 1, 5),
    ]  # fmt: skip
    job.watermark(10_000)
    assert result(session(20, "a", 8), session(5, "b", 1)) == [
        (5, 22, "b", 2, 5), (10, 40, "a", 3, 11), (60, 70, "a", 1, 5),
    ]  # fmt: skip
    job.restart(backend=backend)
    assert result(session(40, "a", 1, gap=25), session(100, None, 7)) == [
        (5, 22, "b", 2, 5), (10, 70, "a", 5, 17), (100, 110, None, 1, 7),
    ]  # fmt: skip
    job.close()
    table.close()


KEYS = pa.schema([("c", INT), ("t", TIME), ("k", pa.string())])


def event(c: int, time: float | None, k: Any) -> Row:
    return {"c": c, "t": None if time is None else at(time), "k": k}


@BACKENDS
def test_first_row_of_a_key_passes_and_a_key_of_event_time_is_forgotten_with_it(backend: str) -> None:
    job = GroupJob(DeduplicateSpec(KEYS, ("t", "k"), "t", forget_by="t"), backend=backend)
    passed = job.process(
        event(1, 10, "a"), event(2, 10, "a"), event(3, None, "a"), event(4, 11, "a"), event(5, None, "a")
    )
    assert [row["c"] for row in passed] == [1, 3, 4]
    assert job.process(event(6, 11, "a")) == []
    job.watermark(10)
    job.restart(2, backend=backend)
    assert job.living == 2
    assert job.process(event(7, 10, "a"), event(8, None, "a"), event(9, 11, "a")) == []
    assert job.late == 1
    assert job.watermark(11) == []
    assert job.living == 1
    job.close()


@BACKENDS
def test_key_within_a_watermark_passes_again_when_the_delay_after_its_first_row_is_over(backend: str) -> None:
    """The delay begins at 1970 for a row without event time, as in Spark."""
    job = GroupJob(DeduplicateSpec(KEYS, ("k",), "t", within_ms=10), backend=backend)
    rows = event(1, 10, "a"), event(2, 15, "a"), event(6, None, "c"), event(7, 15, "c")
    assert [row["c"] for row in job.process(*rows)] == [1, 6]
    job.watermark(19)
    assert [row["c"] for row in job.process(event(3, 25, "a"), event(8, 25, "c"))] == [8]
    job.restart(backend=backend)
    job.watermark(20)
    assert [row["c"] for row in job.process(event(4, 26, "a"), event(5, 20, "b"))] == [4]
    assert job.late == 1
    job.close()


def test_keys_without_event_time_are_kept_for_ever() -> None:
    job = GroupJob(DeduplicateSpec(KEYS, ("k",)))
    job.process(event(1, 10, "a"), event(2, 10, None))
    job.watermark(10**9)
    assert job.process(event(3, 1, "a"), event(4, 1, None)) == []
    assert job.late == 0


class Oracle:
    """Windows and sessions by the definition, row by row, from lists of all rows that were on time."""

    def __init__(self, *, sessions: bool) -> None:
        self.sessions = sessions
        self.open: dict[Any, list[tuple[float, float, int]]] = defaultdict(list)
        self.watermark = 0.0
        self.late = 0

    def process(self, rows: list[Row]) -> None:
        for r in rows:
            end = (r["end"] - EPOCH) / timedelta(milliseconds=1)
            start = (r["start"] - EPOCH) / timedelta(milliseconds=1) if self.sessions else end
            if end <= self.watermark:
                self.late += 1
            else:
                self.open[r["k"]].append((start, end, r["v"]))

    def advance(self, watermark: float) -> Counter[tuple[Any, ...]]:
        """What ends now, as (start, end, key, count, sum)."""
        self.watermark = watermark
        ended: Counter[tuple[Any, ...]] = Counter()
        for key, rows in self.open.items():
            groups: list[list[tuple[float, float, int]]] = []
            for one in sorted(rows):
                touches = groups and one[0] <= max(end for _, end, _ in groups[-1]) and self.sessions
                same = groups and not self.sessions and groups[-1][0][1] == one[1]
                if touches or same:
                    groups[-1].append(one)
                else:
                    groups.append([one])
            for group in groups:
                start, end = group[0][0], max(end for _, end, _ in group)
                if end <= watermark:
                    ended[(start, end, key, len(group), sum(v for _, _, v in group))] += 1
                    for one in group:
                        rows.remove(one)
        return ended


@BACKENDS
@pytest.mark.parametrize("make", [windows, sessions])
def test_random_rows_with_restarts_and_rescales_give_each_group_exactly_once(
    backend: str, make: Callable[[], GroupSpec]
) -> None:
    generator = random.Random(backend)
    by_session = make is sessions
    job, oracle = GroupJob(make(), 2, backend), Oracle(sessions=by_session)
    now = 1_000
    for step in range(60):
        rows = []
        for _ in range(generator.randrange(1, 80)):
            start = now + generator.randrange(-30, 60)
            key = generator.choice(["a", "b", "", None, "été", *map(str, range(20))])
            rows.append(session(start, key, generator.randrange(9)) if by_session else row(start // 20 * 20, key, 3))
        job.process(*rows)
        oracle.process(rows)
        if step % 7 == 3:
            job.restart(generator.randrange(1, 4), backend=backend)
        now += generator.randrange(30)
        ended = job.watermark(now)
        found = Counter(
            (_ms(r["start" if by_session else "end"]), _ms(r["end"]), r["k"], r["Count()"], r["Sum(v)"]) for r in ended
        )
        assert found == oracle.advance(now)
        assert job.late == oracle.late
    assert job.late
    job.close()


def _ms(time: datetime) -> float:
    return (time - EPOCH) / timedelta(milliseconds=1)


def test_every_function_of_the_table_has_an_accumulator() -> None:
    assert {function.accumulator for function in AGGREGATES.values()} == set(ACCUMULATORS)


DECIMAL = pa.decimal128(38, 0)


@pytest.mark.parametrize(("ansi", "wanted"), [(True, None), (False, -(2**63))])
def test_sum_that_leaves_64_bits_fails_with_ansi_and_wraps_around_without(ansi: bool, wanted: int | None) -> None:
    job = GroupJob(windows("append", aggregate("Sum", "v", result=INT, ansi=ansi)))
    job.process(row(20, "a", 2**63 - 1), row(20, "a", 1))
    if wanted is None:
        with pytest.raises(AggregateFailedError, match="exceeded 64 bits"):
            job.watermark(20)
    else:
        assert brief(job.watermark(20)) == [(20, "a", wanted)]


@BACKENDS
def test_tried_sum_that_has_left_64_bits_stays_null_also_in_a_session_that_others_join(backend: str) -> None:
    tried = aggregate("Sum", "v", result=INT, ansi=False, settings={"tried": True})
    most = 2**63 - 1
    job = GroupJob(sessions(tried), backend=backend)
    job.process(session(10, "a", most), session(10, "a", 1), session(10, "b", most), session(30, "c", None))
    job.checkpoint()
    job.process(session(30, "a", -5), session(12, "b", -1), session(30, "d", -most), session(30, "d", -2))
    job.checkpoint()
    job.process(session(20, "a", -7), session(30, "d", most))
    found = {(key, total) for _, _, key, total in spans(job.watermark(50))}
    assert found == {("a", None), ("b", most - 1), ("c", None), ("d", None)}
    job.close()


@BACKENDS
def test_values_beside_the_greatest_ones_are_kept_through_checkpoints_and_sessions_that_others_join(
    backend: str,
) -> None:
    several = aggregate("MaxMinByK", "v", "v", result=pa.list_(INT), settings={"k": 2, "least": False})
    job = GroupJob(sessions(several), backend=backend)
    job.process(session(10, "a", 1), session(30, "a", 7), session(30, "a", 2), session(10, "b", None))
    job.checkpoint()
    job.process(session(20, "a", 4))
    assert spans(job.watermark(50)) == [(10, 20, "b", None), (10, 40, "a", [7, 4])]
    job.close()


@pytest.mark.parametrize("ansi", [True, False])
def test_decimal_sum_that_leaves_its_precision_fails_with_ansi_and_stays_null_without(ansi: bool) -> None:
    schema = pa.schema([("end", TIME), ("k", pa.string()), ("v", DECIMAL)])
    spec = GroupSpec(schema, ("end", "k"), (aggregate("Sum", "v", result=DECIMAL, ansi=ansi),), "append", "end")
    job = GroupJob(spec)
    most = Decimal(10**38 - 1)
    job.process(row(20, "a", most), row(20, "b", Decimal(1)), row(20, "c", None), row(20, "a", Decimal(1)))
    if ansi:
        with pytest.raises(AggregateFailedError, match="does not fit"):
            job.checkpoint()
        return
    job.checkpoint()
    job.process(row(20, "a", Decimal(-9)), row(20, "b", Decimal(2)))
    assert brief(job.watermark(20)) == [(20, "a", None), (20, "b", Decimal(3)), (20, "c", None)]


@pytest.mark.parametrize("ansi", [True, False])
def test_mean_of_decimals_that_leaves_its_precision_fails_with_ansi_and_is_null_without(ansi: bool) -> None:
    schema = pa.schema([("end", TIME), ("k", pa.string()), ("v", DECIMAL)])
    mean = aggregate("Average", "v", result=pa.decimal128(38, 4), ansi=ansi)
    job = GroupJob(GroupSpec(schema, ("end", "k"), (mean,), "append", "end"))
    job.process(row(20, "a", Decimal(10**34)), row(20, "b", Decimal(1)), row(20, "b", Decimal(2)))
    if ansi:
        with pytest.raises(AggregateFailedError, match="does not fit"):
            job.watermark(20)
        return
    assert brief(job.watermark(20)) == [(20, "a", None), (20, "b", Decimal("1.5"))]
