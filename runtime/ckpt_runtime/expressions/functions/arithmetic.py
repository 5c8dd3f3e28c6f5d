"""Arithmetic and bits: ``+ - * / div % pmod``, negation, absolute values, shifts.

In ANSI mode an overflow or a division by zero is an error, otherwise integers wrap and a division gives null, and
``try_*`` gives null for both. Decimals are computed exactly and rounded half up to the type that Spark's rules give.
"""

from __future__ import annotations

import decimal
import functools
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.evaluation import Value, by_row, kernel_of, strict
from ckpt_runtime.expressions.functions.intervals import interval_arithmetic, is_interval
from ckpt_runtime.expressions.nodes import Call
from ckpt_runtime.expressions.rows import EXACT, per_row
from ckpt_runtime.expressions.types import (
    EvaluationError,
    SparkType,
    arrow_type,
    decimal_of,
    is_fractional,
    is_integral,
)

_WRAPPING = {"Add": "add", "Subtract": "subtract", "Multiply": "multiply"}
_BITS = {"byte": 8, "short": 16, "integer": 32, "long": 64}

_equal = kernel_of("equal")
_and = kernel_of("and_kleene")
_if_else = kernel_of("if_else")
_is_valid = kernel_of("is_valid")


def overflow(type_: object) -> EvaluationError:
    """Returns the error for a result that its type cannot hold."""
    return EvaluationError(
        "ARITHMETIC_OVERFLOW", f"the result is out of the range of {type_}; try_* gives null instead"
    )


def checked(call: Call, kernel: Callable[..., Value]) -> Callable[..., Value]:
    """Returns the kernel with Arrow's overflow error replaced by Spark's."""

    def compute(*values: Value) -> Value:
        try:
            return kernel(*values)
        except pa.ArrowInvalid as error:
            if "overflow" not in str(error).lower():
                raise
            raise overflow(call.type) from None

    return compute


@strict("Add", "Subtract", "Multiply")
def _sum_difference_product(call: Call) -> Callable[..., Value]:
    name = _WRAPPING[call.function]
    if is_interval(call.type):
        return interval_arithmetic(call)
    if decimal_of(call.type):
        return _decimal_operation(call, name)
    if not is_integral(call.type):
        return kernel_of(name)
    safe = kernel_of(f"{name}_checked")
    if call.mode == "ansi":
        return checked(call, safe)
    wrapping = kernel_of(name)
    if call.mode == "legacy":
        return wrapping

    def null_on_overflow(left: Value, right: Value) -> Value:
        try:
            return safe(left, right)
        except pa.ArrowInvalid:
            exact = per_row(_EXACT[name], pa.decimal128(38, 0))(left, right)
            bound = 1 << (_BITS[str(call.type)] - 1)
            fits = pc.and_(pc.greater_equal(exact, _scalar(-bound)), pc.less(exact, _scalar(bound)))
            return _if_else(fits, wrapping(left, right), pa.scalar(None, arrow_type(call.type)))

    return null_on_overflow


def _scalar(value: int) -> pa.Scalar:
    return pa.scalar(decimal.Decimal(value), pa.decimal128(38, 0))


_EXACT: dict[str, Callable[..., object]] = {
    "add": lambda a, b: decimal.Decimal(a + b),
    "subtract": lambda a, b: decimal.Decimal(a - b),
    "multiply": lambda a, b: decimal.Decimal(a * b),
}


def _decimal_operation(call: Call, name: str) -> Callable[..., Value]:
    """Returns an exact operation on decimals, rounded half up to the result's type."""
    found = decimal_of(call.type)
    assert found is not None
    precision, scale = found
    compute = kernel_of(name)
    result = arrow_type(call.type)
    if _exact_size(name, [arrow_type(argument.type) for argument in call.arguments]) == found:
        return compute  # nothing is rounded and nothing overflows
    wide = [_wide_decimal(argument.type) for argument in call.arguments]
    if _exact_size(name, wide)[0] > _MOST_DIGITS:
        operation = {"add": EXACT.add, "subtract": EXACT.subtract, "multiply": EXACT.multiply}[name]
        quantum = decimal.Decimal(1).scaleb(-scale)
        rounded = per_row(
            lambda a, b: operation(a, b).quantize(quantum, decimal.ROUND_HALF_UP, EXACT), pa.decimal256(76, scale)
        )
        return _fitting(call, found, rounded, result)

    def run(left: Value, right: Value) -> Value:
        exact = compute(left.cast(wide[0]), right.cast(wide[1]))
        return to_decimal(exact, precision, scale, result, call.mode)

    return run


def _can_exceed(kind: pa.DataType, digits: int) -> bool:
    """Whether a decimal type has values of more digits before the point, and holds ten to that power."""
    return bool(kind.precision - kind.scale > digits)


_MOST_DIGITS = 76
"""Maximum number of digits of Arrow's decimals."""


