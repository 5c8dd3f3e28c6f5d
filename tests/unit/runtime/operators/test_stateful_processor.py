"""The StatefulProcessor host: against PySpark's own TwsTester, and where it is stricter than Spark."""

from __future__ import annotations

import datetime as dt
import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

from ckpt_runtime.expressions.types import arrow_type
from ckpt_runtime.graph.specs import ProcessSpec
from ckpt_runtime.operators.errors import (
    OutputSchemaError,
    ProcessorTypeError,
    ProcessorUsageError,
    ProcessorValueError,
    UserFunctionError,
)
from ckpt_runtime.operators.nested_keys import NestedKeys
from ckpt_runtime.operators.operator import MAX_WATERMARK, UNNUMBERED
from ckpt_runtime.operators.rows import row_class
from ckpt_runtime.operators.stateful_processor import StatefulProcessorOperator
from tests.unit.runtime.operators.conftest import Harness

NOON = dt.datetime(2026, 1, 1, 12, tzinfo=dt.UTC)
OUT = pa.schema([("k", pa.string()), ("what", pa.string()), ("n", pa.int64())])


def row(key: Any, what: str, n: int | None) -> Row:
    return Row(k=key[0], what=what, n=n)


class Everything(StatefulProcessor):
    """Uses all states and timers."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.value = handle.getValueState("value", "n long, last string")
        self.list = handle.getListState("list", "v int")
        self.map = handle.getMapState("map", "word string", "n int")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n, last = self.value.get() if self.value.exists() else (0, None)
        for r in rows:
            assert r["k"] == key[0]
            assert r.asDict() == {"k": key[0], "v": r.v, "word": r.word}
            n += r.v
            self.list.appendValue((r.v,))
            (count,) = self.map.getValue((r.word,)) or (0,)
            self.map.updateValue((r.word,), (count + 1,))
            self.handle.registerTimer(r.v * 100)
            if r.word == "forget":
                self.map.removeKey(("a",))
            if r.word == "clear":
                self.list.clear()
        self.value.update((n, last))
        yield row(key, "sum", n)
        yield row(key, "list", sum(v for (v,) in self.list.get()))
        for (word,), (count,) in sorted(self.map.iterator()):
            yield row(key, word, count)
        yield row(key, "time", timerValues.getCurrentProcessingTimeInMs())
        if timerValues.getCurrentWatermarkInMs() > 0:  # PySpark's tester says -1 where Spark says 0
            yield row(key, "watermark", timerValues.getCurrentWatermarkInMs())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        yield row(key, "fired", expiredTimerInfo.getExpiryTimeInMs())
        yield row(key, "left", len(list(self.handle.listTimers())))
        yield row(key, "sum", self.value.get()[0])


def operator(processor: Any, mode: str = "None", schema: pa.Schema = OUT) -> StatefulProcessorOperator:
    return StatefulProcessorOperator(ProcessSpec(("k",), processor, schema, "Update", mode))


def batch(*rows: tuple[str, int, str]) -> pa.RecordBatch:
    keys, values, words = zip(*rows, strict=True)
    return pa.record_batch({"k": list(keys), "v": pa.array(values, pa.int64()), "word": list(words)})


BATCHES = [
    batch(("x", 1, "a"), ("y", 2, "b"), ("x", 3, "a")),
    batch(("x", 5, "forget"), ("z", 7, "clear")),
    batch(("z", 1, "a"), ("y", 4, "b"), ("z", 2, "b"), ("x", 6, "clear")),
]


def answers_of(tester: TwsTester, part: pa.RecordBatch) -> list[dict[str, Any]]:
    rows = part.to_pylist()
    keys = dict.fromkeys(r["k"] for r in rows)
    return [out.asDict() for key in keys for out in tester.test(key, [Row(**r) for r in rows if r["k"] == key])]


@pytest.mark.row("io.2")
@pytest.mark.parametrize("restart", [False, True])
def test_same_output_as_pyspark_in_processing_time(harness: type[Harness], restart: bool) -> None:
    tester = TwsTester(Everything(), timeMode="ProcessingTime")
    run = harness(operator(Everything, "ProcessingTime"))
    for step, part in enumerate(BATCHES):
        now = (step + 1) * 250
        expected = answers_of(tester, part)
        ours = run.process(part)  # timers that were registered in the past fire at once here
        assert ours[: len(expected)] == expected
        ours = ours[len(expected) :] + run.advance(now)
        assert sort(ours) == sort([r.asDict() for r in tester.setProcessingTime(now)])
        if restart:
            run = harness(operator(Everything(), "ProcessingTime"), run.snapshot())
            run.now = now
    assert sort(run.advance(10_000)) == sort([r.asDict() for r in tester.setProcessingTime(10_000)])


@pytest.mark.row("io.2")
def test_same_output_as_pyspark_in_event_time(harness: type[Harness]) -> None:
    tester = TwsTester(Everything(), timeMode="EventTime", eventTimeExtractor=lambda r: 10**9)
    run = harness(operator(Everything(), "eventtime"))
    for watermark, part in zip((50, 90, 650), BATCHES, strict=True):
        assert run.process(part) == answers_of(tester, part)
        ours = run.watermark(watermark)
        assert ours.pop() == ("watermark", watermark)
        assert sort(ours) == sort([r.asDict() for r in tester.setWatermark(watermark)])


def sort(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=str)


class Simple(StatefulProcessor):
    """Runs a function for each key."""

    schema = "n int, s string"
    ttl: int | None = None

    def __init__(self, function: Any = None) -> None:
        self.function = function

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.state = handle.getValueState("state", self.schema, self.ttl)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return self.function(self, key, rows)


def one(function: Any, harness: type[Harness], mode: str = "None") -> Any:
    return harness(operator(Simple(function), mode)).process(batch(("x", 1, "a")))


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ((2**40, "a"), ProcessorValueError, "'state', field 'n': 1099511627776 does not fit int32"),
        ((1.0, "a"), ProcessorTypeError, "'state', field 'n': 1.0 is a float, the field has type int32"),
        ((True, "a"), ProcessorTypeError, "field 'n': True is a bool"),
        ((1, b"a"), ProcessorTypeError, "field 's': b'a' is a bytes, the field has type string"),
        ((1,), ProcessorValueError, r"has 1 fields, allowed are \('n', 's'\)"),
        (5, ProcessorTypeError, "5 is a int, allowed is a tuple"),
        (Row(s="a", n=1), ProcessorValueError, r"fields \('s', 'n'\), allowed are \('n', 's'\) in this order"),
    ],
)
def test_value_that_spark_turns_into_null_is_an_error(
    harness: type[Harness], value: Any, error: type[Exception], text: str
) -> None:
    def function(self: Any, _key: Any, _rows: Any) -> Any:
        self.state.update(value)
        return []

    with pytest.raises(error, match=text) as caught:
        one(function, harness)
    assert isinstance(caught.value, PySparkRuntimeError)
    assert any("handleInputRows of operator 'op', key ('x',)" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (None, UserFunctionError, "handleInputRows of operator 'op' returned NoneType"),
        ([("x", "a", 1)], UserFunctionError, "returned a tuple"),
        ([Row("x", "a", 1)], UserFunctionError, "returned a Row"),
        ([Row(k="x", what="a", n="one")], OutputSchemaError, "output field 'n'"),
    ],
)
def test_wrong_results_are_named(harness: type[Harness], result: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        one(lambda *_: result, harness)


def test_output_fields_go_by_name_as_in_spark(harness: type[Harness]) -> None:
    rows = [Row(n=1, k="x", extra=0), Row(k="y", what="w", n=2)]
    assert one(lambda *_: rows, harness) == [{"k": "x", "what": None, "n": 1}, {"k": "y", "what": "w", "n": 2}]


def test_rows_have_all_columns_and_the_key_is_a_tuple(harness: type[Harness]) -> None:
    seen = []

    def function(self: Any, key: Any, rows: Any) -> Any:
        seen.append((key, type(key), list(rows)))
        return []

    processor = Simple()
    run = harness(operator(processor))
    run.operator._processor.function = function
    run.process(batch(("x", 1, "a"), ("y", 2, "b"), ("x", 3, "c")))
    (key, kind, rows), _ = seen
    assert (key, kind) == (("x",), tuple)
    assert rows == [Row(k="x", v=1, word="a"), Row(k="x", v=3, word="c")]
    assert isinstance(rows[0], Row)
    assert (rows[0].v, rows[0]["word"], "v" in rows[0]) == (1, "a", True)
    assert repr(rows[0]) == "Row(k='x', v=1, word='a')"


def test_handle_keeps_its_life_cycle(harness: type[Harness]) -> None:
    def late(self: Any, *_: Any) -> Any:
        self.handle.getValueState("late", "n int")

    with pytest.raises(ProcessorUsageError, match="'late': asking for a state is only possible in init"):
        one(late, harness)

    class Twice(Simple):
        def init(self, handle: Any) -> None:
            handle.getValueState("s", "n int")
            handle.getListState("s", "n int")

    with pytest.raises(ProcessorUsageError, match="'s' was requested twice"):
        harness(operator(Twice())).process(batch(("x", 1, "a")))

    class Early(Simple):
        def init(self, handle: Any) -> None:
            handle.getValueState("s", "n int").get()

    with pytest.raises(ProcessorUsageError, match="can only be used in handleInputRows"):
        harness(operator(Early())).process(batch(("x", 1, "a")))


def test_timers_and_ttl_need_their_time_mode(harness: type[Harness]) -> None:
    with pytest.raises(ProcessorUsageError, match="registerTimer needs timeMode"):
        one(lambda self, *_: self.handle.registerTimer(1), harness)
    processor = Simple(lambda *_: [])
    processor.ttl = 5
    with pytest.raises(ProcessorUsageError, match="TTL needs timeMode ProcessingTime"):
        harness(operator(processor)).process(batch(("x", 1, "a")))
    with pytest.raises(ProcessorUsageError, match="timeMode 'Sometimes'"):
        operator(Simple(), "Sometimes")


def test_state_expires(harness: type[Harness]) -> None:
    def function(self: Any, key: Any, rows: Any) -> Any:
        before = self.state.get()
        if before is None:
            self.state.update((1, "a"))
        return [row(key, "seen", None if before is None else before[0])]

    processor = Simple(function)
    processor.ttl = 100
    run = harness(operator(processor, "ProcessingTime"))
    seen = []
    for now in (0, 99, 100, 150):
        run.now = now
        seen.append(run.process(batch(("x", 1, "a")))[0]["n"])
    assert seen == [None, 1, None, 1]


def test_values_read_from_state_are_copies(harness: type[Harness]) -> None:
    def function(self: Any, key: Any, rows: Any) -> Any:
        if not self.state.exists():
            self.state.update(([1, 2],))
        self.state.get()[0].append(3)
        return [row(key, "size", len(self.state.get()[0]))]

    processor = Simple(function)
    processor.schema = "xs array<int>"
    run = harness(operator(processor))
    assert [run.process(batch(("x", 1, "a")))[0]["n"] for _ in range(3)] == [2, 2, 2]


def test_each_attempt_has_its_own_copy(harness: type[Harness]) -> None:
    processor = Simple(lambda self, *_: [])
    run = harness(operator(processor))
    run.process(batch(("x", 1, "a")))
    assert not hasattr(processor, "state")


class Closing(Simple):
    def close(self) -> None:
        self.function(self, None, None)


def test_close_is_called_once_and_only_after_init(harness: type[Harness]) -> None:
    calls: list[str] = []
    run = harness(operator(Closing()))
    run.operator._processor.function = lambda *_: calls.append("closed") or []
    run.operator.close()
    assert calls == []
    run.process(batch(("x", 1, "a")))
    calls.clear()
    run.operator.close()
    run.operator.close()
    assert calls == ["closed"]


class Ticking(Simple):
    """Each timer sets the next."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        self.handle.registerTimer(10)
        return []

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        assert isinstance(key, Row)
        assert key.k == "x"
        self.handle.registerTimer(expiredTimerInfo.getExpiryTimeInMs() + 10)
        yield row(key, "tick", expiredTimerInfo.getExpiryTimeInMs())


