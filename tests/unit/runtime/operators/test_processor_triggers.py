"""What one call of handleInputRows covers, and what waits behind gathered rows."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise, product
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from ckpt_runtime.graph.specs import ProcessSpec
from ckpt_runtime.operators import stateful_processor
from ckpt_runtime.operators.errors import LateResultError
from ckpt_runtime.operators.operator import MAX_WATERMARK, UNNUMBERED
from ckpt_runtime.operators.stateful_processor import StatefulProcessorOperator
from tests.unit.runtime.operators.conftest import Harness

OUT = pa.schema([("k", pa.string()), ("what", pa.string())])
IN = pa.schema([("k", pa.string()), ("v", pa.int64()), ("t", pa.timestamp("ms"))])
TRIGGER = "execution.stateful-processor.trigger"
CHECKPOINT = {f"{TRIGGER}.type": "CHECKPOINT"}
INTERVAL = {f"{TRIGGER}.type": "PROCESSING_TIME", f"{TRIGGER}.interval": "1 s"}
TRIGGERS: list[dict[str, str]] = [{}, CHECKPOINT, INTERVAL]


class Calls(StatefulProcessor):
    """One row for each call; rows with ``v`` below 0 register a timer at ``-v``."""

    def init(self, handle: Any) -> None:
        self.handle = handle

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        values = [r.v for r in rows]
        for value in values:
            if value < 0:
                self.handle.registerTimer(-value)
        yield Row(k=key[0], what=f"{values} at {timerValues.getCurrentWatermarkInMs()}")

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield Row(k=key[0], what=f"fired {expiredTimerInfo.getExpiryTimeInMs()}")

    def close(self) -> None:
        pass


def operator(time_mode: str = "None", processor: Any = Calls) -> StatefulProcessorOperator:
    column = "t" if time_mode == "EventTime" else None
    return StatefulProcessorOperator(ProcessSpec(("k",), processor(), OUT, "Update", time_mode, column), IN)


def rows(*given: tuple[str | None, int]) -> pa.RecordBatch:
    """Rows whose event time is ``abs(v)`` ms."""
    times = [dt.datetime(1970, 1, 1) + dt.timedelta(milliseconds=abs(v)) for _, v in given]
    return pa.record_batch([[k for k, _ in given], [v for _, v in given], times], schema=IN)


def said(events: list[Any]) -> list[Any]:
    return [(event["k"], event["what"]) if isinstance(event, dict) else event for event in events]


def test_a_buffer_is_cut_between_keys_only() -> None:
    ordered, ends = operator().together(rows(("x", 1), ("y", 2), ("x", 3), (None, 4), ("y", 5))) or ((), ())
    assert ordered.column("v").to_pylist() == [1, 3, 2, 5, 4]
    assert list(ends) == [2, 4, 5]
    assert operator().together(rows(("x", 1), ("y", 2))) is None


def test_rows_between_two_checkpoints_come_in_one_call(harness: type[Harness]) -> None:
    run = harness(operator(), configuration=CHECKPOINT)
    assert run.process(rows(("x", 1), ("y", 2))) == []
    assert run.process(rows(("x", 3), (None, 4))) == []
    assert run.operator.together(rows(("x", 1), ("x", 2))) is None
    run.operator.prepare_snapshot(1)
    assert said(run.take()) == [("x", "[1, 3] at -1"), ("y", "[2] at -1"), (None, "[4] at -1")]
    run.operator.prepare_snapshot(2)
    assert run.take() == []
    run.process(rows(("x", 5)))
    run.operator.finish()
    assert said(run.take()) == [("x", "[5] at -1")]


@pytest.mark.parametrize("trigger", [CHECKPOINT, INTERVAL])
def test_batch_of_spark_ends_a_trigger(harness: type[Harness], trigger: dict[str, str]) -> None:
    """Operators behind this one may hold the source up until they know that the batch has ended."""
    run = harness(operator("EventTime"), configuration=trigger)
    run.operator.process_coming_watermark(20, UNNUMBERED)
    assert run.process(rows(("x", 30), ("x", -35))) == [("coming", 20, UNNUMBERED)]
    run.operator.process_watermark(20)
    run.operator.process_coming_watermark(35, 2)
    assert said(run.take()) == [("x", "[30, -35] at 20"), ("watermark", 20), ("coming", 35, 2)]
    run.operator.process_watermark(35)
    run.operator.process_coming_watermark(35, 3)
    assert said(run.take()) == [("x", "fired 35"), ("watermark", 35), ("coming", 35, 3)]


def test_rows_of_an_interval_come_at_its_end(harness: type[Harness]) -> None:
    run = harness(operator(), configuration=INTERVAL)
    run.now = 5_300
    assert run.process(rows(("x", 1))) == []
    assert run.timer == 6_000
    run.now = 5_900
    assert run.process(rows(("x", 2))) == []
    run.operator.prepare_snapshot(1)
    assert run.take() == []
    assert said(run.advance(6_000)) == [("x", "[1, 2] at -1")]
    assert run.timer is None
    run.process(rows(("x", 3)))
    assert run.timer == 7_000
    run.now -= 3_600_000  # the clock is put back: the call comes when the rest of the interval has passed
    run.operator.on_processing_time(run.now)
    assert said(run.take()) == [("x", "[3] at -1")]


@pytest.mark.parametrize("after", [INTERVAL, CHECKPOINT, {}])
def test_gathered_rows_are_part_of_a_checkpoint(harness: type[Harness], after: dict[str, str]) -> None:
    run = harness(operator(), configuration=INTERVAL)
    run.process(rows(("x", 1), ("y", 2), ("x", 3)))
    restored = harness(operator(), run.snapshot(), configuration=after)
    assert restored.timer == (1_000 if after is INTERVAL else None)
    restored.operator.prepare_snapshot(2)
    events = restored.take() + restored.process(rows(("x", 4))) + restored.advance(1_000)
    restored.operator.finish()
    events += restored.take()
    calls = ["[1, 3, 4] at -1"] if after is INTERVAL else ["[1, 3] at -1", "[4] at -1"]
    assert [what for key, what in said(events) if key == "x"] == calls
    assert ("y", "[2] at -1") in said(events)
    again = harness(operator(), restored.snapshot(), configuration={})
    assert again.take() == []


def test_user_code_sees_the_coming_watermark_of_its_batch(harness: type[Harness]) -> None:
    """Rows are late, and timers fire, by the one before it; both are state."""
    run = harness(operator("EventTime"))
    run.operator.process_coming_watermark(50, 1)
    assert run.process(rows(("a", -20))) == [("coming", 50, 1), {"k": "a", "what": "[-20] at 50"}]
    assert run.watermark(10) == [("watermark", 10)]
    run.operator.process_coming_watermark(90, 2)
    assert run.process(rows(("b", 5), ("b", 15))) == [("coming", 90, 2), {"k": "b", "what": "[15] at 90"}]
    restored = harness(operator("EventTime"), handles=run.snapshot(), lists=run.lists())
    assert restored.process(rows(("c", 10), ("c", 11))) == [{"k": "c", "what": "[11] at 90"}]
    assert restored.watermark(50) == [{"k": "a", "what": "fired 20"}, ("watermark", 50)]


def test_watermark_and_timers_wait_until_gathered_rows_are_processed(harness: type[Harness]) -> None:
    run = harness(operator("EventTime"), configuration=CHECKPOINT)
    assert run.watermark(10) == [("watermark", 10)]
    run.process(rows(("x", -20), ("x", 9)))
    assert run.watermark(30) == []
    assert run.process(rows(("x", 15))) == []
    run.operator.prepare_snapshot(1)
    assert said(run.take()) == [("x", "[-20, 15] at 10"), ("x", "fired 20"), ("watermark", 30)]
    run.process(rows(("x", 29), ("x", 31)))
    assert said(run.watermark(MAX_WATERMARK)) == [("x", "[31] at 30"), ("watermark", MAX_WATERMARK)]


def test_timers_of_the_clock_wait_until_gathered_rows_are_processed(harness: type[Harness]) -> None:
    run = harness(operator("ProcessingTime"), configuration=INTERVAL)
    run.process(rows(("x", -1_500)))
    assert said(run.advance(1_000)) == [("x", "[-1500] at 0")]
    run.now = 1_400
    run.process(rows(("x", 7)))
    assert run.advance(1_600) == []
    assert said(run.advance(2_000)) == [("x", "[7] at 0"), ("x", "fired 1500")]


def test_timer_at_the_end_of_time_does_not_fire(harness: type[Harness]) -> None:
    run = harness(operator("EventTime"))
    run.process(never(50))
    assert said(run.watermark(MAX_WATERMARK)) == [("x", "fired 50"), ("watermark", MAX_WATERMARK)]


def never(other: int) -> pa.RecordBatch:
    """Timers at the end of all time and at another one."""
    epoch = dt.datetime(1970, 1, 1, 0, 0, 1)
    return pa.record_batch([["x", "x"], [-MAX_WATERMARK, -other], [epoch, epoch]], schema=IN)


def test_event_time_may_stay_where_it_was_at_the_end_of_data(harness: type[Harness]) -> None:
    run = harness(operator("EventTime"), configuration={"execution.event-time.ends-with-data": "false"})
    run.process(rows(("x", -50), ("x", -10)))
    assert said(run.watermark(20)) == [("x", "fired 10"), ("watermark", 20)]
    assert run.watermark(MAX_WATERMARK) == [("watermark", MAX_WATERMARK)]
    goes_on = harness(operator("EventTime"), run.snapshot(), run.lists())
    assert said(goes_on.watermark(60)) == [("x", "fired 50"), ("watermark", 60)]


class Restless(Calls):
    """Each timer registers another one that is due."""

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        self.handle.registerTimer(expiredTimerInfo.getExpiryTimeInMs() - 1)
        yield Row(k=key[0], what="fired")


@pytest.mark.parametrize("time_mode", ["ProcessingTime", "EventTime"])
def test_timers_that_register_due_timers_let_other_work_through(
    harness: type[Harness], time_mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stateful_processor, "MOST_CALLBACKS", 5)
    run = harness(operator(time_mode, Restless))
    run.now = 40
    run.process(rows(("x", -30)))
    if time_mode == "EventTime":
        assert run.watermark(35).count({"k": "x", "what": "fired"}) == 5
    else:
        assert len(run.take()) == 0
        assert run.timer is not None
    assert len(run.advance(41)) == 5
    assert run.timer is not None


class Echo(Calls):
    """Gives each row back; outside of time mode None a timer follows each row, and its number comes when it fires."""

    def __init__(self, timers: bool) -> None:
        self.timers = timers

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            if self.timers:
                self.handle.registerTimer(row.v)
            yield Row(k=key[0], what=str(row.v))


class Walk:
    """Random rows, watermarks, moments and checkpoints, then a restore with another trigger, more of these, the end.

    ``v`` is the number of a row, its event time and the time of its timer. None of the rows is late.
    """

    def __init__(self, harness: type[Harness], time_mode: str, backend: str, watermarks: bool, choice: Random) -> None:
        self.harness, self.backend, self.choice, self.watermarks = harness, backend, choice, watermarks
        mode = choice.choice(["Append", "Update"])
        column = "t" if time_mode == "EventTime" else None
        self.spec = ProcessSpec(("k",), Echo(time_mode != "None"), OUT, mode, time_mode, column)
        self.given, self.now = 0, 10_000
        self.watermark: int | None = None
        self.events: list[Any] = []

    def open(self, trigger: dict[str, str], handles: Any = (), lists: Any = ()) -> None:
        self.run = self.harness(StatefulProcessorOperator(self.spec, IN), handles, lists, trigger, self.backend)
        self.run.now = self.now
        if self.watermark is not None:  # which whatever stands in front of it sends again
            self.run.watermark(self.watermark)

    def steps(self, count: int) -> None:
        for _ in range(count):
            step = self.choice.choice(["rows", "rows", "watermark", "checkpoint", "clock"])
            if step == "rows":
                numbers = range(self.given + 1, self.given + self.choice.randrange(2, 6))
                self.given = numbers[-1]
                self.run.operator.process_batch(rows(*[(self.choice.choice("xyz"), n) for n in numbers]), 0)
            elif step == "watermark" and self.watermarks and self.given:
                self.watermark = self.given
                self.run.operator.process_watermark(self.given)
            elif step == "checkpoint":
                self.run.operator.prepare_snapshot(1)
            elif step == "clock":
                self.run.now += self.choice.randrange(100, 1500)
                if self.run.timer is not None and self.run.timer <= self.run.now:
                    self.run.timer = None
                    self.run.operator.on_processing_time(self.run.now)

    def restored(self, trigger: dict[str, str]) -> None:
        self.run.operator.prepare_snapshot(2)
        lists, handles = self.run.lists(), self.run.snapshot()
        self.now = self.run.now
        self.close()
        self.open(trigger, handles, lists)

    def end(self) -> None:
        self.run.operator.process_watermark(MAX_WATERMARK)
        self.run.operator.finish()
        self.close()

    def close(self) -> None:
        self.events += self.run.take()
        self.run.operator.close()
        self.run.backend.close()


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("time_mode", ["None", "ProcessingTime", "EventTime"])
def test_processor_emits_every_row_before_its_watermark_with_any_trigger(
    harness: type[Harness], time_mode: str, backend: str
) -> None:
    walks = product(TRIGGERS, TRIGGERS, (True, False))
    if backend == "rocksdb":  # a database is slow to open
        walks = ((first, second, True) for first, second in pairwise([*TRIGGERS, {}]))
    for seed, (first, second, watermarks) in enumerate(walks):
        walk = Walk(harness, time_mode, backend, watermarks, Random(seed))
        walk.open(first)
        walk.steps(8)
        walk.restored(second)
        walk.steps(8)
        walk.end()
        case = (first, second, watermarks)
        said = Counter(event["what"] for event in walk.events if isinstance(event, dict))
        expected = [str(number) for number in range(1, walk.given + 1)]
        if time_mode != "None":
            expected += [f"fired {number}" for number in range(1, walk.given + 1)]
        assert said == Counter(expected), case
        reached = [event[1] for event in walk.events if isinstance(event, tuple)]
        assert reached == sorted(reached), case
        assert reached[-1] == MAX_WATERMARK, case
        assert walk.watermark is None or walk.watermark in reached, case
        passed = 0
        for event in walk.events:
            if isinstance(event, tuple):
                passed = event[1]
            elif not event["what"].startswith("fired"):
                assert int(event["what"]) > passed, case


class Shifted(Calls):
    """Gives each row with its event time, ``v`` ms earlier below 0, none for a ``v`` of 99; a timer gives its own."""

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.handle.registerTimer(row.v if row.v > 0 else 1_000)
            time = None if row.v == 99 else row.t + dt.timedelta(milliseconds=min(row.v, 0))
            yield Row(k=key[0], at=time)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        after_1970 = dt.timedelta(milliseconds=expiredTimerInfo.getExpiryTimeInMs())
        yield Row(k=key[0], at=dt.datetime(1970, 1, 1) + after_1970)


AT = pa.schema([("k", pa.string()), ("at", pa.timestamp("ms"))])


def with_event_time(time_mode: str = "EventTime") -> StatefulProcessorOperator:
    spec = ProcessSpec(("k",), Shifted(), AT, "Append", time_mode, "t", output_event_time="at")
    return StatefulProcessorOperator(spec, IN)


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_results_with_an_event_time_come_in_front_of_the_watermark_that_reaches_them(
    harness: type[Harness], trigger: dict[str, str]
) -> None:
    """Also those of the timers that it fires, and rows without event time."""
    run = harness(with_event_time(), configuration=trigger)
    run.operator.process_watermark(20)
    run.operator.process_batch(rows(("x", 25), ("x", 30)), 0)
    run.operator.process_watermark(28)
    run.operator.process_watermark(MAX_WATERMARK)
    events = [event if isinstance(event, tuple) else event["at"].microsecond // 1000 for event in run.take()]
    assert events == [("watermark", 20), 25, 30, 25, ("watermark", 28), 30, ("watermark", MAX_WATERMARK)]
    assert harness(with_event_time()).process(rows(("x", 99)))[0]["at"] is None


@pytest.mark.parametrize("trigger", TRIGGERS)
def test_result_not_after_the_watermark_that_followed_the_processor_fails_the_job(
    harness: type[Harness], trigger: dict[str, str]
) -> None:
    run = harness(with_event_time(), configuration=trigger)
    run.operator.process_watermark(20)
    restored = harness(with_event_time(), run.snapshot(), run.lists(), trigger)
    for subtask in (run, restored):
        with pytest.raises(LateResultError, match="'op' returned a row whose at is 1970-01-01 00:00:00, but .* 20 ms"):
            subtask.operator.process_batch(rows(("x", -30)), 0)
            subtask.operator.finish()
