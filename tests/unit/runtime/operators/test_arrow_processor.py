"""Stateful processors in Arrow: against PySpark's own TwsTester, which calls the same class for one key at a time."""

from __future__ import annotations

import datetime as dt
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import Row
from pyspark.sql.streaming.tws_tester import TwsTester

from ckpt_runtime.graph.ddl import to_arrow_schema
from ckpt_runtime.graph.specs import ProcessSpec
from ckpt_runtime.operators.arrow_processor import ArrowProcessorOperator
from ckpt_runtime.operators.errors import OutputSchemaError, UserFunctionError
from ckpt_runtime.operators.operator import MAX_WATERMARK
from ckpt_runtime.processors import ArrowStatefulProcessor
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.errors import StateSchemaError
from tests.support.pipelines.arrow_processors import FORGETS, SESSIONS, TOTALS, ColumnSessions, ColumnTotals
from tests.unit.runtime.operators.conftest import Harness

IN = pa.schema([("k", pa.string()), ("v", pa.int32()), ("word", pa.string()), ("at", pa.timestamp("us", "UTC"))])
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def operator(processor: Any, output: str = TOTALS, time_mode: str = "None") -> ArrowProcessorOperator:
    column = "t" if time_mode == "EventTime" else None
    schema = to_arrow_schema(output, "output")
    return ArrowProcessorOperator(ProcessSpec(("k",), processor, schema, "Update", time_mode, column, in_arrow=True))


def batch(*rows: tuple[str | None, int | None, str | None]) -> pa.RecordBatch:
    at = [EPOCH + dt.timedelta(seconds=number) for number in range(len(rows))]
    columns = [*zip(*rows, strict=True), at]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, IN, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=IN)


def random_batches(seed: int, batches: int = 6) -> list[pa.RecordBatch]:
    chance = random.Random(seed)
    keys = [None, "", "a", *(f"key {number}" for number in range(chance.choice((2, 40))))]
    words = [None, "x", "longer than a word", FORGETS]
    return [
        batch(*[
            (chance.choice(keys), chance.choice((None, *range(-3, 9))), chance.choice(words))
            for _ in range(chance.choice((1, 30, 200)))
        ])
        for _ in range(batches)
    ]  # fmt: skip


def by_key(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: repr(row["k"]))


def answers_of(tester: TwsTester, part: pa.RecordBatch) -> list[dict[str, Any]]:
    rows = part.to_pylist()
    keys = dict.fromkeys(row["k"] for row in rows)
    return [out.asDict() for key in keys for out in tester.test(key, [Row(**r) for r in rows if r["k"] == key])]


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
@pytest.mark.parametrize("seed", range(3))
def test_calls_with_all_keys_give_what_calls_with_one_key_give_also_across_restores(
    harness: type[Harness], backend: str, seed: int
) -> None:
    tester = TwsTester(ColumnTotals())
    run = harness(operator(ColumnTotals), backend=backend)
    for number, part in enumerate(random_batches(seed)):
        keys = part.column("k").dictionary_encode() if number % 2 else part.column("k")
        assert by_key(run.process(part.set_column(0, "k", keys))) == by_key(answers_of(tester, part))
        if backend == "hashmap":
            run = harness(operator(ColumnTotals), run.snapshot(), backend=backend)
    run.backend.close()


def timed(*rows: tuple[str, int | None]) -> pa.RecordBatch:
    times = [None if second is None else EPOCH + dt.timedelta(seconds=second) for _, second in rows]
    return pa.record_batch({"k": [key for key, _ in rows], "t": pa.array(times, pa.timestamp("us", "UTC"))})


@pytest.mark.parametrize("backend", ["hashmap", "rocksdb"])
def test_expired_timers_come_in_one_call_and_end_their_keys(harness: type[Harness], backend: str) -> None:
    def row(key: str, n: int, *, ended: bool) -> dict[str, Any]:
        return {"k": key, "n": n, "ended": ended}

    run = harness(operator(ColumnSessions, SESSIONS, "EventTime"), backend=backend)
    assert run.process(timed(("x", 1), ("y", 5), ("x", 3))) == [row("x", 2, ended=False), row("y", 1, ended=False)]
    assert run.watermark(12_999) == [("watermark", 12_999)]
    if backend == "hashmap":
        run = harness(operator(ColumnSessions, SESSIONS, "EventTime"), run.snapshot(), run.lists(), backend=backend)
    assert run.watermark(13_000) == [row("x", 2, ended=True), ("watermark", 13_000)]
    assert run.process(timed(("x", 13), ("x", 14))) == [row("x", 1, ended=False)], "a row at the watermark is late"
    assert run.watermark(23_999) == [row("y", 1, ended=True), ("watermark", 23_999)]
    assert run.watermark(MAX_WATERMARK) == [row("x", 1, ended=True), ("watermark", MAX_WATERMARK)]
    run.backend.close()


