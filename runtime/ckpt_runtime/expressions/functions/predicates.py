"""Comparisons, three-valued logic and conditionals, as in Spark: NaN equals NaN and is greater than any other number.

``CASE``, ``IF``, ``coalesce``, ``greatest`` and similar functions evaluate a branch for the rows that take it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import eq, ge, gt, le, lt
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.evaluation import (
    Evaluator,
    Frame,
    Value,
    broadcast,
    function,
    kernel_of,
    may_fail,
    scattered,
    strict,
)
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.rows import per_row
from ckpt_runtime.expressions.types import (
    EvaluationError,
    SparkType,
    UnsupportedExpressionError,
    arrow_type,
    is_fractional,
    is_integral,
)

_KERNELS = {
    "EqualTo": "equal",
    "LessThan": "less",
    "LessThanOrEqual": "less_equal",
    "GreaterThan": "greater",
    "GreaterThanOrEqual": "greater_equal",
}
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "equal": eq, "less": lt, "less_equal": le, "greater": gt, "greater_equal": ge
}  # fmt: skip
_is_nan = kernel_of("is_nan")
_and = kernel_of("and_kleene")
_or = kernel_of("or_kleene")
_not = kernel_of("invert")
_is_null = kernel_of("is_null")
_equal = kernel_of("equal")


def comparison(name: str, type_: SparkType) -> Callable[[Value, Value], Value]:
    """Returns ``equal``, ``less``, … over two values of a type; null where either is null."""
    if isinstance(type_, dict):
        if type_["type"] == "map":
            raise UnsupportedExpressionError("a comparison of maps", "maps have no order")
        by_key = _COMPARE[name]
        return per_row(lambda left, right: by_key(sort_key(left), sort_key(right)), pa.bool_())
    if type_ == "void":
        return lambda _left, _right: pa.scalar(None, pa.bool_())
    compare = kernel_of(name)
    if not is_fractional(type_):
        return compare
    if name == "equal":
        return lambda left, right: _or(compare(left, right), _and(_is_nan(left), _is_nan(right)))
    if name == "less":
        return lambda left, right: _or(compare(left, right), _and(_not(_is_nan(left)), _is_nan(right)))
    if name == "less_equal":
        less = comparison("less", type_)
        return lambda left, right: _not(less(right, left))
    mirrored = comparison("less" if name == "greater" else "less_equal", type_)
    return lambda left, right: mirrored(right, left)


def sort_key(value: object) -> Any:
    """Returns what orders Python values as Spark orders them: null first, NaN last, structs and arrays by elements."""
    if value is None:
        return (0,)
    if isinstance(value, float) and value != value:
        return (2,)
    if isinstance(value, dict):
        return (1, tuple(sort_key(element) for element in value.values()))
    if isinstance(value, list):
        return (1, tuple(sort_key(element) for element in value))
    if isinstance(value, str):
        return (1, value.encode("utf-8", "surrogatepass"))
    return (1, value)


@strict(*_KERNELS)
def _comparison(call: Call) -> Callable[..., Value]:
    return comparison(_KERNELS[call.function], call.arguments[0].type)


@strict("EqualNullSafe")
def _equal_null_safe(call: Call) -> Callable[..., Value]:
    if call.arguments[0].type == "void":
        return lambda left, right: _and(_is_null(left), _is_null(right))
    equal = comparison("equal", call.arguments[0].type)
    return lambda left, right: pc.if_else(
        _or(_is_null(left), _is_null(right)), _and(_is_null(left), _is_null(right)), equal(left, right)
    )


@strict("Not")
def _negation(call: Call) -> Callable[..., Value]:
    return _not


@strict("IsNull", "IsNotNull")
def _null_test(call: Call) -> Callable[..., Value]:
    return _is_null if call.function == "IsNull" else kernel_of("is_valid")


strict("IsNaN")(lambda _: lambda value: pc.fill_null(_is_nan(value), False))


@strict("AtLeastNNonNulls")
def _at_least_n_non_nulls(call: Call) -> Callable[..., Value]:
    """The condition of ``DataFrame.na.drop``: at least ``n`` (a setting) values are neither null nor NaN."""
    least = pa.scalar(call.settings["n"], pa.int32())
    fractional = [is_fractional(argument.type) for argument in call.arguments]
    is_valid, add, enough = kernel_of("is_valid"), kernel_of("add"), kernel_of("greater_equal")

    def run(*values: Value) -> Value:
        count: Value = pa.scalar(0, pa.int32())
        for value, may_be_nan in zip(values, fractional, strict=True):
            present = pc.fill_null(_not(_is_nan(value)), False) if may_be_nan else is_valid(value)
            count = add(count, present.cast(pa.int32()))
        return enough(count, least)

    return run


@function("And", "Or")
def _logic(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    left, right = arguments
    combine = _and if call.function == "And" else _or
    if not may_fail(call.arguments[1]):
        return lambda frame: combine(left(frame), right(frame))
    decisive = call.function == "Or"

    def run(frame: Frame) -> Value:
        first = broadcast(left(frame), frame.length)
        # As in Spark, the second side is evaluated only where the first one does not decide the result.
        open_ = pc.fill_null(_equal(first, pa.scalar(not decisive)), True)
        second = scattered(right, frame, open_, pa.bool_())
        return combine(first, second)

    return run


@function("In")
def _membership(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    equal = comparison("equal", call.arguments[0].type)
    needle, *candidates = arguments

    def run(frame: Frame) -> Value:
        value = needle(frame)
        found: Value = pa.scalar(False)
        for candidate in candidates:
            found = _or(found, equal(value, candidate(frame)))
        return found

    return run


_if_else = kernel_of("if_else")


@function("If", "CaseWhen")
def _case(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """Arguments: condition, value, condition, value, …, and the value of all other rows where there is one."""
    kind = arrow_type(call.type)
    pairs = list(zip(arguments[0::2], arguments[1::2], strict=False))
    otherwise = arguments[-1] if len(arguments) % 2 else None
    fails = [may_fail(argument) for argument in call.arguments]
    eager = not any(fails[1:])
    constant = [isinstance(argument, Literal) for argument in call.arguments]

    def at_once(frame: Frame) -> Value:
        result = pa.scalar(None, kind) if otherwise is None else otherwise(frame)
        for condition, value in reversed(pairs):
            result = _if_else(pc.fill_null(condition(frame), False), _typed(value(frame), kind), _typed(result, kind))
        return result

    def row_by_row(frame: Frame) -> Value:
        open_ = pa.repeat(pa.scalar(True), frame.length)
        result = pa.nulls(frame.length, kind)
        for at, (condition, value) in enumerate(pairs):
            if fails[2 * at]:
                holds = pc.fill_null(scattered(condition, frame, open_, pa.bool_()), False)
            else:
                holds = pc.and_(open_, pc.fill_null(broadcast(condition(frame), frame.length), False))
            chosen = _typed(value(frame), kind) if constant[2 * at + 1] else scattered(value, frame, holds, kind)
            if holds.true_count == frame.length:  # as for windows, whose condition is that the time is not null
                return broadcast(chosen, frame.length)
            result = _if_else(holds, chosen, result)
            open_ = pc.and_not(open_, holds)
        return result if otherwise is None else _if_else(open_, scattered(otherwise, frame, open_, kind), result)

    def tried(frame: Frame) -> Value:
        # A branch of cheap functions is evaluated for all rows. If this causes an error, it may be one of other rows.
        try:
            return at_once(frame)
        except (EvaluationError, pa.ArrowException):
            return row_by_row(frame)

    if pa.types.is_nested(kind):
        return row_by_row
    if eager:
        return at_once
    return tried if all(map(_is_cheap, call.arguments)) else row_by_row


_CHEAP = frozenset(
    {
        *("Add", "Subtract", "Multiply", "Divide", "Remainder", "Pmod", "UnaryMinus", "Abs", "IntegralDivide"),
        *("And", "Or", "Not", "IsNull", "IsNotNull", "EqualTo", "EqualNullSafe", "If", "CaseWhen", "GetStructField"),
        *("LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "PreciseTimestampConversion", "Cast"),
    }
)


def _is_cheap(tree: Expression) -> bool:
    """Whether an expression is arithmetic and comparisons of numbers and times that Arrow computes."""
    if isinstance(tree, Call):
        return tree.function in _CHEAP and _is_number(tree.type) and all(map(_is_cheap, tree.arguments))
    return isinstance(tree, Column | Literal)


def _is_number(type_: object) -> bool:
    return type_ in ("boolean", "byte", "short", "integer", "long", "float", "double", "date", "timestamp")


def _typed(value: Value, kind: pa.DataType) -> Value:
    return value if value.type == kind else value.cast(kind)


@function("Coalesce")
def _coalesce(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    kind = arrow_type(call.type)

    def run(frame: Frame) -> Value:
        result = _typed(broadcast(arguments[0](frame), frame.length), kind)
        for argument in arguments[1:]:
            missing = pc.is_null(result)
            if not pc.any(missing).as_py():
                break
            result = _if_else(missing, scattered(argument, frame, missing, kind), result)
        return result

    return run


@function("RaiseError")
def _raise_error(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """Arguments: the error condition's name and a map of its message parameters."""

    def run(frame: Frame) -> Value:
        if frame.length:
            name, details = (broadcast(argument(frame), frame.length)[0].as_py() for argument in arguments)
            values = [str(value) for _, value in details or []]
            raise EvaluationError(str(name), ", ".join(values))
        return pa.nulls(0)

    return run


@strict("NullIfResult")
def _null_if(call: Call) -> Callable[..., Value]:
    """Null where the condition holds, the value otherwise."""
    kind = arrow_type(call.type)
    return lambda condition, value: _if_else(pc.fill_null(condition, False), pa.scalar(None, kind), value)


@function("NaNvl")
def _nanvl(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    kind = arrow_type(call.type)
    left, right = arguments

    def run(frame: Frame) -> Value:
        value = broadcast(left(frame), frame.length)
        nan = pc.fill_null(pc.is_nan(value), False)
        return _if_else(nan, scattered(right, frame, nan, kind), value)

    return run


@strict("Greatest", "Least")
def _extreme(call: Call) -> Callable[..., Value]:
    """Nulls are skipped; NaN is the greatest number."""
    if is_integral(call.type):
        return kernel_of("max_element_wise" if call.function == "Greatest" else "min_element_wise")
    name = "less" if call.function == "Greatest" else "greater"
    replaces = comparison(name, call.type)

    def run(*values: Value) -> Value:
        best = values[0]
        for value in values[1:]:
            better = pc.or_(pc.fill_null(replaces(best, value), False), pc.is_null(best))
            best = _if_else(pc.and_(better, pc.is_valid(value)), value, best)
        return best

    return run