def test_timers_set_in_callbacks_fire_when_due(harness: type[Harness]) -> None:
    run = harness(operator(Ticking(), "EventTime"))
    run.process(batch(("x", 1, "a")))
    assert [r["n"] for r in run.watermark(35)[:-1]] == [10, 20, 30]
    restored = harness(operator(Ticking(), "EventTime"), run.snapshot())
    assert [r["n"] for r in restored.watermark(40)[:-1]] == [40]
    assert [r["n"] for r in run.watermark(MAX_WATERMARK)[:-1]] == [40]


def test_timers_set_in_callbacks_fire_once_in_each_of_sparks_batches_also_after_a_restore(
    harness: type[Harness],
) -> None:
    def ticks(run: Harness) -> list[int]:
        return [event["n"] for event in run.take() if isinstance(event, dict)]

    run = harness(operator(Ticking(), "EventTime"))
    run.operator.process_coming_watermark(35, 1)
    for number, wanted in ((2, [10]), (3, [10, 20])):
        run.operator.process_batch(batch(("x", 1, "a")), 0)
        assert ticks(run) == []
        run.operator.process_watermark(35)
        run.operator.process_coming_watermark(35, number)
        assert ticks(run) == wanted
    restored = harness(operator(Ticking(), "EventTime"), run.snapshot(), run.lists())
    restored.operator.process_watermark(35)
    restored.operator.process_coming_watermark(35, UNNUMBERED)
    assert ticks(restored) == []
    restored.operator.process_coming_watermark(35, 4)
    assert ticks(restored) == [30]


