"""``CASE``, ``IF``, ``coalesce``, ``greatest`` and their kin. A branch is evaluated for the rows that take it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
from ckpt_runtime.expressions.functions.predicates import comparison
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Literal
from ckpt_runtime.expressions.types import EvaluationError, arrow_type

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
    name = "less" if call.function == "Greatest" else "greater"
    replaces = comparison(name, call.type)

    def run(*values: Value) -> Value:
        best = values[0]
        for value in values[1:]:
            better = pc.or_(pc.fill_null(replaces(best, value), False), pc.is_null(best))
            best = _if_else(pc.and_(better, pc.is_valid(value)), value, best)
        return best

    return run
