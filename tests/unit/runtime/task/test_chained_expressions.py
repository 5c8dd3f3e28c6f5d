"""Filters and projections in one chain: only rows that pass reach the projection, and text stays encoded up to it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import EvaluationError
from ckpt_runtime.graph.specs import ConditionSpec, EvaluateSpec
from ckpt_runtime.operators.operator import Operator, OperatorContext, OperatorStateStore
from ckpt_runtime.operators.typed_expressions import ConditionOperator, EvaluateOperator
from ckpt_runtime.task.chain import ChainEnd, OperatorChain

WORD, NUMBER = Column(0, "string"), Column(1, "long")
INPUT = pa.schema([("word", pa.string()), ("number", pa.int64())])


class Taker(Operator):
    """Keeps the batches that it gets."""

    def __init__(self, takes_dictionaries: bool) -> None:
        self.takes_dictionaries = takes_dictionaries
        self.batches: list[pa.RecordBatch] = []

    def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
        batch.validate(full=True)
        self.batches.append(batch)


def call(function: str, type_: str, *arguments: Expression) -> Call:
    return Call(function, arguments, type_, "ansi")


def opened(*operators: Operator) -> OperatorChain:
    contexts = [
        OperatorContext(
            job_id="j", uid=f"op{at}", name=f"op{at}", subtask_index=0, parallelism=1, attempt=0,
            operator_state=OperatorStateStore(), now_ms=lambda: 0, monotonic_ms=lambda: 0, set_timer=lambda at_ms: None,
        )
        for at in range(len(operators))
    ]  # fmt: skip
    chain = OperatorChain(operators, contexts, ChainEnd([]))
    chain.open()
    return chain


def rows(numbers: list[int | None], places: list[int | None]) -> pa.RecordBatch:
    words = pa.DictionaryArray.from_arrays(pa.array(places, pa.int32()), pa.array(["a", "b"]))
    return pa.RecordBatch.from_arrays([words, pa.array(numbers, pa.int64())], names=INPUT.names)


INVERSE = call("IntegralDivide", "long", Literal("100", "long"), NUMBER)


def filtered(taker: Taker, *trees: Expression, kinds: dict[str, Any]) -> OperatorChain:
    spec = EvaluateSpec(tuple(zip(kinds, trees, strict=True)), pa.schema(list(kinds.items())))
    condition = ConditionOperator(ConditionSpec(call("GreaterThan", "boolean", NUMBER, Literal("0", "long"))))
    return opened(condition, EvaluateOperator(spec), taker)


@pytest.mark.parametrize("takes_dictionaries", [True, False])
def test_projection_after_a_filter_evaluates_only_the_rows_that_pass(takes_dictionaries: bool) -> None:
    taker = Taker(takes_dictionaries)
    kinds = {"word": pa.string(), "upper": pa.string(), "inverse": pa.int64()}
    chain = filtered(taker, WORD, call("Upper", "string", WORD), INVERSE, kinds=kinds)
    chain.head.process_batch(rows([0, 5, None, 20, -1], [0, 1, 0, None, 1]), 0)  # a division by zero would fail
    chain.head.process_batch(rows([0, -3], [0, 1]), 0)
    chain.head.process_batch(rows([1, 2], [1, 0]).slice(1), 0)
    assert [batch.to_pylist() for batch in taker.batches] == [
        [{"word": "b", "upper": "B", "inverse": 20}, {"word": None, "upper": None, "inverse": 5}],
        [{"word": "a", "upper": "A", "inverse": 50}],
    ]
    encoded = [pa.types.is_dictionary(kind) for kind in taker.batches[0].schema.types]
    assert encoded == [takes_dictionaries, takes_dictionaries, False]
    assert chain.operator_rows == (3, 3, 0)


def test_an_error_of_a_row_that_passes_is_raised() -> None:
    chain = filtered(Taker(True), call("IntegralDivide", "long", NUMBER, call("Subtract", "long", NUMBER, NUMBER)),
                     kinds={"quotient": pa.int64()})  # fmt: skip
    chain.head.process_batch(rows([0, -1], [0, 0]), 0)
    with pytest.raises(EvaluationError, match="DIVIDE_BY_ZERO"):
        chain.head.process_batch(rows([0, 1], [0, 0]), 0)


def test_other_operator_after_a_filter_gets_plain_text() -> None:
    taker = Taker(takes_dictionaries=False)
    chain = opened(ConditionOperator(ConditionSpec(call("IsNotNull", "boolean", WORD))), taker)
    chain.head.process_batch(rows([1, 2, 3], [1, None, 0]), 0)
    chain.head.process_batch(rows([4, 5], [1, 0]), 0)
    assert [batch.schema.equals(INPUT) for batch in taker.batches] == [True, True]
    assert [batch.column(0).to_pylist() for batch in taker.batches] == [["b", "a"], ["b", "a"]]