@pytest.mark.parametrize(("before", "after"), [("EventTime", "ProcessingTime"), ("ProcessingTime", "None")])
def test_snapshot_of_another_time_mode_is_refused(harness: type[Harness], before: str, after: str) -> None:
    taken = harness(operator(Ticking(), before))
    with pytest.raises(ProcessorUsageError, match=f"timeMode {after} cannot follow {before.lower()}"):
        harness(operator(Ticking(), after), taken.snapshot(), taken.lists())


def test_restored_processing_timers_ask_for_the_clock_at_open(harness: type[Harness]) -> None:
    run = harness(operator(Ticking(), "ProcessingTime"))
    run.process(batch(("x", 1, "a")))
    assert run.timer == 10
    restored = harness(operator(Ticking(), "ProcessingTime"), run.snapshot())
    assert restored.timer == 10
    assert [r["n"] for r in restored.advance(12)] == [10]
    assert restored.timer == 20


def test_timers_that_wait_fire_behind_rows_only_also_after_a_restore(harness: type[Harness]) -> None:
    class Due(Everything):
        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            self.value.update((0, ""))
            self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
            yield row(key, "rows", len(list(rows)))

    spec = replace(operator(Due(), "ProcessingTime")._spec, timers_wait=True)
    run = harness(StatefulProcessorOperator(spec))
    assert [r["what"] for r in run.process(batch(("x", 1, "a")))] == ["rows"]
    assert run.advance(1_000) == run.watermark(5_000)[:-1] == []
    restored = harness(StatefulProcessorOperator(spec), run.snapshot(), run.lists())
    restored.now = 2_000
    assert restored.advance(2_000) == []
    fired = restored.process(batch(("y", 1, "a")))
    assert [(r["k"], r["what"], r["n"]) for r in fired if r["what"] != "sum"] == [
        ("y", "rows", 1), ("x", "fired", 1), ("x", "left", 1),
    ]  # fmt: skip