def _exact_size(name: str, kinds: list[pa.DataType]) -> tuple[int, int]:
    """Returns the precision and the scale that Arrow gives the exact result of an operation."""
    left, right = kinds
    if name == "multiply":
        return left.precision + right.precision + 1, left.scale + right.scale
    scale = max(left.scale, right.scale)
    return max(left.precision - left.scale, right.precision - right.scale) + scale + 1, scale


def _wide_decimal(type_: SparkType) -> pa.DataType:
    found = decimal_of(type_)
    assert found is not None
    return pa.decimal256(found[0], found[1])


def to_decimal(exact: Value, precision: int, scale: int, result: pa.DataType, mode: str) -> Value:
    """Rounds decimals half up to a scale. More digits than ``precision`` are an error or null, by the mode."""
    rounded = pc.round(exact, ndigits=scale, round_mode="half_towards_infinity") if exact.type.scale > scale else exact
    limit = pa.scalar(decimal.Decimal(10) ** (precision - scale), pa.decimal256(precision - scale + 1, 0))
    fits = (
        pc.less(pc.abs(rounded), limit.cast(rounded.type))
        if _can_exceed(rounded.type, precision - scale)
        else (pa.scalar(True))
    )
    if pc.all(fits, min_count=0).as_py() if not isinstance(fits, pa.Scalar) else fits.as_py() in (True, None):
        return rounded.cast(pa.decimal256(min(76, precision + 1), scale)).cast(result)
    if mode == "ansi":
        raise EvaluationError(
            "NUMERIC_VALUE_OUT_OF_RANGE",
            f"a result needs more than the {precision} digits of decimal({precision},{scale})",
        )
    kept = _if_else(fits, rounded, pa.scalar(None, rounded.type))
    return kept.cast(pa.decimal256(min(76, precision + 1), scale)).cast(result)


_QUOTIENT = decimal.Context(prec=39, rounding=decimal.ROUND_DOWN)
"""Spark divides decimals to 39 digits, truncated, before it rounds to the scale of the result."""


def _guarded(call: Call, divide: Callable[..., Value]) -> Callable[..., Value]:
    """Returns a division that never sees a divisor of zero: an error where both sides have a value, or null."""

    def run(left: Value, right: Value) -> Value:
        zero = _equal(right, zero_of(right.type))
        if isinstance(zero, pa.Scalar):
            hit = zero.as_py()
        else:
            hit = pc.any(zero).as_py()
        if not hit:
            return divide(left, right)
        if call.mode == "ansi":
            both = _and(zero, _is_valid(left))
            if both.as_py() if isinstance(both, pa.Scalar) else pc.any(both).as_py():
                raise EvaluationError("DIVIDE_BY_ZERO", "the divisor is zero; try_divide gives null instead")
        return divide(left, _if_else(zero, pa.scalar(None, right.type), right))

    return run


@functools.cache
def zero_of(kind: pa.DataType) -> pa.Scalar:
    """Returns the zero of a type of numbers."""
    return pa.scalar(decimal.Decimal(0), kind) if pa.types.is_decimal(kind) else pa.scalar(0, pa.int8()).cast(kind)


@strict("Divide")
def _divide(call: Call) -> Callable[..., Value]:
    found = decimal_of(call.type)
    if found is None:
        return _guarded(call, kernel_of("divide"))
    result = arrow_type(call.type)

    def quotient(a: decimal.Decimal, b: decimal.Decimal) -> decimal.Decimal:
        return _QUOTIENT.divide(a, b).quantize(decimal.Decimal(1).scaleb(-found[1]), decimal.ROUND_HALF_UP, EXACT)

    return _guarded(call, _fitting(call, found, per_row(quotient, pa.decimal256(76, found[1])), result))


def _fitting(
    call: Call, found: tuple[int, int], compute: Callable[..., Value], result: pa.DataType
) -> Callable[..., Value]:
    return lambda *values: to_decimal(compute(*values), *found, result, call.mode)


@strict("IntegralDivide")
def _integral_divide(call: Call) -> Callable[..., Value]:
    if decimal_of(call.arguments[0].type):

        def whole(a: decimal.Decimal, b: decimal.Decimal) -> int:
            quotient = int(EXACT.divide_int(a, b))
            if not -(1 << 63) <= quotient < 1 << 63:
                raise overflow("bigint")
            return quotient

        return _guarded(call, per_row(whole, pa.int64()))
    if call.mode == "ansi":
        return _guarded(call, checked(call, kernel_of("divide_checked")))
    return _guarded(call, _wrapping_divide)


def _wrapping_divide(left: Value, right: Value) -> Value:
    """The minimum divided by -1 is the minimum again; Arrow raises an error for it."""
    minus_one = pa.scalar(-1, right.type)
    flips = pc.equal(right, minus_one)
    return _if_else(flips, pc.negate(left), pc.divide(left, _if_else(flips, pa.scalar(1, right.type), right)))


