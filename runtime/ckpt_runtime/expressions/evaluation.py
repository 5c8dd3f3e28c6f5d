"""Compiles a typed expression to calls of Arrow kernels, once per operator, and evaluates it once per batch.

``compile_expression(tree)`` returns a function from a :class:`Frame` to a column. A function's builder gets its node
and the compiled arguments; most builders are made by :func:`strict`, which evaluates all arguments and calls one
kernel. Those that must not evaluate an argument for every row (``CASE``, ``AND``, ``coalesce``) evaluate it over a
part of the frame.

A value is an Arrow array of the frame's length, or an Arrow scalar where it is the same for each row.
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.errors import EvaluationError, UnsupportedExpressionError
from ckpt_runtime.expressions.nodes import Call, Column, Expression, Lambda, Literal, Variable
from ckpt_runtime.expressions.types import is_fractional, is_integral, is_year_month, value_type


def literal_scalar(literal: Literal) -> pa.Scalar:
    """Returns the Arrow scalar of a constant.

    Dates are days and timestamps microseconds since 1970, as texts of integers. Raises UnsupportedExpressionError for a
    constant array, map or struct.
    """
    kind = value_type(literal.type)
    value = literal.value
    if value is None:
        return pa.scalar(None, kind)
    if isinstance(value, bool):
        return pa.scalar(value, kind)
    if pa.types.is_string(kind):
        return pa.scalar(value, kind)
    if is_integral(literal.type) or is_year_month(literal.type):
        return pa.scalar(int(value), kind)
    if is_fractional(literal.type):
        return pa.scalar(float(value), kind)
    if pa.types.is_boolean(kind):
        return pa.scalar(value == "true", kind)
    if pa.types.is_decimal(kind):
        return pa.scalar(decimal.Decimal(value), kind)
    if pa.types.is_binary(kind):
        return pa.scalar(bytes.fromhex(value), kind)
    if pa.types.is_date32(kind):
        return pa.scalar(int(value), pa.int32()).cast(kind)
    if pa.types.is_timestamp(kind) or pa.types.is_duration(kind):
        return pa.scalar(int(value), pa.int64()).cast(kind)
    if literal.type == "interval":
        months, days, micros = map(int, str(value).split(","))
        return pa.scalar({"months": months, "days": days, "micros": micros}, kind)
    raise UnsupportedExpressionError(f"a constant of type {literal.type}")


Value: TypeAlias = "pa.Array | pa.Scalar"


class Frame:
    """The rows that an expression is evaluated over: columns of one length, and the arguments of enclosing lambdas.

    ``moment`` is the current time for these rows, in microseconds since 1970.
    """

    def __init__(
        self,
        columns: Sequence[pa.Array],
        length: int,
        variables: Mapping[int, Value] | None = None,
        moment: int | None = None,
    ) -> None:
        self.columns = columns
        self.length = length
        self.variables = variables or {}
        self.moment = moment

    def part(self, mask: pa.Array) -> Frame:
        """Returns the rows for which ``mask``, without nulls, is true."""
        columns = [column.filter(mask) for column in self.columns]
        variables = {id_: _filtered(value, mask) for id_, value in self.variables.items()}
        return Frame(columns, pc.sum(mask).as_py() or 0, variables, self.moment)

    def with_variables(self, values: Mapping[int, Value]) -> Frame:
        """Returns the same rows with the arguments of one more lambda."""
        return Frame(self.columns, self.length, {**self.variables, **values}, self.moment)


Evaluator: TypeAlias = "Callable[[Frame], Value]"
Builder: TypeAlias = "Callable[[Call, Sequence[Evaluator]], Evaluator]"

FUNCTIONS: dict[str, Builder] = {}
"""The builder of each function, by the name of Spark's expression class."""


_NOT_REPEATABLE = "its values are others after a recovery; take a hash of the row's columns, such as xxhash64(id)"
_NO_PARTITIONS = "rows of a stream have no partition or file of Spark's; write the value as a column where rows begin"
_NO_JVM = "the engine has no Java classes; call a Python function"
_REFUSED = {
    **dict.fromkeys(("Rand", "Randn", "Uuid", "Uniform", "RandStr", "Shuffle"), _NOT_REPEATABLE),
    **dict.fromkeys(("MonotonicallyIncreasingID", "SparkPartitionID"), _NO_PARTITIONS),
    **dict.fromkeys(("InputFileName", "InputFileBlockStart", "InputFileBlockLength"), _NO_PARTITIONS),
    **dict.fromkeys(("CallMethodViaReflection", "Invoke", "StaticInvoke"), _NO_JVM),
    **dict.fromkeys(("Collate", "ResolvedCollation"), "the engine compares text by its bytes; use lower(...)"),
}


def refusal(name: str) -> UnsupportedExpressionError:
    """Returns the error for a function that the engine lacks, with an alternative if one is known."""
    why = _REFUSED.get(name)
    what = f"the function {name}"
    return UnsupportedExpressionError(what) if why is None else UnsupportedExpressionError(what, why)


def function(*names: str) -> Callable[[Builder], Builder]:
    """Registers a builder under the names of Spark's expression classes."""

    def register(builder: Builder) -> Builder:
        for name in names:
            FUNCTIONS[name] = builder
        return builder

    return register


