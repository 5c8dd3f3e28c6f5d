"""Stateful processors of pandas frames: what they get, and what they may not give."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.conversion import ArrowBatchTransformer
from pyspark.sql.streaming.state import GroupState
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.types import Row, StructType

from ckpt_runtime.frontend.function_mapping import GroupStateProcessor
from ckpt_runtime.graph.specs import MOST_ROWS, ProcessSpec
from ckpt_runtime.operators.errors import OutputSchemaError, UserFunctionError
from ckpt_runtime.operators.stateful_processor import StatefulProcessorOperator
from tests.unit.runtime.operators.conftest import Harness

OUT = pa.schema([("k", pa.string()), pa.field("n", pa.int32(), nullable=False)])


class Gives(StatefulProcessor):
    """Gives what a function makes of the frames of a key."""

    def __init__(self, function: Callable[[Any, list[Any]], Any]) -> None:
        self.function = function

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Any:
        frames = list(rows)
        self.total.update(((self.total.get() or (0,))[0] + sum(map(len, frames)),))
        return self.function(key, frames)

    def close(self) -> None:
        pass


def operator(
    function: Callable[[Any, list[Any]], Any], out: pa.Schema = OUT, **settings: str
) -> StatefulProcessorOperator:
    given = {f"spark.sql.execution.{key.replace('__', '.')}": value for key, value in settings.items()}
    spec = ProcessSpec(("k",), Gives(function), out, "Update", in_pandas=True, settings=given)
    return StatefulProcessorOperator(spec)


def batch(*keys: str) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array(keys).dictionary_encode(), "class": list(range(len(keys)))})


def test_the_rows_of_a_key_come_in_order_and_in_frames_of_bounded_size(harness: type[Harness]) -> None:
    def sizes(key: Any, frames: list[Any]) -> Iterator[Any]:
        rows = [row for frame in frames for row in frame["class"]]
        assert rows == sorted(rows)
        yield from (pd.DataFrame({"n": [len(frame)], "k": [key[0]]}) for frame in frames)
        yield pd.DataFrame({"k": []})
        yield pd.DataFrame()

    run = harness(operator(sizes))
    keys = ["x", "y"] * MOST_ROWS + ["x"]
    assert run.process(batch(*keys)) == [{"k": "x", "n": MOST_ROWS}, {"k": "x", "n": 1}, {"k": "y", "n": MOST_ROWS}]
    assert run.process(batch("y")) == [{"k": "y", "n": 1}]
    run = harness(operator(sizes, arrow__maxRecordsPerBatch="2"))
    assert [row["n"] for row in run.process(batch("x", "x", "x", "y"))] == [2, 1, 1]
    run = harness(operator(sizes, arrow__maxBytesPerBatch="2"))
    assert [row["n"] for row in run.process(batch("x", "x", "y"))] == [1, 1, 1]
    run = harness(operator(sizes, arrow__maxBytesPerBatch="100000"))
    assert [row["n"] for row in run.process(batch("x", "x", "y"))] == [2, 1]
    run = harness(operator(sizes, arrow__maxRecordsPerBatch="-1"))
    assert [row["n"] for row in run.process(batch(*["x"] * (MOST_ROWS + 1)))] == [MOST_ROWS + 1]


def test_integers_become_decimals_and_are_cut_if_options_of_spark_say_so(harness: type[Harness]) -> None:
    def numbers(key: Any, frames: list[Any]) -> Iterator[Any]:
        yield pd.DataFrame({"k": [key[0]], "n": [12345]})

    decimals, bytes_ = (pa.schema([("k", pa.string()), ("n", kind)]) for kind in (pa.decimal128(10, 2), pa.int8()))
    coerced = operator(numbers, decimals, pythonUDF__pandas__intToDecimalCoercionEnabled="true")
    assert harness(coerced).process(batch("x")) == [{"k": "x", "n": Decimal(12345)}]
    cut = operator(numbers, bytes_, pandas__convertToArrowArraySafely="false")
    assert harness(cut).process(batch("x")) == [{"k": "x", "n": 12345 % 256}]
    for kind in (decimals, bytes_):
        with pytest.raises(OutputSchemaError):
            harness(operator(numbers, kind)).process(batch("x"))


def test_frames_of_several_keys_may_be_one_object_and_have_other_columns_and_types(harness: type[Harness]) -> None:
    reused = pd.DataFrame({"k": ["?"], "n": [0]})

    def changed(key: Any, frames: list[Any]) -> Iterator[Any]:
        (frame,) = frames
        assert frame.index.tolist() == list(range(len(frame)))
        reused.loc[0, "k"], reused.loc[0, "n"] = key[0], len(frame)
        frame.loc[:, "class"] = -1
        yield reused
        yield pd.DataFrame({"n": [1.0], "x": [None], "k": [key[0].upper()]})

    run = harness(operator(changed))
    wanted = [{"k": key, "n": 1} for lower in "abc" for key in (lower, lower.upper())]
    assert run.process(batch("a", "b", "c")) == wanted


@pytest.mark.parametrize("nulls", [False, True])
def test_columns_have_the_types_that_rows_one_by_one_have(harness: type[Harness], nulls: bool) -> None:
    moment = dt.datetime(2020, 1, 2, tzinfo=dt.UTC)
    columns = {
        "k": pa.array(["x", "y", "x", "z"]),
        "i": pa.array([1, 2, 3, 4], pa.int32()),
        "f": pa.array([0.5, 1.5, 2.5, 3.5], pa.float32()),
        "b": pa.array([True, False, True, False]),
        "d": pa.array([dt.date(2020, 1, 1)] * 4),
        "t": pa.array([moment] * 4, pa.timestamp("us", "UTC")),
        "c": pa.array([Decimal("1.20")] * 4, pa.decimal128(10, 2)),
        "a": pa.array([[1, None], [], [2], [3]], pa.list_(pa.int32())),
        "s": pa.array(["p", "q", "r", "s"]),
    }
    if nulls:
        columns = {name: pc.if_else([True, False, True, True], column, None) for name, column in columns.items()}
    table = pa.RecordBatch.from_pydict(columns)
    seen: list[Any] = []
    run = harness(operator(lambda key, frames: []))
    run.operator._processor.function = lambda key, frames: seen.extend(frames) or []  # the operator has its own copy
    run.process(table)
    whole = pd.concat(ArrowBatchTransformer.to_pandas(table, timezone="UTC"), axis=1)
    rows = list(whole.itertuples(index=False, name=None))
    wanted = [pd.DataFrame([rows[at] for at in group], columns=list(columns)) for group in ((0, 2), (1,), (3,))]
    for given, frame in zip(seen, wanted, strict=True):
        pd.testing.assert_frame_equal(given, frame)


def test_timeout_stays_until_a_call_updates_or_removes_the_state(harness: type[Harness]) -> None:
    def called(key: Any, frames: Iterator[Any], state: GroupState) -> Iterator[Any]:
        rows = sum(map(len, frames))
        if state.hasTimedOut:
            state.remove()
        elif not state.exists:
            state.update((rows,))
            state.setTimeoutTimestamp(20)
        elif rows == 2:
            state.update((rows,))
        elif rows == 3:
            state.remove()
        yield pd.DataFrame({"k": [key[0]], "n": [-1 if state.hasTimedOut else rows]})

    rows = batch("a", "b", "c")
    state = StructType().add("n", "long")
    processor = GroupStateProcessor(called, state, "EventTimeTimeout", rows.schema, ("k",), 2, watermark=True)
    run = harness(StatefulProcessorOperator(ProcessSpec(("k",), processor, OUT, time_mode="EventTime", in_pandas=True)))
    run.process(rows)
    assert [row["n"] for row in run.process(batch("a", "b", "b", "c", "c", "c"))] == [1, 2, 3]
    assert run.watermark(20) == [("watermark", 20)]
    assert run.watermark(21) == [{"k": "a", "n": -1}, ("watermark", 21)]


@pytest.mark.parametrize("in_pandas", [True, False])
def test_times_of_rows_and_keys_are_those_of_the_sessions_zone(harness: type[Harness], in_pandas: bool) -> None:
    moment = dt.datetime(2020, 1, 2, tzinfo=dt.UTC)
    times = pa.array([moment], pa.timestamp("us", "UTC"))
    rows = pa.RecordBatch.from_pydict({"t": times, "s": pa.StructArray.from_arrays([times], ["t"])})

    def same(key: Any, given: list[Any]) -> Iterator[Any]:
        row = given[0].iloc[0] if in_pandas else given[0]
        seen = key[0], row["t"], row["s"]["t"]
        clock = dt.datetime(2020, 1, 1, 19)
        assert {time.replace(tzinfo=None) for time in seen} == {clock}, seen
        assert [time.tzinfo is None for time in seen] == [in_pandas] * 3, seen
        return iter([pd.DataFrame({"t": [key[0]]}) if in_pandas else Row(t=key[0])])

    out, zone = pa.schema([("t", times.type)]), {"spark.sql.session.timeZone": "America/New_York"}
    spec = ProcessSpec(("t",), Gives(same), out, "Update", in_pandas=in_pandas, settings=zone)
    assert harness(StatefulProcessorOperator(spec)).process(rows) == [{"t": moment}]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (pd.DataFrame({"k": ["x"], "n": [2**40]}), "operator 'op' returned a frame with the columns"),
        (pd.DataFrame({"k": ["x"], "n": [1.5]}), "operator 'op' returned a frame with the columns"),
        (pd.DataFrame({"k": ["x"], "m": [1]}), "which do not fit \\['k', 'n'\\]"),
        (pd.DataFrame({0: ["x"]}), "which do not fit \\['k', 'n'\\]"),
        (pd.DataFrame({"k": ["x"], "n": [None]}), "output field 'n': null is not allowed"),
    ],
)
def test_frame_that_does_not_fit_the_schema_is_refused(harness: type[Harness], given: Any, reason: str) -> None:
    """Also numbers that Spark would cut."""
    with pytest.raises(OutputSchemaError, match=reason):
        harness(operator(lambda key, frames: [given])).process(batch("x"))


@pytest.mark.parametrize("given", [pd.DataFrame({"k": ["x"], "n": [1]}), [("x", 1)], None])
def test_result_that_is_not_an_iterator_of_frames_is_refused(harness: type[Harness], given: Any) -> None:
    with pytest.raises(UserFunctionError, match="it must return (|an iterator of )pandas.DataFrame"):
        harness(operator(lambda key, frames: given)).process(batch("x"))