class Gives(ArrowStatefulProcessor):
    """Gives what a function makes of its arguments."""

    keySchema = "k STRING"
    inputSchema = "v INT"
    stateSchema = "n BIGINT"

    def __init__(self, function: Any) -> None:
        self.function = function

    def handleBatch(self, rows: pa.Table, offsets: Any, state: pa.Table, timerValues: Any) -> Any:
        return self.function(rows, offsets, state)


def test_state_that_is_not_returned_stays_and_rows_are_ordered_by_key(harness: type[Harness]) -> None:
    def first(rows: pa.Table, offsets: Any, state: pa.Table) -> Any:
        assert state.to_pydict() == {"k": ["b", "a"], "n": [None, None]}
        assert rows["v"].to_pylist() == [1, 3, 4, 2]
        assert offsets.tolist() == [0, 3, 4]
        return None, pa.table({"n": [7, None]}, schema=pa.schema([("n", pa.int64())]))

    def second(rows: pa.Table, offsets: Any, state: pa.Table) -> Any:
        return state.select(["k", "n"]), None

    given = Gives(first)
    run = harness(operator(given, "k STRING, n BIGINT"))
    assert run.process(batch(("b", 1, ""), ("a", 2, ""), ("b", 3, ""), ("b", 4, ""))) == []
    run.operator._processor.function = second
    for _ in range(2):
        assert run.process(batch(("a", 1, ""), ("b", 1, ""))) == [{"k": "a", "n": None}, {"k": "b", "n": 7}]


@pytest.mark.parametrize(
    ("result", "error", "reason"),
    [
        (None, UserFunctionError, "handleBatch of operator 'op' returned NoneType, it must return a tuple of two"),
        ((None, pa.table({"n": [1]})), UserFunctionError, "with the 2 rows of its `state`, it returned 1 rows"),
        ((None, [1, 2]), UserFunctionError, "as a pyarrow.Table, it returned a list"),
        ((None, pa.table({"k": ["y", "x"], "n": [1, 2]})), UserFunctionError, "column 'k' has other values"),
        (
            (None, pa.table({"m": [1, 2]})),
            OutputSchemaError,
            "gave the columns \\['m'\\], of which \\['n'\\] is missing",
        ),
        ((None, pa.table({"n": [1.5, 2.5]})), OutputSchemaError, "handleBatch of operator 'op'"),
        (([], None), UserFunctionError, "gave a list as its output, it must give a pyarrow.Table"),
        ((pa.table({"k": ["x"]}), None), OutputSchemaError, "of which \\['n'\\] is missing"),
    ],
)
def test_result_that_does_not_fit_is_refused(
    harness: type[Harness], result: Any, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        harness(operator(Gives(lambda *_: result), "k STRING, n BIGINT")).process(batch(("x", 1, ""), ("y", 2, "")))


class WithNote(Gives):
    stateSchema = "note STRING, n BIGINT"


class OfText(Gives):
    stateSchema = "n STRING"


def test_columns_are_added_to_the_state_and_other_types_are_refused(harness: type[Harness]) -> None:
    run = harness(operator(Gives(lambda rows, offsets, state: (None, pa.table({"n": [3]}))), "k STRING, n BIGINT"))
    run.process(batch(("x", 1, "")))
    evolved = operator(WithNote(lambda rows, offsets, state: (state, None)), "k STRING, n BIGINT, note STRING")
    assert harness(evolved, run.snapshot()).process(batch(("x", 1, ""))) == [{"k": "x", "n": 3, "note": None}]
    with pytest.raises(StateSchemaError, match="field .*n.* cannot change from int64 to string"):
        harness(operator(OfText(lambda *_: (None, None)), "k STRING"), run.snapshot()).process(batch(("x", 1, "")))


def test_keys_that_are_equal_in_spark_share_one_state(harness: type[Harness]) -> None:
    class OfNumbers(Gives):
        keySchema = "k DOUBLE"

    def count(rows: pa.Table, offsets: Any, state: pa.Table) -> Any:
        return None, pa.table({"k": state["k"], "n": np.diff(offsets) + state["n"].fill_null(0).to_numpy()})

    schema = pa.schema([("k", pa.float64()), ("v", pa.int32())])
    spec = ProcessSpec(("k",), OfNumbers(count), schema, in_arrow=True)
    run = harness(ArrowProcessorOperator(spec))
    keys = [0.0, -0.0, float("nan"), float("nan"), None, 1.0]
    for _ in range(2):
        run.process(pa.RecordBatch.from_arrays([pa.array(keys), pa.array([1] * 6, pa.int32())], schema=schema))
    (numbers,) = run.operator._state._rows.take(read_only(np.arange(4, dtype=np.uint32)))
    assert sorted(numbers.to_pylist()) == [2, 2, 4, 4]
