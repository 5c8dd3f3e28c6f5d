"""Generators over Arrow batches: order, nulls, empty and sliced collections, batches that grow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.expressions.nodes import Call, Column, Literal
from ckpt_runtime.expressions.types import SparkType
from ckpt_runtime.graph.specs import GenerateSpec
from ckpt_runtime.operators import typed_expressions
from ckpt_runtime.operators.operator import ChainTime
from ckpt_runtime.operators.typed_expressions import GenerateOperator

ARRAY: SparkType = {"type": "array", "elementType": "integer", "containsNull": True}
MAP: SparkType = {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": True}


class Emitted:
    """Keeps what an operator emits."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []

    def emit(self, batch: pa.RecordBatch) -> None:
        self.batches.append(batch)

    def emit_watermark(self, timestamp_ms: int) -> None:
        raise AssertionError

    def emit_end_of_range(self) -> None:
        raise AssertionError


def generated(call: Call, column: pa.Array, made: list[Any], *, outer: bool = False, carried: bool = True) -> Emitted:
    schema = pa.schema([("given", column.type), *made])
    operator = GenerateOperator(GenerateSpec(call, outer, frozenset([0] if carried else []), schema))
    emitted = Emitted()
    context: Any = SimpleNamespace(now_ms=lambda: 0, configuration={}, chain_time=ChainTime())
    operator.open(context, emitted)
    operator.process_batch(pa.record_batch([column], ["given"]), 0)
    return emitted


def rows(emitted: Emitted) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for batch in emitted.batches for row in batch.to_pylist()]


@pytest.mark.parametrize("outer", [False, True])
def test_slice_of_an_array_with_values_under_nulls_is_exploded_from_its_own_offset(outer: bool) -> None:
    offsets, hidden = pa.array([0, 2, 3, 3, 5], pa.int32()), pa.array([7, 8, 9, 1, None], pa.int32())
    column = pa.ListArray.from_arrays(offsets, hidden, mask=pa.array([False, True, False, False])).slice(1)
    emitted = generated(
        Call("PosExplode", (Column(0, ARRAY),), "void"), column, [("pos", pa.int32()), ("n", pa.int32())], outer=outer
    )
    missing = [(None, None, None), ([], None, None)] if outer else []
    assert rows(emitted) == [*missing, ([1, None], 0, 1), ([1, None], 1, None)]


def test_slice_of_a_map_is_exploded_to_its_keys_and_values() -> None:
    column = pa.array([[("a", 1)], None, [("b", 2), ("c", None)]], pa.map_(pa.string(), pa.int64())).slice(1)
    made = [("key", pa.string()), ("value", pa.int64())]
    emitted = generated(Call("Explode", (Column(0, MAP),), "void"), column, made, carried=False)
    assert rows(emitted) == [(None, "b", 2), (None, "c", None)]


def test_result_is_cut_into_batches_but_never_within_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(typed_expressions, "OUTPUT_ROWS", 4)
    column = pa.array([[1, 2, 3], [4], [5], [], [6] * 9, [7]], pa.list_(pa.int32()))
    emitted = generated(Call("Explode", (Column(0, ARRAY),), "void"), column, [("n", pa.int32())])
    assert [batch.num_rows for batch in emitted.batches] == [4, 1, 9, 1]
    assert [row[1] for row in rows(emitted)] == [1, 2, 3, 4, 5, *[6] * 9, 7]


def test_stack_fills_what_is_missing_with_nulls() -> None:
    kind = {"type": "array", "elementType": {"type": "struct", "fields": [{"type": "integer"}, {"type": "integer"}]}}
    column = pa.array([1, 2], pa.int32())
    number = Column(0, "integer")
    call = Call("Stack", (Literal("2", "integer"), number, Literal("10", "integer"), number), kind)
    emitted = generated(call, column, [("a", pa.int32()), ("b", pa.int32())])
    assert rows(emitted) == [(1, 1, 10), (1, 1, None), (2, 2, 10), (2, 2, None)]