STRUCT: dict[str, Any] = {
    "type": "struct",
    "fields": [
        {"name": "of", "type": "string", "nullable": True, "metadata": {}},
        {"name": "at", "type": "timestamp", "nullable": True, "metadata": {}},
    ],
}
ARRAY: dict[str, Any] = {"type": "array", "elementType": STRUCT, "containsNull": True}


def test_keys_of_structs_and_arrays_are_given_with_rows_and_to_timers(harness: type[Harness], tmp_path: Path) -> None:
    class Keys(Simple):
        def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
            self.handle.registerTimer(10)
            yield row((repr(key),), str([r.asDict() for r in rows]), None)

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
            yield row((repr(key),), "fired", None)

        def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
            assert (key, initialState) == (({"of": "x", "at": NOON}, [None]), Row(n=1))
            self.handle.registerTimer(5)

    types = [arrow_type(STRUCT), arrow_type(ARRAY)]
    columns = [[{"of": "x", "at": NOON}, None], [[None], None]]
    keys = [pa.array(column, kind) for column, kind in zip(columns, types, strict=True)]
    before = pa.table({"s": keys[0][:1], "a": keys[1][:1], "n": [1]})
    with pa.ipc.new_file(str(tmp_path / "before"), before.schema) as writer:
        writer.write_table(before)
    spec = replace(
        operator(Keys(), "EventTime")._spec, keys=("s is null", "s.of", "s.at", "a.text"),
        nested_keys=(("s", STRUCT), ("a", ARRAY)), initial_state=str(tmp_path / "before"),
    )  # fmt: skip
    flat = NestedKeys(spec.nested_keys).flat(keys, 2)
    rows = pa.RecordBatch.from_arrays([pa.array([1, 2]), *flat], ["n", *spec.keys])
    run = harness(StatefulProcessorOperator(spec, rows.schema))
    zoned, plain = repr(NOON.astimezone(ZoneInfo("UTC"))), repr(NOON.replace(tzinfo=None))
    assert [(r["k"], r["what"]) for r in run.process(rows)] == [
        (f"({{'of': 'x', 'at': {zoned}}}, [None])", "[{'n': 1}]"), ("(None, None)", "[{'n': 2}]"),
    ]  # fmt: skip
    fired = [r["k"] for r in run.watermark(10)[:-1]]
    timed = f"Row(s=Row(of='x', at={plain}), a=[None])"
    assert fired == [timed, timed, "Row(s=None, a=None)"]


