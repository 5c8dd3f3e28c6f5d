"""Sources of DataFrames: ranges, restores, and frames that give other rows when they are read again."""

from __future__ import annotations

import time
from datetime import datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.frame_sources import FrameSource
from tests.support.patience import patient
from tests.unit.runtime.connectors.split_jobs import Job

NUMBERS = pa.schema([("n", pa.int64()), ("name", pa.string())])


class Table:
    """What a source needs of a DataFrame."""

    def __init__(self, numbers: range, name: str = "row") -> None:
        self.numbers, self.name = numbers, name

    def toArrow(self) -> pa.Table:
        return pa.table({"n": list(self.numbers), "name": [f"{self.name} {n}" for n in self.numbers]}, NUMBERS)


class Growing(FrameSource):
    there = 10
    called = "row"

    @classmethod
    def name(cls) -> str:
        return "growing"

    def latest(self, spark: Any) -> int:
        return self.there

    def first(self) -> int:
        return 0

    def read(self, spark: Any, start: int, end: int) -> Table:
        return Table(range(start, end), self.called)


class Whole(FrameSource):
    @classmethod
    def name(cls) -> str:
        return "whole"

    def read(self, spark: Any, start: Any, end: Any) -> Table:
        assert start is None
        assert end is None
        return Table(range(25))


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frames of these tests need none."""
    monkeypatch.setattr(FrameSource, "_spark", staticmethod(lambda: None))
    monkeypatch.setattr(Growing, "there", 10)
    monkeypatch.setattr(Growing, "called", "row")


def read(job: Job, rows: int) -> None:
    """Reads until so many rows have come; frames are computed by a thread."""
    until = time.monotonic() + patient(60)
    while len(job.rows) < rows:
        assert time.monotonic() < until
        job.discover()
        job.read()


@pytest.mark.row("ends.2")
def test_frame_without_ranges_is_a_bounded_source_with_any_trigger() -> None:
    job = Job(Whole, {}, NUMBERS, parallelism=2, most_rows=10)
    read(job, 25)
    assert [row["n"] for row in job.rows] == list(range(25))
    job.discover()
    assert job.ended
    job.close()


@pytest.mark.row("ends.2")
def test_ranges_follow_each_other_through_restores_at_other_parallelisms() -> None:
    job = Job(Growing, {}, NUMBERS, parallelism=2, most_rows=4)
    read(job, 4)
    state, kept = job.checkpoint(1, 3), job.rows
    assert 4 <= len(kept) < 10
    job.close()
    Growing.there = 30
    job = Job(Growing, {}, NUMBERS, parallelism=3, restored=state, most_rows=4)
    read(job, 30 - len(kept))
    assert sorted(row["n"] for row in kept + job.rows) == list(range(30))
    job.close()


class Pages(Growing):
    """Its ranges end at a page and a row of it."""

    def latest(self, spark: Any) -> Any:
        return (self.there // 10, self.there % 10)

    def first(self) -> Any:
        return (0, 0)

    def read(self, spark: Any, start: Any, end: Any) -> Table:
        return Table(range(start[0] * 10 + start[1], end[0] * 10 + end[1]))


@pytest.mark.row("ends.2")
def test_ends_of_ranges_are_the_same_values_before_and_after_a_restore() -> None:
    job = Job(Pages, {}, NUMBERS)
    read(job, 10)
    state = job.checkpoint(1)
    again = Job(Pages, {}, NUMBERS, restored=state)
    Growing.there = 13
    read(again, 3)
    assert [row["n"] for row in again.rows] == [10, 11, 12]
    (item,) = again.checkpoint(2)[0][0][0].items
    assert item["state"] == {"ranges": 2, "end": [1, 3]}
    job.close()
    again.close()


@pytest.mark.parametrize("end", [datetime(2026, 11, 1), Decimal("1.5"), float("nan"), {1}])
def test_end_of_a_range_that_is_no_json_is_refused_with_its_method(monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    monkeypatch.setattr(Growing, "there", end)
    job = Job(Growing, {}, NUMBERS)
    with pytest.raises(
        TypeError, match=r"Growing.latest\(\) returned .*, which is not a value of JSON: .*; return a text"
    ):
        read(job, 1)
    job.close()
    monkeypatch.setattr(Growing, "first", lambda source: end)
    with pytest.raises(TypeError, match=r"Growing.first\(\) returned "):
        Job(Growing, {}, NUMBERS)


@pytest.mark.row("ends.2")
def test_frame_that_gives_other_rows_when_it_is_read_again_fails_the_job() -> None:
    job = Job(Growing, {}, NUMBERS, most_rows=4)
    read(job, 4)
    state = job.checkpoint(1)
    job.close()
    Growing.called = "another"
    job = Job(Growing, {}, NUMBERS, restored=state, most_rows=4)
    with pytest.raises(ValueError, match="Growing: the DataFrame of 0 to 10 had other rows when it was read again"):
        read(job, 6)
    job.close()


def test_frame_with_other_columns_is_refused_with_their_names() -> None:
    job = Job(Whole, {}, pa.schema([("n", pa.int64())]))
    with pytest.raises(ValueError, match="has the columns n, name, but n are declared"):
        read(job, 25)
    job.close()


def test_source_outside_of_a_program_of_pyspark_says_that_it_has_no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FrameSource, "_spark", None)
    job = Job(Whole, {}, NUMBERS)
    with pytest.raises(RuntimeError, match="source 'whole' has no Spark"):
        read(job, 25)
    job.close()
