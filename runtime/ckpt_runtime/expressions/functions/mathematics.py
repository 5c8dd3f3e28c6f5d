"""Mathematical functions: powers, logarithms, angles, roundings, and numbers written in other bases."""

from __future__ import annotations

import decimal
import math
import string
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.evaluation import Evaluator, Frame, Value, by_row, function, kernel_of, strict
from ckpt_runtime.expressions.functions.arithmetic import overflow, to_decimal
from ckpt_runtime.expressions.nodes import Call, Literal
from ckpt_runtime.expressions.rows import EXACT, per_row
from ckpt_runtime.expressions.types import (
    EvaluationError,
    UnsupportedExpressionError,
    arrow_type,
    decimal_of,
    is_integral,
)

_DOUBLE = pa.float64()

_ARROW = {
    "Sqrt": "sqrt",
    "Exp": "exp",
    "Acos": "acos",
    "Asin": "asin",
    "Atan": "atan",
    "Cos": "cos",
    "Sin": "sin",
    "Tan": "tan",
    "Rint": "round",
}


def _numpy(compute: Callable[[np.ndarray], np.ndarray]) -> Callable[[Value], Value]:
    """Returns a kernel of a function of NumPy's over doubles; null where the argument is null."""

    def run(value: Value) -> Value:
        if isinstance(value, pa.Scalar):
            return run(pa.repeat(value, 1))[0]
        missing = value.is_null().to_numpy(zero_copy_only=False)
        with np.errstate(all="ignore"):
            return pa.array(compute(value.fill_null(1.0).to_numpy(zero_copy_only=False)), _DOUBLE, mask=missing)

    return run


_NUMPY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Cosh": np.cosh,
    "Sinh": np.sinh,
    "Tanh": np.tanh,
    "Acosh": lambda x: np.log(x + np.sqrt(x * x - 1.0)),
    "Atanh": lambda x: 0.5 * (np.log1p(x) - np.log1p(-x)),
    "Asinh": np.arcsinh,
    "Cbrt": np.cbrt,
    "Expm1": np.expm1,
    "Cot": lambda x: 1.0 / np.tan(x),
    "Csc": lambda x: 1.0 / np.sin(x),
    "Sec": lambda x: 1.0 / np.cos(x),
    "Signum": np.sign,
    "ToDegrees": np.degrees,
    "ToRadians": np.radians,
}


@strict(*_NUMPY)
def _by_numpy(call: Call) -> Callable[..., Value]:
    return _numpy(_NUMPY[call.function])


@strict(*_ARROW)
def _by_arrow(call: Call) -> Callable[..., Value]:
    if call.function == "Rint":
        return kernel_of("round", pc.RoundOptions(0, "half_to_even"))
    return kernel_of(_ARROW[call.function])


_LOGARITHMS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "Log": (np.log, 0.0),
    "Log10": (np.log10, 0.0),
    "Log2": (np.log2, 0.0),
    "Log1p": (np.log1p, -1.0),
}


@strict(*_LOGARITHMS)
def _logarithm(call: Call) -> Callable[..., Value]:
    """Null where the logarithm does not exist, in every mode."""
    compute, asymptote = _LOGARITHMS[call.function]
    run = _numpy(compute)
    return lambda value: run(pc.if_else(pc.less_equal(value, asymptote), pa.scalar(None, _DOUBLE), value))


@by_row("Logarithm")
def _logarithm_of_base(base: float, value: float) -> float | None:
    if base <= 0 or value <= 0:
        return None
    over = math.log(value)
    under = math.log(base)
    return over / under if under else (math.nan if over == 0 else math.copysign(math.inf, over))


strict("Pi")(lambda _: lambda: pa.scalar(math.pi))
strict("EulerNumber")(lambda _: lambda: pa.scalar(math.e))
strict("Pow")(lambda _: kernel_of("power"))
# Java adds 0.0, which makes -0.0 a 0.0.
strict("Atan2")(lambda _: lambda y, x: pc.atan2(pc.add(y, 0.0), pc.add(x, 0.0)))
by_row("Hypot")(math.hypot)
by_row("Factorial")(lambda n: math.factorial(n) if 0 <= n <= 20 else None)
by_row("Bin")(lambda value: f"{value & 0xFFFFFFFFFFFFFFFF:b}")


@strict("Ceil", "Floor")
def _whole(call: Call) -> Callable[..., Value]:
    name = "ceil" if call.function == "Ceil" else "floor"
    source = call.arguments[0].type
    if is_integral(source):
        return lambda value: value.cast(arrow_type(call.type))
    compute = kernel_of(name)
    if found := decimal_of(call.type):
        return lambda value: to_decimal(
            compute(value.cast(pa.decimal256(min(76, value.type.precision + 1), value.type.scale))),
            *found,
            arrow_type(call.type),
            call.mode,
        )

    def java_long(number: float) -> int:
        if number != number:
            return 0
        if call.mode == "ansi" and abs(number) > 2.0**63:
            raise overflow("bigint")
        return max(
            -(1 << 63), min((1 << 63) - 1, int(number) if abs(number) < 1e30 else (1 if number > 0 else -1) << 70)
        )

    slow = per_row(java_long, pa.int64())

    def run(value: Value) -> Value:
        whole = compute(value)
        try:
            return whole.cast(pa.int64())
        except pa.ArrowInvalid:
            return slow(whole)

    return run


_ROUNDING = {
    "Round": decimal.ROUND_HALF_UP,
    "BRound": decimal.ROUND_HALF_EVEN,
    "RoundCeil": decimal.ROUND_CEILING,
    "RoundFloor": decimal.ROUND_FLOOR,
}


