"""Processors in Arrow: what is refused while a program is planned, and the operator of what is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.frontend.function_mapping import stateful_spec
from ckpt_runtime.frontend.typed_plan import StatefulFunction, TypedColumn
from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.processors import ArrowStatefulProcessor

ROWS = pa.schema([("k", pa.string()), ("v", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
OUT = pa.schema([("k", pa.string())])


def processor(**attributes: Any) -> ArrowStatefulProcessor:
    declared = {"keySchema": "k STRING", "inputSchema": "v BIGINT", "stateSchema": "n BIGINT, text STRING"}
    methods = {"handleBatch": lambda *_: (None, None)}
    made: ArrowStatefulProcessor = type("Declared", (ArrowStatefulProcessor,), {**declared, **methods, **attributes})()
    return made


def planned(
    declared: ArrowStatefulProcessor, kind: str = "rows", initial_state: str | None = None, rows: pa.Schema = ROWS
) -> Any:
    node = StatefulFunction(
        columns=(TypedColumn("k", "string"),), plan_id=1, inputs=(0,), kind=kind, keys=(0,), function=7,
        output_mode="Update", time="NoTime",
    )  # fmt: skip
    bound = SimpleNamespace(__self__=SimpleNamespace(_stateful_processor=declared))
    functions: Any = SimpleNamespace(of_number={7: bound}.__getitem__)
    return stateful_spec(node, functions, (), rows, OUT, {}, initial_state)


def test_a_processor_in_arrow_gets_the_operator_of_its_own() -> None:
    assert planned(processor()).in_arrow


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"keySchema": "k INT"}, "keySchema.*it is k int32, and groupBy has k string"),
        ({"keySchema": "k STRING, v BIGINT"}, "keySchema.*groupBy has k string"),
        ({"keySchema": "not a schema"}, "keySchema"),
        ({"inputSchema": "v INT"}, "inputSchema.*v int32 is not a column of k string, v int64"),
        ({"inputSchema": "w INT"}, "inputSchema.*w int32 is not a column"),
        ({"stateSchema": "n BIGINT NOT NULL"}, "stateSchema.*n is NOT NULL"),
        ({"stateSchema": "k BIGINT"}, "stateSchema.*k is a column of the key"),
        ({"stateSchema": ""}, "stateSchema"),
        ({"timerColumn": "text"}, "timerColumn.*'text' is not a BIGINT column"),
        ({"timerColumn": "n"}, "timerColumn.*need timeMode EventTime, it is None"),
    ],
)
def test_schemas_that_do_not_fit_the_stream_are_refused(attributes: dict[str, str], reason: str) -> None:
    with pytest.raises(PlanError, match=reason):
        planned(processor(**attributes))


def test_frames_nested_keys_and_an_initial_state_are_refused() -> None:
    with pytest.raises(PlanError, match="gets tables of Arrow: use transformWithState"):
        planned(processor(), kind="pandas")
    with pytest.raises(PlanError, match="initialState"):
        planned(processor(), initial_state="file")
    nested = pa.schema([("k", pa.struct([("of", pa.string())])), ("v", pa.int64())])
    with pytest.raises(PlanError, match="'k' is of type struct<of: string>, which cannot be a key of an Arrow"):
        planned(processor(), rows=nested)
