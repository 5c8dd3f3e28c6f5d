"""Functions of vectors, which are arrays of floats: norms, distances, products.

Spark adds the terms of eight elements from left to right before it adds them to a total, and the last elements, fewer
than eight, one by one, all as doubles. Sums are computed here in the same order, for all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ckpt_runtime.expressions.evaluation import Value, broadcast, strict
from ckpt_runtime.expressions.nodes import Call
from ckpt_runtime.expressions.types import EvaluationError

_BLOCK = 8


class _Vectors:
    """Arrays of floats without null arrays: their ``elements`` as doubles, where each one starts, and its length.

    ``partial`` is true for arrays with a null in them.
    """

    def __init__(self, arrays: pa.Array) -> None:
        elements = arrays.flatten()
        self.lengths: np.ndarray = arrays.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
        self.starts: np.ndarray = np.cumsum(self.lengths) - self.lengths
        self.elements: np.ndarray = elements.fill_null(0.0).to_numpy(zero_copy_only=False).astype(np.float64)
        self.partial: np.ndarray = np.zeros(len(arrays), dtype=np.bool_)
        if elements.null_count:
            rows = np.repeat(np.arange(len(arrays)), self.lengths)
            self.partial[rows[np.asarray(elements.is_null())]] = True

    def sums(self, terms: np.ndarray) -> np.ndarray:
        """Returns the sum over each array of ``terms``, of which there is one for each element."""
        totals = np.zeros(len(self.lengths))
        blocks = self.lengths // _BLOCK
        for block in range(int(blocks.max(initial=0))):
            rows = np.flatnonzero(blocks > block)
            first = self.starts[rows] + _BLOCK * block
            part = terms[first]
            for place in range(1, _BLOCK):
                part = part + terms[first + place]
            totals[rows] += part
        behind = self.starts + _BLOCK * blocks
        for place in range(_BLOCK - 1):
            rows = np.flatnonzero(self.lengths - _BLOCK * blocks > place)
            totals[rows] += terms[behind[rows] + place]
        return totals

    def norms(self, degrees: np.ndarray) -> np.ndarray:
        """Returns the norm of each array. Raises EvaluationError for a degree other than 1, 2 and infinity."""
        absolute = np.abs(self.elements)
        norms = np.zeros(len(self.lengths))
        filled = np.flatnonzero(self.lengths)
        if len(filled):
            norms[filled] = np.maximum.reduceat(absolute, self.starts[filled])
        for degree in np.unique(degrees[~np.isposinf(degrees)]):
            if degree not in (1.0, 2.0):
                raise EvaluationError(
                    "INVALID_VECTOR_NORM_DEGREE", f"the degree of a norm is {degree}, not 1, 2 or inf"
                )
            rows = degrees == degree
            found = self.sums(absolute) if degree == 1.0 else np.sqrt(self.sums(self.elements * self.elements))
            norms[rows] = found[rows]
        return norms


def _of_present(compute: Callable[..., pa.Array]) -> Callable[..., Value]:
    """Returns a kernel that calls ``compute`` with the rows in which no argument is null; the others are null."""

    def run(*values: Value) -> Value:
        length = next((len(value) for value in values if not isinstance(value, pa.Scalar)), None)
        if length is None:
            return run(*(pa.repeat(value, 1) for value in values))[0]
        columns = [broadcast(value, length) for value in values]
        present = columns[0].is_valid()
        for column in columns[1:]:
            present = pc.and_(present, column.is_valid())
        if present.true_count == length:
            return compute(*columns)
        results = compute(*(column.filter(present) for column in columns))
        places = pc.subtract(pc.cumulative_sum(present.cast(pa.int64())), 1)
        return results.take(pc.if_else(present, places, pa.scalar(None, pa.int64())))

    return run


def _floats(values: np.ndarray, missing: np.ndarray) -> pa.Array:
    with np.errstate(over="ignore"):
        return pa.array(values.astype(np.float32), mask=missing)


def _of_pairs(
    name: str, compute: Callable[[_Vectors, np.ndarray, np.ndarray], tuple[np.ndarray, Any]]
) -> Callable[..., Value]:
    """Returns a kernel of two vectors. ``compute`` gets one of them and the elements of both, and returns results, and
    which of them are null.
    """

    def run(left: pa.Array, right: pa.Array) -> pa.Array:
        first, second = _Vectors(left), _Vectors(right)
        differ = np.flatnonzero(first.lengths != second.lengths)
        if len(differ):
            sizes = f"{first.lengths[differ[0]]} and {second.lengths[differ[0]]}"
            raise EvaluationError("VECTOR_DIMENSION_MISMATCH", f"{name} gets vectors of {sizes} elements")
        with np.errstate(all="ignore"):
            results, missing = compute(first, first.elements, second.elements)
        return _floats(results, first.partial | second.partial | missing)

    return _of_present(run)


def _cosine(vectors: _Vectors, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, Any]:
    scale = np.sqrt(vectors.sums(left * left) * vectors.sums(right * right))
    return vectors.sums(left * right) / scale, scale == 0.0


def _distance(vectors: _Vectors, left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, Any]:
    return np.sqrt(vectors.sums((left - right) * (left - right))), False


@strict("VectorCosineSimilarity")
def _vector_cosine_similarity(_: Call) -> Callable[..., Value]:
    return _of_pairs("vector_cosine_similarity", _cosine)


@strict("VectorInnerProduct")
def _vector_inner_product(_: Call) -> Callable[..., Value]:
    return _of_pairs("vector_inner_product", lambda vectors, left, right: (vectors.sums(left * right), False))


@strict("VectorL2Distance")
def _vector_l2_distance(_: Call) -> Callable[..., Value]:
    return _of_pairs("vector_l2_distance", _distance)


def _degrees(column: pa.Array) -> np.ndarray:
    found: np.ndarray = column.to_numpy(zero_copy_only=False)
    return found


@strict("VectorNorm")
def _vector_norm(_: Call) -> Callable[..., Value]:
    def run(arrays: pa.Array, degrees: pa.Array) -> pa.Array:
        vectors = _Vectors(arrays)
        with np.errstate(all="ignore"):
            return _floats(vectors.norms(_degrees(degrees)), vectors.partial)

    return _of_present(run)


@strict("VectorNormalize")
def _vector_normalize(_: Call) -> Callable[..., Value]:
    def run(arrays: pa.Array, degrees: pa.Array) -> pa.Array:
        vectors = _Vectors(arrays)
        with np.errstate(all="ignore"):
            norms = vectors.norms(_degrees(degrees))
            elements = (vectors.elements / np.repeat(norms, vectors.lengths)).astype(np.float32)
        offsets = np.append(vectors.starts, len(elements)).astype(np.int32)
        missing = vectors.partial | ((norms == 0.0) & (vectors.lengths > 0))
        return pa.ListArray.from_arrays(pa.array(offsets), pa.array(elements), mask=pa.array(missing))

    return _of_present(run)