@strict(*_ROUNDING)
def _rounded(call: Call) -> Callable[..., Value]:
    rounding = _ROUNDING[call.function]
    source = call.arguments[0].type
    result = arrow_type(call.type)
    found = decimal_of(call.type)

    def exact(value: object, scale: int) -> object:
        if isinstance(value, float):
            if value != value or abs(value) == math.inf:
                return value
            text = repr(float(np.format_float_positional(np.float32(value)))) if source == "float" else repr(value)
            near = decimal.Decimal(text).quantize(decimal.Decimal(1).scaleb(-scale), rounding, EXACT)
            return float(near) + 0.0  # Java's decimals have no -0
        if isinstance(value, int) and scale >= 0:
            return value
        number = decimal.Decimal(value)  # type: ignore[arg-type]
        rounded = number.quantize(decimal.Decimal(1).scaleb(-scale), rounding, EXACT)
        return _in_range(int(rounded), call) if is_integral(source) else rounded

    if found is None:
        return per_row(exact, result)
    wide = per_row(exact, pa.decimal256(76, found[1]))
    return lambda value, scale: to_decimal(wide(value, scale), *found, result, call.mode)


def _in_range(value: int, call: Call) -> int:
    bits = {"byte": 8, "short": 16, "integer": 32, "long": 64}[str(call.type)]
    limit = 1 << (bits - 1)
    if -limit <= value < limit:
        return value
    if call.mode == "ansi":
        raise overflow(call.type)
    return (value + limit) % (2 * limit) - limit


@strict("Hex")
def _hex(call: Call) -> Callable[..., Value]:
    if is_integral(call.arguments[0].type):
        return per_row(lambda value: f"{value & 0xFFFFFFFFFFFFFFFF:X}", pa.string())
    return per_row(lambda value: (value.encode() if isinstance(value, str) else value).hex().upper(), pa.string())


@by_row("Unhex")
def _unhex(text: str) -> bytes | None:
    digits = text if len(text) % 2 == 0 else f"0{text}"
    try:
        return bytes.fromhex(digits) if digits.isascii() and " " not in digits else None
    except ValueError:
        return None


_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@strict("Conv")
def _conv(call: Call) -> Callable[..., Value]:
    def convert(text: str, from_: int, to: int) -> str | None:
        text = text.strip(" ")
        if not (2 <= from_ <= 36 and 2 <= abs(to) <= 36) or not text:
            return None
        negative = text[0] == "-"
        value = 0
        for character in text[negative:].upper():
            digit = _DIGITS.find(character)
            if not 0 <= digit < from_:
                break
            value = value * from_ + digit
        if value >= 1 << 64:
            if call.mode == "ansi":
                raise EvaluationError("ARITHMETIC_OVERFLOW", "conv() overflows 64 bits")
            value = (1 << 64) - 1
        signed = value - (1 << 64) if value >= 1 << 63 else value
        if negative and to > 0:
            signed = -1 if signed < 0 else -signed
        if to < 0 and signed < 0:
            signed, negative = -signed, True
        return ("-" if negative and to < 0 else "") + np.base_repr(signed % (1 << 64), abs(to))

    return per_row(convert, pa.string())


@strict("WidthBucket")
def _width_bucket(call: Call) -> Callable[..., Value]:
    if call.arguments[0].type != "double":
        raise UnsupportedExpressionError(f"width_bucket of {call.arguments[0].type}")

    def bucket(value: float, low: float, high: float, count: int) -> int | None:
        numbers = (value, low, high)
        if count <= 0 or count == (1 << 63) - 1 or low == high or any(x != x for x in numbers):
            return None
        if math.isinf(low) or math.isinf(high):
            return None
        lower, upper = min(low, high), max(low, high)
        if low < high:
            if value < lower:
                return 0
            return count + 1 if value >= upper else int(count * (value - lower) / (upper - lower)) + 1
        if value > upper:
            return 0
        return count + 1 if value <= lower else int(count * (upper - value) / (upper - lower)) + 1

    return per_row(bucket, pa.int64())


def generator_of(frame: Frame) -> np.random.Generator:
    """Random numbers for the rows of a frame. A seed has no effect: Spark's streams choose one for each batch."""
    assert frame.random_bytes is not None
    return np.random.Generator(np.random.PCG64(int.from_bytes(frame.random_bytes(16))))


_CHARACTERS = np.frombuffer((string.digits + string.ascii_letters).encode(), dtype="S1")


@function("RandStr")
def _random_text(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    """Texts of digits and letters, of a constant length."""
    [length] = call.arguments
    size = int(str(length.value)) if isinstance(length, Literal) and length.value is not None else -1
    if size < 0:
        raise UnsupportedExpressionError("randstr", "its length must be a constant, 0 or more")

    def texts(frame: Frame) -> Value:
        picked = generator_of(frame).integers(len(_CHARACTERS), size=frame.length * size)
        data = _CHARACTERS[picked].tobytes().decode()
        return pa.array((data[at * size : (at + 1) * size] for at in range(frame.length)), pa.string())

    return texts


@function("Rand", "Randn", "Uuid")
def _random(call: Call, arguments: Sequence[Evaluator]) -> Evaluator:
    def numbers(frame: Frame) -> Value:
        generator = generator_of(frame)
        of_rows = generator.random if call.function == "Rand" else generator.standard_normal
        return pa.array(of_rows(frame.length))

    def names(frame: Frame) -> Value:
        assert frame.random_bytes is not None
        data = frame.random_bytes(16 * frame.length)
        return pa.array((_uuid(data[at : at + 16]) for at in range(0, len(data), 16)), pa.string())

    return names if call.function == "Uuid" else numbers


def _uuid(data: bytes) -> str:
    """The text of a UUID of version 4 from 16 random bytes."""
    digits = data.hex()
    variant = "89ab"[data[8] & 3]
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-{variant}{digits[17:20]}-{digits[20:]}"