def strict(*names: str) -> Callable[[Callable[[Call], Callable[..., Value]]], None]:
    """Registers functions all of whose arguments are evaluated for each row.

    The decorated builder is called once with the node and returns the kernel, which is called per batch with values.
    """

    def register(choose_kernel: Callable[[Call], Callable[..., Value]]) -> None:
        def build(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
            kernel = choose_kernel(call)
            if len(arguments) == 1:
                only = arguments[0]
                return lambda frame: kernel(only(frame))
            if call.function not in _TAKES_NULLS and any(map(may_fail, call.arguments[1:])):
                kinds = [value_type(argument.type) for argument in call.arguments]
                return lambda frame: kernel(*_from_left_to_right(arguments, kinds, frame))
            if len(arguments) == 2:
                left, right = arguments
                return lambda frame: kernel(left(frame), right(frame))
            return lambda frame: kernel(*[argument(frame) for argument in arguments])

        function(*names)(build)

    return register


_TAKES_NULLS = frozenset(
    {
        *("EqualNullSafe", "Greatest", "Least", "StringLocate", "Mask", "ConcatWs", "CreateMap", "FormatString"),
        *("ArrayAppend", "ArrayPrepend", "ArrayInsert", "ArrayRepeat", "NullIfResult"),
    }
)
"""Functions for which Spark evaluates every argument, even where another one is null."""


def _from_left_to_right(arguments: Sequence[Evaluator], kinds: Sequence[pa.DataType], frame: Frame) -> Sequence[Value]:
    """Returns the values of arguments. As in Spark, an error does not count where an earlier argument is null."""
    try:
        return [argument(frame) for argument in arguments]
    except EvaluationError:
        values: list[Value] = []
        open_ = pa.repeat(pa.scalar(True), frame.length)
        for argument, kind in zip(arguments, kinds, strict=True):
            values.append(scattered(argument, frame, open_, kind))
            open_ = pc.and_(open_, pc.is_valid(values[-1]))
        return values


def scattered(evaluator: Evaluator, frame: Frame, mask: pa.Array, type_: pa.DataType) -> pa.Array:
    """Evaluates only the rows of a mask without nulls; the others are null."""
    part = frame.part(mask)
    if part.length == 0:
        return pa.nulls(frame.length, type_)
    values = broadcast(evaluator(part), part.length).cast(type_)
    if part.length == frame.length:
        return values
    positions = pc.subtract(pc.cumulative_sum(mask.cast(pa.int64())), 1)
    return values.take(pc.if_else(mask, positions, pa.scalar(None, pa.int64())))


def kernel_of(name: str, options: Any = None) -> Callable[..., Value]:
    """Returns an Arrow kernel by its name, looked up once: half the cost of ``pyarrow.compute``'s wrapper."""
    call = pc.get_function(name).call
    if options is None:
        return lambda *values: call(values)
    return lambda *values: call(values, options)


def compile_expression(tree: Expression) -> Evaluator:
    """Returns the function that evaluates a tree over a frame.

    Raises UnsupportedExpressionError for a function or a type that the engine does not have.
    """
    match tree:
        case Column(index=index):
            return lambda frame: frame.columns[index]
        case Literal():
            scalar = literal_scalar(tree)
            return lambda frame: scalar
        case Variable(id=id_):
            return lambda frame: frame.variables[id_]
        case Lambda():
            raise UnsupportedExpressionError("a lambda function", "it stands outside a higher-order function")
    builder = FUNCTIONS.get(tree.function)
    if builder is None:
        raise refusal(tree.function)
    value_type(tree.type)
    plain = [argument for argument in tree.arguments if not isinstance(argument, Lambda)]
    return builder(tree, [compile_expression(argument) for argument in plain])


def evaluate(evaluator: Evaluator, frame: Frame, type_: pa.DataType) -> pa.Array:
    """Returns the values of a compiled expression as an array of the frame's length and of exactly ``type_``."""
    value = evaluator(frame)
    array = broadcast(value, frame.length)
    return array if array.type == type_ else array.cast(type_)


def broadcast(value: Value, length: int) -> pa.Array:
    """Returns an array of ``length`` values."""
    return pa.repeat(value, length) if isinstance(value, pa.Scalar) else value


def _filtered(value: Value, mask: pa.Array) -> Value:
    return value if isinstance(value, pa.Scalar) else value.filter(mask)


def may_fail(tree: Expression) -> bool:
    """Returns whether a row may cause an error: a branch must then be evaluated for its own rows only."""
    match tree:
        case Call():
            return tree.function not in _NEVER_FAIL or any(may_fail(argument) for argument in tree.arguments)
        case Lambda():
            return may_fail(tree.body)
    return False


_NEVER_FAIL = frozenset(
    {
        *("And", "Or", "Not", "IsNull", "IsNotNull", "IsNaN", "EqualTo", "EqualNullSafe", "In", "If", "CaseWhen"),
        *("LessThan", "LessThanOrEqual", "GreaterThan", "GreaterThanOrEqual", "Coalesce", "NaNvl", "GetStructField"),
        *("Upper", "Lower", "Length", "Concat", "StartsWith", "EndsWith", "Contains", "CreateNamedStruct"),
    }
)