@strict("Remainder", "Pmod")
def _remainder(call: Call) -> Callable[..., Value]:
    positive = call.function == "Pmod"
    found = decimal_of(call.type)
    if found is not None:

        def decimals(a: decimal.Decimal, b: decimal.Decimal) -> decimal.Decimal:
            rest = EXACT.remainder(a, b)
            return EXACT.remainder(EXACT.add(rest, b), b) if positive and rest < 0 else rest

        exact = per_row(decimals, pa.decimal256(76, 38))
        return _guarded(call, _fitting(call, found, exact, arrow_type(call.type)))

    def run(left: Value, right: Value) -> Value:
        return _vectorised(_numpy_pmod if positive else np.fmod, left, right)

    if is_fractional(call.type):
        return _guarded(call, run)

    def integers(left: Value, right: Value) -> Value:
        # The remainder of a division by -1 is 0; dividing the minimum by it would overflow.
        return run(left, _if_else(pc.equal(right, pa.scalar(-1, right.type)), pa.scalar(1, right.type), right))

    return _guarded(call, integers)


def _numpy_pmod(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    rest = np.fmod(left, right)
    positive: np.ndarray = np.where(rest < 0, np.fmod(rest + right, right), rest)
    return positive


def _vectorised(compute: Callable[..., np.ndarray], left: Value, right: Value) -> Value:
    """Runs a function of NumPy's over two numbers of one type; null where either is null. No divisor is zero."""
    if isinstance(left, pa.Scalar) and isinstance(right, pa.Scalar):
        if not (left.is_valid and right.is_valid):
            return pa.scalar(None, left.type)
        kind = left.type.to_pandas_dtype()
        return pa.scalar(compute(kind(left.as_py()), kind(right.as_py())), left.type)
    if isinstance(right, pa.Scalar) and right.is_valid and left.null_count == 0:
        divisor = left.type.to_pandas_dtype()(right.as_py())
        with np.errstate(all="ignore"):
            return pa.array(compute(left.to_numpy(zero_copy_only=False), divisor), left.type)
    length = len(left) if not isinstance(left, pa.Scalar) else len(right)
    sides, valid = [], np.ones(length, bool)
    for value in (left, right):
        array = pa.repeat(value, length) if isinstance(value, pa.Scalar) else value
        valid &= array.is_valid().to_numpy(zero_copy_only=False)
        sides.append(array.fill_null(pa.scalar(1, array.type)).to_numpy(zero_copy_only=False))
    with np.errstate(all="ignore"):
        return pa.array(compute(*sides), left.type, mask=~valid)


@strict("UnaryMinus", "Abs")
def _negated(call: Call) -> Callable[..., Value]:
    name = "negate" if call.function == "UnaryMinus" else "abs"
    if is_interval(call.type):
        return interval_arithmetic(call)
    if is_integral(call.type) and call.mode == "ansi":
        return checked(call, kernel_of(f"{name}_checked"))
    return kernel_of(name)


strict("UnaryPositive")(lambda _: lambda value: value)
strict("BitwiseAnd")(lambda _: kernel_of("bit_wise_and"))
strict("BitwiseOr")(lambda _: kernel_of("bit_wise_or"))
strict("BitwiseXor")(lambda _: kernel_of("bit_wise_xor"))
strict("BitwiseNot")(lambda _: kernel_of("bit_wise_not"))
by_row("BitwiseCount")(lambda value: (int(value) & 0xFFFFFFFFFFFFFFFF).bit_count())


@strict("ShiftLeft", "ShiftRight", "ShiftRightUnsigned")
def _shift(call: Call) -> Callable[..., Value]:
    bits = _BITS[str(call.type)]
    kind = arrow_type(call.type)
    unsigned = pa.uint32() if bits == 32 else pa.uint64()
    name = "shift_left" if call.function == "ShiftLeft" else "shift_right"
    shift = kernel_of(name)
    logical = call.function != "ShiftRight"

    def run(value: Value, distance: Value) -> Value:
        # As in Java, only the low five or six bits of the distance count.
        masked = pc.bit_wise_and(distance, pa.scalar(bits - 1, distance.type))
        if logical:
            return shift(value.cast(unsigned, safe=False), masked.cast(unsigned)).cast(kind, safe=False)
        # Arrow limits the shift of signed numbers to one bit less than their width, so it is done in two steps.
        half = pc.shift_right(masked, pa.scalar(1, masked.type))
        return shift(shift(value, half.cast(kind)), pc.subtract(masked, half).cast(kind))

    return run


@strict("BitwiseGet")
def _bit_get(call: Call) -> Callable[..., Value]:
    bits = _BITS[str(call.arguments[0].type)]

    def bit(value: int, position: int) -> int:
        if not 0 <= position < bits:
            raise EvaluationError("BIT_POSITION_RANGE", f"bit {position} is not one of 0 to {bits - 1}")
        return value >> position & 1

    return per_row(bit, pa.int8())
