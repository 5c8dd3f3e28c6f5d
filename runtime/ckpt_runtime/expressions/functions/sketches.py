"""HyperLogLog, theta and KLL sketches of Apache DataSketches, in the bytes that Spark writes and reads.

HyperLogLog sketches have registers of eight bits and are written in their updatable form, theta sketches in their
compact and compressed form. Both have the seed that Spark uses, the default of the library.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from ckpt_runtime.expressions.evaluation import Value, strict
from ckpt_runtime.expressions.nodes import Call, Literal
from ckpt_runtime.expressions.rows import per_row
from ckpt_runtime.expressions.types import EvaluationError, UnsupportedExpressionError, value_type

THETA_SIZES = (5, 26)
"""The least and the greatest binary logarithm of a theta sketch's nominal entries. Spark also takes 4."""
_EMPTY_THETA = bytes((1, 3, 3, 0, 0, 0x1E, 0, 0))
_SINGLE_ITEM = 0x20
"""A bit of the sixth byte of a theta sketch."""
_DAMAGED = (ValueError, IndexError, RuntimeError, MemoryError)
"""What the library raises for bytes that are no sketch."""
_MOST_ROUNDED = 10_000_000
"""The number of values up to which Java rounds a rank, and the inverse of the unit to which it does."""


def sketch_library(function: str) -> Any:
    """Returns the module ``datasketches``. Raises UnsupportedExpressionError if it is not installed."""
    if find_spec("datasketches") is None:
        problem = "it needs a library where programs are planned and run: pip install 'ckpt-runtime[sketches]'"
        raise UnsupportedExpressionError(f"the function {function}", problem)
    return import_module("datasketches")


class _Form:
    """The sketches of one kind for a function. Raises UnsupportedExpressionError if the library is not installed."""

    def __init__(self, function: str) -> None:
        self.library = sketch_library(function)
        self._function = function


class HllForm(_Form):
    """Reads, unites and writes HyperLogLog sketches."""

    def read(self, data: bytes) -> Any:
        """Returns a sketch. Raises EvaluationError for bytes that are none."""
        return _read(lambda: self.library.hll_sketch.deserialize(data), "HLL", self._function)

    def union(self, sketches: list[Any], *, mixed: bool, size: int) -> Any:
        """Returns a union of this size, the binary logarithm of the number of registers.

        Raises EvaluationError for sketches of other sizes, unless these may be ``mixed``.
        """
        union = self.library.hll_union(size)
        for sketch in sketches:
            if not mixed and sketch.lg_config_k != size:
                raise EvaluationError(
                    "HLL_UNION_DIFFERENT_LG_K",
                    f"{self._function} got sketches of the sizes {size} and {sketch.lg_config_k}; its argument "
                    "allowDifferentLgConfigK allows it",
                )
            union.update(sketch)
        return union.get_result(self.library.tgt_hll_type.HLL_8)


class ThetaForm(_Form):
    """Reads, unites, intersects and writes theta sketches."""

    def read(self, data: bytes) -> Any:
        """Returns a sketch. Raises EvaluationError for bytes that are none."""
        return _read(lambda: self.library.compact_theta_sketch.deserialize(data), "THETA", self._function)

    def union(self, sketches: list[Any], size: int) -> Any:
        """Returns the union. ``size`` is the binary logarithm of its nominal entries."""
        return _result(self.library.theta_union(size), sketches)

    def intersection(self, sketches: list[Any]) -> Any:
        """Returns the intersection of one sketch or more."""
        return _result(self.library.theta_intersection(), sketches)

    @staticmethod
    def written(sketch: Any) -> bytes:
        """Returns the bytes that Java writes; the library writes other ones for sketches of no or of one entry."""
        if sketch.is_empty():
            return _EMPTY_THETA
        data = bytearray(sketch.serialize(True))
        if sketch.num_retained == 0:  # the probability of sampling, 1.0 as a float, is at these four bytes
            data[12:16] = struct.pack("<f", 1.0)
        if sketch.num_retained == 1 and not sketch.is_estimation_mode():
            data[5] |= _SINGLE_ITEM
        return bytes(data)


class KllForm(_Form):
    """Reads and writes KLL sketches of the type of values with which the name of Spark's function ends."""

    def __init__(self, function: str) -> None:
        super().__init__(function)
        library = self.library
        self._items: tuple[Any, ...] = ()
        if function.endswith("Bigint"):
            self._class, self._items = library.kll_items_sketch, (library.PyLongsSerDe(),)
        elif function.endswith("Double"):
            self._class = library.kll_doubles_sketch
        else:
            self._class = library.kll_floats_sketch

    def empty(self, k: int) -> Any:
        """Returns a sketch without values; ``k`` sets its size and its error."""
        return self._class(k)

    def read(self, data: bytes) -> Any:
        """Returns a sketch. Raises EvaluationError for bytes that are none."""
        return _read(lambda: self._class.deserialize(data, *self._items), "KLL", self._function)

    def written(self, sketch: Any) -> bytes:
        """Returns the bytes of a sketch."""
        return bytes(sketch.serialize(*self._items))