def test_nanoseconds_are_refused_by_name(harness: type[Harness]) -> None:
    part = pa.record_batch({"k": ["x"], "t": pa.array([1], pa.timestamp("ns"))})
    with pytest.raises(TypeError, match="field 't': type timestamp.ns. is not supported; cast nanoseconds"):
        harness(operator(Simple())).process(part)


class Arrivals(StatefulProcessor):
    """Tells which rows got through, with the watermark they met."""

    def init(self, handle: Any) -> None:
        pass

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for arrived in rows:
            yield row(key, arrived.word, timerValues.getCurrentWatermarkInMs())

    def close(self) -> None:
        pass


def timed(unit: str, *rows: tuple[str, int | None, str]) -> pa.RecordBatch:
    keys, times, words = zip(*rows, strict=True)
    factor = {"s": 1, "ms": 1000, "us": 1_000_000}[unit]
    values = [None if time is None else time * factor // 1000 for time in times]
    at = pa.array(values, pa.timestamp(unit, tz="UTC"))
    return pa.record_batch({"k": list(keys), "at": at, "word": list(words)})


def late_dropper(time_mode: str = "EventTime") -> StatefulProcessorOperator:
    return StatefulProcessorOperator(ProcessSpec(("k",), Arrivals(), OUT, "Update", time_mode, "at"))


@pytest.mark.row("io.2")
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_late_rows_are_dropped_as_pyspark_drops_them(harness: type[Harness], unit: str) -> None:
    def event_time(r: Row) -> int:
        return int(r.at.timestamp() * 1000)

    tester = TwsTester(Arrivals(), timeMode="EventTime", eventTimeExtractor=event_time)
    run = harness(late_dropper())
    steps = [
        (None, [("x", 0, "epoch"), ("x", 1000, "a"), ("y", 5000, "b")]),
        (3000, [("x", 2000, "late"), ("x", 3000, "late"), ("y", 4000, "c"), ("z", -1000, "late")]),
        (7000, [("z", 7000, "late"), ("x", 1000, "late")]),
        (8000, [("x", 9000, "d")]),
    ]
    dropped = 0
    for watermark, rows in steps:
        if watermark is not None:
            run.watermark(watermark)
            tester.setWatermark(watermark)
        part = timed(unit, *rows)
        expected = answers_of(tester, part)
        assert run.process(part) == expected
        dropped += len(rows) - len(expected)
    assert run.operator.late_rows_dropped == dropped == 6


def test_rows_are_never_late_without_event_time_or_in_other_time_modes(harness: type[Harness]) -> None:
    run = harness(late_dropper())
    run.watermark(50_000)
    assert [r["what"] for r in run.process(timed("ms", ("x", None, "a"), ("x", 1, "late")))] == ["a"]
    assert [r["what"] for r in run.process(timed("ms", ("x", None, "b")))] == ["b"]
    run = harness(late_dropper("ProcessingTime"))
    run.watermark(50_000)
    assert [r["what"] for r in run.process(timed("ms", ("x", 1, "a")))] == ["a"]
    assert [kept.name for kept in run.lists()] == ["time-mode"]
    assert run.operator.late_rows_dropped == 0


def test_the_watermark_survives_a_restore_but_not_the_end_of_data(harness: type[Harness]) -> None:
    run = harness(late_dropper())
    run.watermark(3000)
    run.process(timed("ms", ("x", 4000, "a")))
    run.watermark(MAX_WATERMARK)
    mode, kept = run.lists()
    assert (mode.items, kept.items) == (("eventtime",), (3000,))
    for items in ((3000,), (3000, 3000), (3000, 5000)):
        restored = harness(late_dropper(), run.snapshot(), (replace(kept, items=items),))
        assert [r["what"] for r in restored.process(timed("ms", ("x", 3000, "late"), ("x", 4000, "b")))] == ["b"]
        restored.watermark(2000)
        assert restored.process(timed("ms", ("x", 3000, "late"))) == []


def test_the_backend_hears_of_the_keys_of_a_batch_and_of_due_timers_beforehand(
    harness: type[Harness], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[list[Any]] = []
    run = harness(operator(Ticking(), "ProcessingTime"))
    monkeypatch.setattr(run.backend, "prefetch", lambda keys: fetched.append(list(keys)))
    run.process(batch(("x", 1, "a"), ("x", 2, "a")))
    run.process(batch(("x", 1, "a")))
    assert fetched == [[("x",)], [("x",)]]
    run.advance(10)
    assert fetched == [[("x",)]] * 3


def test_fields_of_a_row_are_read_by_any_name_and_at_any_time_of_garbage_collection() -> None:
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(20):
            made = tuple.__new__(row_class(("k", "a name", "count", "k")), (1, 2, 3, 4))
            assert (made.k, getattr(made, "a name"), made["count"], made[2]) == (1, 2, 3, 3)
            assert made.count(4) == 1, "a method of Row stays one"
            with pytest.raises(PySparkRuntimeError, match="READ_ONLY"):
                made.k = 5
    finally:
        gc.set_threshold(*before)
