"""Python functions in typed trees: which are called together, which as one, which twice."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, Literal
from ckpt_runtime.frontend.python_functions import FUNCTION, CapturedFunctions, separated
from ckpt_runtime.graph.errors import PlanError

ARROW, ITERATOR = 101, 204
FIRST = Column(0, "long")


def call(number: int, *arguments: Expression, kind: int = ARROW, deterministic: bool = True) -> Call:
    settings = {"name": f"f{number}", "number": number, "eval_type": kind, "deterministic": deterministic}
    return Call(FUNCTION, arguments, "long", settings=settings)


@pytest.fixture
def known() -> CapturedFunctions:
    functions = CapturedFunctions()
    for at in range(3):
        functions.number_of(lambda value, at=at: value + at)
    return functions


def test_function_has_the_same_number_each_time_that_a_plan_mentions_it() -> None:
    functions = CapturedFunctions()

    def function(value: Any) -> Any:
        return value

    assert [functions.number_of(function), functions.number_of(len), functions.number_of(function)] == [0, 1, 0]


def test_functions_of_one_kind_are_called_together_and_equal_deterministic_calls_once(known: CapturedFunctions) -> None:
    steps, trees = separated([call(0, FIRST), call(1, FIRST), call(0, FIRST)], 2, known)
    assert [len(step.functions) for step in steps] == [2]
    assert trees == [Column(2, "long"), Column(3, "long"), Column(2, "long")]
    steps, trees = separated([call(0, deterministic=False), call(0, deterministic=False)], 1, known)
    assert len(steps[0].functions) == 2
    assert trees == [Column(1, "long"), Column(2, "long")]
    steps, _ = separated([call(0, FIRST, kind=ITERATOR), call(1, FIRST, kind=ITERATOR)], 1, known)
    assert [len(step.functions) for step in steps] == [1, 1]


def test_nested_functions_are_one_call_unless_another_expression_is_between_them(known: CapturedFunctions) -> None:
    steps, trees = separated([call(1, call(0, FIRST))], 1, known)
    assert [len(function.chain) for step in steps for function in step.functions] == [2]
    more = Call("Add", (call(0, FIRST), Literal("1", "long")), "long")
    steps, trees = separated([call(1, more)], 1, known)
    assert [len(step.functions) for step in steps] == [1, 1]
    assert steps[1].arguments == [Call("Add", (Column(1, "long"), Literal("1", "long")), "long")]
    assert trees == [Column(2, "long")]


def test_named_argument_reaches_the_function_by_its_name(known: CapturedFunctions) -> None:
    named = Call("NamedArgumentExpression", (FIRST,), "long", settings={"key": "value"})
    [step], _ = separated([call(0, named)], 1, known)
    assert (step.functions[0].positions, step.functions[0].named) == ((), {"value": 0})


def test_function_of_another_program_or_within_a_lambda_is_refused(known: CapturedFunctions) -> None:
    with pytest.raises(PlanError, match="only a submitted program"):
        separated([call(3, FIRST)], 1, known)
    with pytest.raises(PlanError, match="lambda"):
        separated([Call("ArrayTransform", (FIRST, Lambda(call(0, FIRST), ())), "long")], 1, known)