def _read(read: Callable[[], Any], kind: str, function: str) -> Any:
    try:
        return read()
    except _DAMAGED as error:
        raise EvaluationError(f"{kind}_INVALID_INPUT_SKETCH_BUFFER", f"{function} got other bytes: {error}") from None


def _result(operation: Any, sketches: list[Any]) -> Any:
    for sketch in sketches:
        operation.update(sketch)
    return operation.get_result()


@strict("HllSketchEstimate", "HllUnion")
def _hll(call: Call) -> Callable[..., Value]:
    form = HllForm(call.function)

    def estimate(data: bytes) -> int:
        return int(form.read(data).get_estimate() + 0.5)

    def union(first: bytes, second: bytes, mixed: bool) -> bytes:
        sketches = [form.read(first), form.read(second)]
        sizes = [sketch.lg_config_k for sketch in sketches]
        united = form.union(sketches, mixed=mixed, size=min(sizes) if mixed else sizes[0])
        return bytes(united.serialize_updatable())

    return per_row(estimate if call.function == "HllSketchEstimate" else union, value_type(call.type))


@strict("ThetaSketchEstimate", "ThetaUnion", "ThetaIntersection", "ThetaDifference")
def _theta(call: Call) -> Callable[..., Value]:
    form = ThetaForm(call.function)
    size = _theta_size(call)

    def estimate(data: bytes) -> int:
        return int(form.read(data).get_estimate() + 0.5)

    def combined(first: bytes, second: bytes, *_: int) -> bytes:
        sketches = [form.read(first), form.read(second)]
        if call.function == "ThetaUnion":
            return form.written(form.union(sketches, size))
        if call.function == "ThetaIntersection":
            return form.written(form.intersection(sketches))
        return form.written(form.library.theta_a_not_b().compute(*sketches))

    return per_row(estimate if call.function == "ThetaSketchEstimate" else combined, value_type(call.type))


def _theta_size(call: Call) -> int:
    """Returns the size that a function of two theta sketches gets. Raises UnsupportedExpressionError for others."""
    if len(call.arguments) < 3:
        return 12
    given = call.arguments[2]
    least, most = THETA_SIZES
    if not isinstance(given, Literal) or given.value is None or not least <= int(given.value) <= most:
        raise UnsupportedExpressionError(
            f"the function {call.function}", f"lgNomEntries must be a constant from {least} to {most}"
        )
    return int(given.value)


_KLL = [
    f"KllSketch{function}{kind}"
    for function in ("Merge", "GetN", "GetQuantile", "GetRank")
    for kind in ("Bigint", "Float", "Double")
]


@strict(*_KLL)
def _kll(call: Call) -> Callable[..., Value]:
    form = KllForm(call.function)

    def of_each(compute: Callable[[Any, Any], Any]) -> Callable[[bytes, Any], Any]:
        def run(data: bytes, asked: Any) -> Any:
            sketch = form.read(data)
            if sketch.is_empty():
                raise EvaluationError("KLL_INVALID_INPUT_SKETCH_BUFFER", f"{call.function} got a sketch without values")
            if isinstance(asked, list):
                return [compute(sketch, each) for each in asked]
            return compute(sketch, asked)

        return run

    # In Java the least and the greatest value always count once, also if the sketch has dropped them.
    def quantile(sketch: Any, rank: float) -> Any:
        if not 0.0 <= rank <= 1.0:
            raise EvaluationError(
                "KLL_SKETCH_INVALID_QUANTILE_RANGE", f"{call.function} got rank {rank}, allowed are 0 to 1"
            )
        # Java rounds what the library does not: a rank of 0.1 among 30 values is the third, not the fourth.
        place: float = rank * sketch.n
        if sketch.n <= _MOST_ROUNDED:
            place = math.floor(place * _MOST_ROUNDED + 0.5) / _MOST_ROUNDED
        place = math.ceil(place)
        if place <= 1:
            return sketch.get_min_value()
        return sketch.get_max_value() if place >= sketch.n else sketch.get_quantile((place - 0.5) / sketch.n, True)

    def rank(sketch: Any, value: Any) -> Any:
        if value >= sketch.get_max_value():
            return 1.0
        least = 1 / sketch.n if value >= sketch.get_min_value() else 0.0
        return min(max(sketch.get_rank(value, True), least), (sketch.n - 1) / sketch.n)

    def merged(first: bytes, second: bytes) -> bytes:
        sketch = form.read(first)
        sketch.merge(form.read(second))
        return form.written(sketch)

    def count(data: bytes) -> int:
        return int(form.read(data).n)

    computed: dict[str, Callable[..., Any]] = {
        "Merge": merged,
        "GetN": count,
        "GetQuantile": of_each(quantile),
        "GetRank": of_each(rank),
    }
    name = call.function.removeprefix("KllSketch")
    found = next(compute for start, compute in computed.items() if name.startswith(start))
    return per_row(found, value_type(call.type))
