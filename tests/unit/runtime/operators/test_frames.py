"""Stateful processors of pandas frames: what they get, and what they may not give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.streaming.stateful_processor import StatefulProcessor

from ckpt_runtime.graph.specs import ProcessSpec
from ckpt_runtime.operators.errors import OutputSchemaError, UserFunctionError
from ckpt_runtime.operators.frames import FRAME_ROWS
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


def operator(function: Callable[[Any, list[Any]], Any]) -> StatefulProcessorOperator:
    return StatefulProcessorOperator(ProcessSpec(("k",), Gives(function), OUT, "Update", in_pandas=True))


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
    keys = ["x", "y"] * FRAME_ROWS + ["x"]
    assert run.process(batch(*keys)) == [
        {"k": "x", "n": FRAME_ROWS},
        {"k": "x", "n": 1},
        {"k": "y", "n": FRAME_ROWS},
    ]
    assert run.process(batch("y")) == [{"k": "y", "n": 1}]


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
def test_what_does_not_fit_the_schema_is_refused(harness: type[Harness], given: Any, reason: str) -> None:
    """Also numbers that Spark would cut."""
    with pytest.raises(OutputSchemaError, match=reason):
        harness(operator(lambda key, frames: [given])).process(batch("x"))


@pytest.mark.parametrize("given", [pd.DataFrame({"k": ["x"], "n": [1]}), [("x", 1)], None])
def test_what_is_no_iterator_of_frames_is_refused(harness: type[Harness], given: Any) -> None:
    with pytest.raises(UserFunctionError, match="it must return (|an iterator of )pandas.DataFrame"):
        harness(operator(lambda key, frames: given)).process(batch("x"))
